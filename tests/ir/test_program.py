"""The text of a tile program tells every decision: a change of any field of it or of a statement changes the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import get_args

import pytest
from tests.support.corpus import CASES
from tests.support.one_kernel import capture, one_kernel

from tilewright.ir.dtype import bool_, i64
from tilewright.ir.expr import Axis, Expr, const, integer, make
from tilewright.ir.program import (
    Branch,
    Buffer,
    Check,
    Collapse,
    Compute,
    Declare,
    Descriptor,
    Dot,
    GridAxis,
    Load,
    Loop,
    Nest,
    Stmt,
    Store,
    StoredBlock,
    TileProgram,
    Update,
    Var,
)
from tilewright.ir.selection import (
    Access,
    ElementRun,
    InterleavedStore,
    MatrixMultiply,
    MicroKernel,
    RegisterLoop,
)
from tilewright.lower.legalise.cpu import legalise_for_cpu
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import PRESETS

OTHER = Axis("other", integer(3))
SELECTED = (Access, MatrixMultiply, MicroKernel, RegisterLoop, ElementRun, InterleavedStore)
STATEMENTS = (*get_args(Stmt), TileProgram, Descriptor, GridAxis, Buffer, *SELECTED)
SILENT = {
    "notes": "are told to people, and no part of a program",
    "place": "parameters and scratch stand in different lists",
    "reduction": "goes by its name",
    "buffer": "goes by its name, and is told of in the head",
}
"""Fields that are not tried, and why."""


def others(x: object) -> Iterator[object]:
    """Values that differ from `x` in one place."""
    match x:
        case bool():
            yield not x
        case int():
            yield x + 1
        case str():
            yield f"other {x}"
        case None:
            yield const(True, bool_)
        case Expr():
            yield make("not", (x,), bool_) if x.dtype is bool_ else make("neg", (x,), x.dtype)
        case Axis():
            yield OTHER
        case tuple():
            yield from (x[:k] + (y,) + x[k + 1 :] for k, part in enumerate(x) for y in others(part))
        case Var():
            yield replace(x, id=x.id + 100)
        case _ if isinstance(x, STATEMENTS):
            yield from changes(x)
        case _:
            pass


def changes(x: object) -> Iterator[object]:
    """`x` with one field changed, each in turn."""
    for f in fields(x):  # type: ignore[arg-type]
        if f.name in SILENT:
            continue
        value = getattr(x, f.name)
        if f.name in ("lane", "beside", "along"):
            yield replace(x, **{f.name: OTHER if value is None else None})  # type: ignore[type-var]
        elif f.name == "axes":
            yield replace(x, axes=(*value, Axis("more", integer(2))))  # type: ignore[type-var]
        elif value is None and f.name in ("descriptor", "other", "block"):
            continue
        elif isinstance(x, Load) and f.name == "at" and x.descriptor is None:
            continue
        elif isinstance(x, (TileProgram, Loop, Branch, Nest)) and f.name in ("body", "orelse"):
            for k, s in enumerate(value or ()):
                for y in others(s):
                    yield replace(x, **{f.name: value[:k] + (y,) + value[k + 1 :]})  # type: ignore[type-var]
        elif isinstance(x, MicroKernel) and f.name == "factor":
            yield replace(x, factor=(value or 0) + 1)
        elif not (isinstance(x, Buffer) and f.name != "size"):
            for y in others(value):
                yield replace(x, **{f.name: y})  # type: ignore[type-var]


@pytest.mark.parametrize("machine", ["x86-64-v4", "sm_90"])
def test_a_change_of_any_field_changes_the_text(machine: str) -> None:
    solver = Solver(PRESETS[machine], Options())
    tried: set[type] = set()
    for case in CASES:
        graph = capture(case, False)
        made = solver.solve(one_kernel(graph), graph.layouts).program
        assert isinstance(made, TileProgram)
        legalise = legalise_for_gpu if machine.startswith("sm") else legalise_for_cpu
        program = legalise(made, PRESETS[machine])
        text = program.show()
        tried |= {type(s) for s in program.statements()}
        for other in changes(program):
            assert isinstance(other, TileProgram)
            assert other == program or other.show() != text
    assert {Load, Compute, Store, Declare, Update, Collapse, Loop} <= tried


X = Var(0, i64, (OTHER,))
ROWS = Descriptor(integer(0), (integer(8),), (integer(1),), (4,))
BUFFER = Buffer("p0", i64, integer(64))


@pytest.mark.parametrize(
    "statement",
    [
        Load(X, BUFFER, integer(0), descriptor=ROWS, at=(integer(2),)),
        Dot(X, X, X, Axis("k", integer(4)), 8),
        Dot(X, X, X, Axis("k", integer(4)), 8, MatrixMultiply("turned", "bf16x6")),
        Dot(X, X, X, Axis("k", integer(4)), 8, MicroKernel(6, 4, "scaled", 3)),
        Load(X, BUFFER, integer(0), access=Access("dense", Axis("k", integer(4)))),
        Load(
            X, BUFFER, integer(0), access=Access("turned", Axis("k", integer(4)), at_once=True, unrolled=True)
        ),
        Load(X, BUFFER, integer(0), runs=(ElementRun(Axis("k", integer(4)), 4, 8),)),
        Store(BUFFER, integer(0), integer(1), runs=(ElementRun(Axis("k", integer(4)), 4, 8),)),
        Store(
            BUFFER,
            integer(0),
            integer(1),
            interleaved=InterleavedStore(Axis("r", integer(4)), Axis("c", integer(4)), 2, 16, 8),
        ),
        Store(BUFFER, integer(0), integer(1), block=StoredBlock(ROWS, (integer(2),), 2)),
        Nest(
            (RegisterLoop(Axis("j", integer(3)), 3), RegisterLoop(Axis("k", integer(4)), 4, True)),
            (Compute(X, integer(1)),),
            (0,),
            const(True, bool_),
        ),
        Check(const(True, bool_), 1, (Axis("k", integer(4)),)),
        Branch(const(True, bool_), (Compute(X, integer(1)),), (Compute(X, integer(2)),)),
    ],
    ids=lambda s: type(s).__name__,
)
def test_of_statements_that_few_programs_have(statement: Stmt) -> None:
    program = TileProgram((BUFFER,), (), (statement,))
    assert len({p.show() for p in (program, *changes(program))}) == 1 + len(list(changes(program)))  # type: ignore[attr-defined]


def test_the_types_of_values_are_told() -> None:
    narrow = TileProgram((BUFFER,), (), (Compute(X, integer(1)),))
    wide = TileProgram((BUFFER,), (), (Compute(Var(0, bool_, (OTHER,)), integer(1)),))
    assert narrow.show() != wide.show() and "v0<other>:i64 = 1" in narrow.show()
