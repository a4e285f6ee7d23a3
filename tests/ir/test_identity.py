"""Whatever differs has another identity: each field of each value that the phases hand on, by its declared type."""

from __future__ import annotations

import collections.abc
import importlib
import itertools
import os
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.ir import reduction
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import bool_, f16, f32, f64, i32
from tilewright.ir.expr import Axis, Expr, Slot, Symbol, axis, call, const, integer, make, read, slot, symbol
from tilewright.ir.graph import Graph, LibraryCall, Spare
from tilewright.ir.identity import TOLD, counted_fields, identity
from tilewright.ir.kernel import Kernel
from tilewright.ir.reduction import Reduction
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.partition.memo import task_of
from tilewright.schedule.solver import kernel_key

ROOMS = (
    "ir.dtype", "ir.expr", "ir.reduction", "ir.tensor", "ir.task", "ir.graph", "ir.kernel", "ir.program.statements",
    "ir.program.tile_program", "ir.form", "ir.schedule", "partition.memo", "plan.data",
)  # fmt: skip

TOLD_ONLY = {
    "Value.id", "Origin.id", "Origin.name", "Origin.place", "Origin.node", "Precondition.op", "Precondition.place",
    "Precondition.why",
    "Op.name", "Op.origin", "Op.absorbed", "Graph.origins", "Kernel.reason", "LibraryStep.origins", "TileProgram.notes",
    "LibraryCall.spare", "LibraryCall.refused",
}  # fmt: skip
"""Fields that decide nothing: another one must be written down here, and why at its place."""

LABELS = {"Op.kernel"}
"""Fields of numbers that only say what belongs together."""


def values_of_ours() -> list[type]:
    """Every dataclass that phases hand on."""
    found: dict[type, None] = {}
    for room in ROOMS:
        module = importlib.import_module(f"tilewright.{room}")
        own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        found |= dict.fromkeys(c for c in own if is_dataclass(c))
    return list(found)


OURS = values_of_ours()


def first() -> None:
    """One function."""


def second() -> None:
    """Another one."""


def samples(kind: Any) -> Iterator[Any]:
    """Two values of a declared type, or more, that differ."""
    plain: dict[Any, tuple[Any, ...]] = {
        bool: (False, True), int: (3, 5, -1), float: (0.5, -0.0, 0.0), str: ("some", "other"), object: (1, 1.0, True),
        Expr: (integer(7), symbol("n", 1, 9), symbol("n", 2, 9)), type(None): (None,), Tensor: (torch.ones(2),),
        Spare: (Spare(LibraryCall("spare", first, ())),),
    }  # fmt: skip
    if kind in plain:
        yield from plain[kind]
    elif isinstance(kind, type) and issubclass(kind, Enum):
        yield from list(kind)[:2]
    elif isinstance(kind, type) and is_dataclass(kind):
        one = sample(kind)
        yield one
        yield from (other for _, other in itertools.islice(changed(one), 1))  # none without fields
    else:
        yield from composed(kind)


