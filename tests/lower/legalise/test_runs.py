"""What is told of accesses follows from where blocks begin, and is no part of what a program means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tests.support.tile_programs import Vars, elementwise

from tilewright.emit.triton.kernel import emit_triton
from tilewright.interp.program import run_program
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, axis, call, const, integer
from tilewright.ir.program import (
    Buffer,
    Collapse,
    Compute,
    Declare,
    Load,
    Loop,
    Stmt,
    Store,
    TileProgram,
    Update,
    rewrite_body,
    value_of,
)
from tilewright.ir.reduction import sum_
from tilewright.ir.selection import ElementRun
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.runtime.cuda.kernels import usual
from tilewright.target import preset

GPU = preset("sm_90")


def copied(first: int) -> TileProgram:
    """A copy of 128 elements from `first` on, 64 at a time, that changes the places of pairs of 24."""
    program = elementwise(240, (f32,), f32, lambda x: x)
    (loop, _) = program.loops()
    c = axis(loop.axis)
    turned = dims.add(dims.mul(dims.sub(integer(9), dims.floordiv(c, integer(24))), integer(24)),
                      dims.mod(c, integer(24)))  # fmt: skip

    def change(s: Stmt) -> tuple[Stmt, ...] | None:
        return (replace(s, offset=turned, mask=None),) if isinstance(s, (Load, Store)) else None

    body = rewrite_body(loop.body, change)
    return replace(program, body=(replace(loop, start=integer(first), stop=integer(first + 128), body=body),))


def told(program: TileProgram) -> list[tuple[ElementRun, ...]]:
    """The runs of the accesses of a program, as they are legalised."""
    made = legalise_for_gpu(program, GPU).statements()
    return [s.runs for s in made if isinstance(s, (Load, Store))]


def test_accesses_of_blocks_that_begin_evenly_have_runs() -> None:
    program = copied(64)
    (loop,) = program.loops()
    assert told(program) == [(ElementRun(loop.axis, 8, 8),)] * 2
    assert told(copied(3)) == [(), ()], "eight elements from 3 on lie in two places"


def test_what_is_around_a_loop_decides_only_outside() -> None:
    """A block axis that begins evenly around another loop begins so inside it as well."""
    program = copied(64)
    (loop,) = program.loops()
    one = Loop(elementwise(7, (f32,), f32, lambda x: x).loops()[0].axis, integer(3), integer(5), 1, loop.body)
    assert told(replace(program, body=(replace(loop, body=(one,)),))) == told(program)


def test_the_interpreter_ignores_them() -> None:
    program = copied(64)
    given = [np.arange(240.0, dtype=np.float32), None]
    for have, want in zip(
        run_program(legalise_for_gpu(program, GPU), given), run_program(program, given), strict=True
    ):
        np.testing.assert_array_equal(have, want)


def weighted(rows: int, columns: int) -> TileProgram:
    """y[r, c] = x[r, c] w[c] in blocks of both, with copies of w for all threads."""
    r, c, var = Axis("r", integer(rows)), Axis("c", integer(columns)), Vars()
    whole, line = dims.mul(r.extent, c.extent), c.extent
    x, w, y = Buffer("x", f32, whole), Buffer("w", f32, line), Buffer("y", f32, whole)
    at = dims.add(dims.mul(axis(r), line), axis(c))
    a, b, product = var(f32, r, c), var(f32, c), var(f32, r, c)
    body = (
        Load(a, x, at),
        Load(b, w, axis(c)),
        Compute(product, call("mul", value_of(a), value_of(b))),
        Store(y, at, value_of(product), (r, c)),
    )
    inner = Loop(c, dims.ZERO, c.extent, columns, body)
    outer = Loop(r, dims.ZERO, r.extent, rows, (inner,))
    return TileProgram((x, w, y), (), (outer,), lane=c, own_copies=True)


def test_each_thread_loads_what_lies_along_the_lane() -> None:
    program = weighted(4, 32)
    made = legalise_for_gpu(program, GPU)
    x, w = (s for s in made.statements() if isinstance(s, Load))
    assert not x.copied and w.copied == (program.loops()[0].axis,)
    assert "tl.load(p1 + tl.broadcast_to(" in emit_triton(made, (), usual(made)[0], "k0").text
    given = [np.arange(128.0, dtype=np.float32), np.arange(32.0, dtype=np.float32), None]
    np.testing.assert_array_equal(*(run_program(p, given, {})[-1] for p in (program, made)))
    others = legalise_for_gpu(replace(program, own_copies=False), GPU).statements()
    assert not any(s.copied for s in others if isinstance(s, Load))


def test_where_lanes_are_merged_nothing_is_copied() -> None:
    """A sum over copies would count an element more than once."""
    program = weighted(4, 32)
    outer, inner = program.loops()
    product = next(s.var for s in program.statements() if isinstance(s, Compute))
    total = replace(product, id=product.id + 1, axes=(inner.axis,))
    merged = Collapse((total,), (product,), sum_(f32), (outer.axis,))
    body = (replace(outer, body=(replace(inner, body=(*inner.body[:-1], merged)),)),)
    made = legalise_for_gpu(replace(program, body=body), GPU).statements()
    assert not any(s.copied for s in made if isinstance(s, Load))


def test_what_a_state_is_made_of_is_not_copied_along_an_axis_that_the_state_lacks() -> None:
    """A state of columns inside blocks of rows, and what is read for both."""
    program = weighted(4, 32)
    outer, inner = program.loops()
    x, w, product, store = inner.body
    assert (
        isinstance(x, Load)
        and isinstance(w, Load)
        and isinstance(product, Compute)
        and isinstance(store, Store)
    )
    state = replace(w.var, id=product.var.id + 1)
    own = replace(w, var=replace(w.var, id=state.id + 1))
    twice = Compute(replace(own.var, id=own.var.id + 1), call("add", value_of(own.var), value_of(own.var)))
    result = call("mul", value_of(product.var), value_of(state))
    body = (
        x, w, product, Declare((state,), (const(0.0, f32),)), own, twice,
        Update((state,), (value_of(twice.var),)), replace(store, value=result),
    )  # fmt: skip
    changed = replace(program, body=(replace(outer, body=(replace(inner, body=body),)),))
    made = legalise_for_gpu(changed, GPU)
    copied = {s.var.id: s.copied for s in made.statements() if isinstance(s, Load)}
    assert copied == {x.var.id: (), w.var.id: (outer.axis,), own.var.id: ()}
    emit_triton(
        made, (), usual(made)[0], "k0"
    )  # its printer refuses a state with elements it has no place for
    given = [np.arange(128.0, dtype=np.float32), np.arange(32.0, dtype=np.float32), None]
    want, got = (run_program(p, given, {})[-1] for p in (changed, made))
    np.testing.assert_array_equal(got, want)