def composed(kind: Any) -> Iterator[Any]:
    """Of unions, containers and functions."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for option in args:
            yield from samples(option)
    elif origin is typing.Literal:
        yield from args
    elif origin is tuple:
        if Ellipsis in args:  # first, since types may contain themselves
            yield ()
        each = [list(samples(a)) for a in args if a is not Ellipsis]
        yield tuple(e[0] for e in each)
        yield tuple(e[-1] for e in each)
        if Ellipsis in args:
            yield (each[0][0], each[0][0])
    elif origin is frozenset:
        yield frozenset()
        yield frozenset(list(samples(args[0]))[:1])
    elif origin is collections.abc.Mapping:
        key, value = (list(samples(a)) for a in args)
        yield {key[0]: value[0]}
        yield {key[0]: value[-1]}
        yield {}
    elif origin is collections.abc.Callable:
        yield from (first, second, partial(first), partial(second))
    else:
        raise AssertionError(f"no samples of {kind!r}: write some down")


def sample(of: type) -> Any:
    """One value of a dataclass."""
    hints = hints_of(of)
    return of(**{f.name: next(samples(hints[f.name])) for f in fields(of)})


def hints_of(of: type) -> Mapping[str, Any]:
    return typing.get_type_hints(of)


def changed(value: Any, only: str = "") -> Iterator[tuple[str, Any]]:
    """The value with one field changed, for each other sample of each field that counts."""
    hints = hints_of(type(value))
    for name in [only] if only else counted_fields(type(value)):
        held = getattr(value, name)
        for other in samples(hints[name]):
            together = f"{type(value).__name__}.{name}" in LABELS and min(other, held) >= 0
            if not same(other, held) and not together:
                yield name, replace(value, **{name: other})


def same(a: Any, b: Any) -> bool:
    return identity(a) == identity(b) if is_dataclass(a) else type(a) is type(b) and repr(a) == repr(b)


@pytest.mark.parametrize("of", OURS, ids=lambda c: c.__name__)
def test_each_field_counts(of: type) -> None:
    value = sample(of)
    key = identity(value)
    assert key == identity(sample(of)) == identity(replace(value))
    tried = {name for name, other in changed(value) if identity(other) != key}
    assert tried == set(counted_fields(of))
    assert all(identity(other) != key for _, other in changed(value))
    for f in fields(of):
        if f.name not in counted_fields(of):
            assert all(identity(other) == key for _, other in changed(value, f.name))


def test_what_does_not_count_is_written_down() -> None:
    told = {f"{c.__name__}.{f.name}" for c in OURS for f in fields(c) if f.name not in counted_fields(c)}
    assert told == TOLD_ONLY


def test_a_new_field_counts_by_itself() -> None:
    @dataclass(frozen=True)
    class Later:
        kept: int
        added: int
        why: str = field(metadata=TOLD)

    assert identity(Later(1, 0, "")) == identity(Later(1, 0, "said")) != identity(Later(1, 2, ""))


def test_each_part_of_an_expression_counts() -> None:
    n, a = symbol("n", 1, 8), Axis("i", integer(4))
    different: list[Expr] = [
        const(1, f32), const(1, f64), const(1, i32), const(True, bool_), const(0.0, f32), const(-0.0, f32),
        const(float("nan"), f32), n, symbol("n", 1, 9), symbol("n", 0, 8), symbol("n", 1), symbol("m", 1, 8),
        axis(a), axis(replace(a, name="j")), axis(replace(a, extent=n)), slot("a", 0, f32), slot("b", 0, f32),
        slot("a", 1, f32), slot("a", 0, f64), read(0, (axis(a),), f32), read(1, (axis(a),), f32),
        read(0, (n,), f32), read(0, (axis(a),), f16), call("lt", n, axis(a)), call("le", n, axis(a)),
        call("lt", axis(a), n), make("value", (), f32, (0, 1)), make("value", (), f32, (1, 0)),
        make("var", (), f32, 1), call("cast", n, dtype=f32), call("cast", n, dtype=f64),
        call("narrow", slot("a", 0, f32), dtype=f16), call("cast", slot("a", 0, f32), dtype=f16),
    ]  # fmt: skip
    assert len({identity(e) for e in different}) == len(different)


def test_numbers_of_other_types_are_others() -> None:
    different = [1, 1.0, True, "1", b"1", None, 0, -0.0, 0.0, False, 1 + 0j, (1,), [1], ((1,),), {1: 2}, {2: 1}, (),
                 torch.float32, torch.float64, torch.device("cpu"), Slot, Symbol]  # fmt: skip
    assert len({identity(x) for x in different}) == len(different)
    assert identity(1, 2) != identity((1, 2)) != identity(12)


def made(step: object, other: object = None) -> Callable[[], object]:
    return lambda: (step, other)


def test_functions_are_what_they_do() -> None:
    x = torch.ones(2)
    different = [first, second, made(1), made(2), made(None, 1), lambda: 1, lambda: 2, partial(made), len, max,
                 partial(made, 1), x.add, x.mul, torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar]  # fmt: skip
    assert len({identity(f) for f in different}) == len(different)
    assert identity(made(1)) == identity(made(1))


def test_what_has_no_identity_is_equal_to_itself_alone() -> None:
    class Foreign:
        pass

    one, other = Foreign(), Foreign()
    assert identity(one) == identity(one) != identity(other)
    assert identity((one, 1)) == identity((one, 1))
    key = identity(other)
    del other
    assert all(identity(Foreign()) != key for _ in range(100))


def kernel(reducer: Reduction, n: int = 8) -> tuple[Graph, Kernel]:
    b = Builder()
    x = b.value((integer(n),), f32)
    (a,) = output_axes(x.shape)
    body = (read(0, (axis(a),), f32), axis(a))[: len(reducer.elements)]
    outputs = b.emit("reduction", (x,), TensorExpr((), body, (a,), reducer))
    graph = b.finish((x,), outputs)
    return graph, Kernel(graph.ops, outputs)


def test_kernels_and_graphs_of_other_reductions_have_other_keys() -> None:
    """Each field of a reduction that keeps its name."""
    reducers = [reduction.argmax(f32), reduction.sum_(f32), reduction.moments(f32), reduction.logsumexp(f32)]
    reducers += [replace(reducers[0], name=f.name) for f in (reduction.argmin(f32),)]
    for reducer in reducers[:4]:
        others = [
            replace(reducer, name="other"),
            replace(reducer, identity=tuple(const(3, t) for t in reducer.state)),
            replace(reducer, lift=tuple(const(3, t) for t in reducer.state)),
            replace(reducer, merge=tuple(slot("a", k, t) for k, t in enumerate(reducer.state))),
            replace(reducer, finish=tuple(const(3, e.dtype) for e in reducer.finish)),
            replace(reducer, extreme="sum"),
            replace(
                reducer, step=reducer.state and tuple(slot("a", k, t) for k, t in enumerate(reducer.state))
            ),
            replace(reducer, pooled=tuple(slot("b", k, t) for k, t in enumerate(reducer.state))),
        ]
        made = [kernel(f) for f in (reducer, *others)]
        assert len({kernel_key(k, {}) for _, k in made}) == len(made)
        assert len({task_of(g) for g, _ in made}) == len({g.digest() for g, _ in made}) == len(made)


def test_equal_graphs_of_other_objects_are_one() -> None:
    (one, k), (other, twin) = kernel(reduction.sum_(f32)), kernel(reduction.sum_(f32))
    assert one.digest() == other.digest() and kernel_key(k, {}) == kernel_key(twin, {})
    moved = replace(twin.ops[0], name="said", origin=7, kernel=4)
    again = replace(twin.ops[0], origin=8, kernel=5)
    keys = {kernel_key(replace(twin, ops=(op,)), {}) for op in (moved, again)}
    assert len(keys) == 1 and kernel_key(twin, {}) not in keys


def test_what_a_call_computes_is_not_asked_by_who_covers_a_graph() -> None:
    def graph(**changes: Any) -> Graph:
        b = Builder()
        x = b.value((integer(4),), f32)
        of = replace(LibraryCall("sort", torch.sort, (), strides=((integer(1),),)), **changes)
        return b.finish((x,), b.library(of, (x,), ((x.shape, f32),)))

    one = graph()
    assert task_of(one) == task_of(graph(args=(1,), function=torch.cumsum, name="other"))
    assert one.digest() != graph(args=(1,)).digest() != graph(function=torch.cumsum).digest()
    for name in set(counted_fields(LibraryCall)) - {
        "name", "function", "args", "kwargs", "task",
    }:  # fmt: skip
        held = getattr(one.ops[0].call, name)
        hint = hints_of(LibraryCall)[name]
        other = next(o for o in samples(hint) if not same(o, held))
        assert task_of(graph(**{name: other})) != task_of(one), name


SCRIPT = """
from tests.ir.test_identity import kernel, reduction, f32, task_of
graph, _ = kernel(reduction.argmax(f32))
print(graph.digest(), task_of(graph))
"""


def test_an_identity_is_the_same_in_every_process() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", SCRIPT]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    graph, _ = kernel(reduction.argmax(f32))
    assert shown.split() == [graph.digest(), task_of(graph)]


def test_a_running_minimum_is_no_running_maximum() -> None:
    """Within one graph, and one graph behind the other through the cache."""
    x = torch.randn(33, 5)
    with torch.no_grad():
        for scan in (torch.cummin, torch.cummax):
            found = tilewright.compile(lambda a, scan=scan: scan(a, 0), (x,))
            torch.testing.assert_close(found(x), tuple(scan(x, 0)), rtol=0, atol=0)
        both = tilewright.compile(lambda a: (*torch.cummin(a, 0), *torch.cummax(a, 0)), (x,))
        wanted = (*torch.cummin(x, 0), *torch.cummax(x, 0))
        torch.testing.assert_close(both(x), wanted, rtol=0, atol=0)
        assert both.coverage.generated == both.coverage.ops
