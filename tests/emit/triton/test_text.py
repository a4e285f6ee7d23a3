"""The printed Triton: goldens, what it must not contain, what is refused, and statements that few kernels have."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.emit.triton.blocks import blocked
from tests.support.tile_programs import M, N, Vars, dot_tiles, elementwise, matrices, row_sum, softmax
from tests.support.triton.harness import Job, build, interpret, print_triton, same_as_interpreter

from tilewright.emit.triton.kernel import Argument, TritonSource
from tilewright.errors import UnsupportedError, VerifyError
from tilewright.ir.dtype import DTYPES, DType, bool_, f16, f32, f64, i32, i64
from tilewright.ir.expr import Axis, Expr, axis, call, cast, const, integer
from tilewright.ir.program import (
    Branch,
    Buffer,
    Check,
    Collapse,
    Compute,
    Declare,
    GridAxis,
    Load,
    Loop,
    Prefix,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    value_of,
)
from tilewright.ir.reduction import any_, argmax, maximum, moments, product, sum_
from tilewright.ir.sizes import dims
from tilewright.lower.variants import GENERIC, Variant
from tilewright.target import preset

GPU = preset("sm_90")
FAST = Variant(aligned=True, wide=False)


def text(program: TileProgram, variant: Variant = FAST) -> str:
    return print_triton(program, ("n", "m"), GPU, variant, "k0").text


def row_norm() -> TileProgram:
    """y[r, :] = (x[r, :] - mean) * rsqrt(var + eps) in halves, a row of up to 1024 in one block."""
    r, c = Axis("r", N), Axis("c", M)
    var = Vars()
    x, y = (Buffer(b, f16, dims.mul(N, M)) for b in "xy")
    at, mask = dims.add(dims.mul(axis(r), M), axis(c)), call("lt", axis(c), M)
    v, w, q, one = var(f16, c), var(f32, c), var(f32, c), const(1, f32)
    state = moments()
    parts = [var(f32, c), w, var(f32, c)]
    merged = [var(t) for t in state.state]
    live = cast(mask, f32)
    scale = call("rsqrt", call("add", call("div", value_of(merged[2]), value_of(merged[0])), one))
    body = (
        Load(v, x, at, mask, const(0, f16)),
        Compute(parts[0], live),
        Compute(w, call("mul", live, cast(value_of(v), f32))),
        Compute(parts[2], const(0, f32)),
        Collapse(tuple(merged), tuple(parts), state, (c,)),
        Compute(q, call("sub", cast(value_of(v), f32), value_of(merged[1]))),
        Store(y, at, cast(call("mul", value_of(q), scale), f16), (c,), mask),
    )
    loop = Loop(c, dims.ZERO, integer(1024), 1024, body)
    return TileProgram((x, y), (GridAxis(r, N),), (loop,), lane=c, warps=4)


GOLDENS: dict[str, Callable[[], TileProgram]] = {
    "triton_row_norm": row_norm,
    "triton_blocks": blocked,
    "triton_softmax": lambda: replace(softmax(N, M, 1024, scratch=False), warps=4, stages=3),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(name, text(GOLDENS[name]()))


def test_goldens_mean_what_they_say(tmp_path: Path) -> None:
    def random(dtype: type, *shape: int) -> np.ndarray:
        return np.random.standard_normal(shape).astype(dtype)

    jobs = [
        Job(row_norm(), [random(np.float16, 3, 130), None], {"n": 3, "m": 130}, name="row norm"),
        Job(row_norm(), [random(np.float16, 2, 1024), None], {"n": 2, "m": 1024}, name="whole row"),
        Job(blocked(16), [random(np.float32, 17, 40), random(np.float32, 40), None], {"n": 17, "m": 40}, name="blocks"),
    ]  # fmt: skip
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome, rtol=2e-3, atol=2e-3)


def test_what_the_builder_is_told() -> None:
    source = print_triton(row_norm(), ("batch", "n", "m"), GPU, FAST, "k7")
    assert source.entry == "k7" and "def k7(p0, p1, n2, error):" in source.text
    assert source.arguments == (
        Argument("pointer", "p0", "*fp16", 0, True), Argument("pointer", "p1", "*fp16", 1, True),
        Argument("size", "n2", "i32", 2, True), Argument("error", "error", "*i32", 0, False),
    )  # fmt: skip
    assert source.divisible == (0, 1, 2) and (source.warps, source.stages) == (4, 1)
    generic = print_triton(row_norm(), ("batch", "n", "m"), GPU, GENERIC, "k7")
    assert generic.signature == {"p0": "*fp16", "p1": "*fp16", "n2": "i64", "error": "*i32"}
    assert generic.divisible == () and "tl.int64" in generic.text
    assert isinstance(source, TritonSource) and source == print_triton(
        row_norm(), ("batch", "n", "m"), GPU, FAST, "k7"
    )


def test_names_of_a_model_do_not_reach_the_text() -> None:
    odd = 'x"); import os; ("'
    c = Axis(odd, integer(32))
    x, y = Buffer(odd, f32, integer(32)), Buffer(odd + "2", f32, integer(32))
    v = Var(0, f32, (c,))
    body = (Load(v, x, axis(c)), Store(y, axis(c), value_of(v), (c,)))
    program = TileProgram((x, y), (), (Loop(c, dims.ZERO, integer(32), 32, body),), lane=c, notes=(odd,))
    assert "os" not in text(program)
    sizes = elementwise(N, (f32,), f32, lambda a: a)
    assert "def k0(p0, p1, n0, error)" in print_triton(sizes, ("n",), GPU, FAST, "k0").text


def single(expr: Callable[[Expr], Expr], dtype: DType = f32, tile: int = 32) -> TileProgram:
    """y = expr(x) on one block."""
    c = Axis("c", integer(tile))
    x, y = Buffer("x", dtype, integer(tile)), Buffer("y", dtype, integer(tile))
    v = Var(0, dtype, (c,))
    body = (Load(v, x, axis(c)), Store(y, axis(c), expr(value_of(v)), (c,)))
    return TileProgram((x, y), (), (Loop(c, dims.ZERO, integer(tile), tile, body),), lane=c)


def test_what_cannot_be_printed_is_refused() -> None:
    with pytest.raises(VerifyError, match="power of two"):
        text(single(lambda x: x, tile=48))
    with pytest.raises(VerifyError, match="scratch"):
        text(softmax(N, M))
    with pytest.raises(VerifyError, match="cpp"):
        print_triton(single(lambda x: x), (), preset("x86-64"), FAST, "k0")
    with pytest.raises(UnsupportedError, match="true division"):
        text(single(lambda x: call("div", x, x), i32))
    with pytest.raises(UnsupportedError, match="block of"):
        text(single(lambda x: x, tile=1 << 21))
    with pytest.raises(UnsupportedError, match="sqrt on i32"):
        text(single(lambda x: call("sqrt", x), i32))
    with pytest.raises(KeyError):
        print_triton(row_norm(), ("n",), GPU, FAST, "k0")


def test_a_value_is_rounded_once_when_it_is_stored() -> None:
    program = single(lambda x: call("narrow", call("mul", cast(x, f32), const(3, f32)), dtype=f16), f16)
    assert "(v0 * 3.0).to(tl.float16))" in text(program) and text(program).count(".to(tl.float16)") == 1


def test_masks_stand_only_where_the_program_has_them() -> None:
    assert "mask" not in text(single(lambda x: call("exp", x)))
    assert len(re.findall("mask=", text(row_norm()))) == 2


def test_a_step_function_sees_an_exact_quotient() -> None:
    stepped = text(single(lambda x: call("round", call("div", x, const(3, f32)))))
    assert "divide(v0, " in stepped and "tl.div_rn" in stepped
    to_integer = text(single(lambda x: cast(cast(call("div", x, const(3, f32)), i32), f32)))
    assert "divide(v0, " in to_integer
    assert "v0 / 3.0" in text(single(lambda x: call("add", call("div", x, const(3, f32)), x)))


def stored_at(offset: Callable[[Expr, Expr], Expr]) -> str:
    """The text of a block of ones written at `offset` of its row and its column."""
    r, c = Axis("r", N), Axis("c", M)
    y = Buffer("y", f32, dims.mul(N, dims.mul(M, integer(64))))
    body: tuple[Stmt, ...] = (Store(y, offset(axis(r), axis(c)), const(1, f32), (r, c)),)
    for a in (c, r):
        body = (Loop(a, dims.ZERO, integer(8), 8, body),)
    return text(TileProgram((y,), (), body, lane=c))


def test_no_sum_of_an_axis_with_itself_becomes_a_part_of_an_offset_unsaid() -> None:
    """The language's compiler (3.6) takes each element of a + a * n for as aligned as the first one is."""
    rows = stored_at(lambda r, c: dims.add(dims.mul(r, dims.add(N, M)), c))
    assert "(a0 * (n1 + n0))[:, None] + a1[None, :]" in rows
    assert "multiple_of" not in rows
    halves = stored_at(lambda r, c: dims.add(dims.add(r, dims.mul(dims.floordiv(r, integer(3)), N)), c))
    assert "tl.multiple_of(" in halves and ", [1])[:, None]" in halves
    assert "multiple_of" not in stored_at(lambda r, c: dims.add(dims.mul(r, M), c))


# --- statements that few kernels have --------------------------------------------------


def one_block(
    tile: int, cols: int, make: Callable[[Var, Axis, Axis], list[Stmt]], outs: list[Buffer]
) -> TileProgram:
    """x[tile, cols] loaded as one block; `make` does the rest."""
    r, c = Axis("r", integer(tile)), Axis("c", integer(cols))
    x = Buffer("x", f32, integer(tile * cols))
    v = Var(100, f32, (r, c))
    load = Load(v, x, dims.add(dims.mul(axis(r), c.extent), axis(c)))
    inner = Loop(c, dims.ZERO, c.extent, cols, (load, *make(v, r, c)))
    return TileProgram((x, *outs), (), (Loop(r, dims.ZERO, r.extent, tile, (inner,)),), lane=c)


def prefixes() -> TileProgram:
    """Running sums, maxima, products and arguments of the maximum along rows."""
    outs = [
        Buffer(n, t, integer(128)) for n, t in (("s", f32), ("m", f32), ("p", f64), ("w", f32), ("i", i64))
    ]

    def make(v: Var, r: Axis, c: Axis) -> list[Stmt]:
        var = Vars()
        at = dims.add(dims.mul(axis(r), c.extent), axis(c))
        wide, place = var(f64, r, c), var(i64, c)
        s, m, p, w, i = (var(b.dtype, r, c) for b in outs)
        return [
            Compute(wide, cast(value_of(v), f64)), Compute(place, axis(c)),
            Prefix((s,), (v,), sum_(f32), c), Prefix((m,), (v,), maximum(f32), c),
            Prefix((p,), (wide,), product(f64), c), Prefix((w, i), (v, place), argmax(f32), c),
            *(Store(b, at, value_of(u), (r, c)) for b, u in zip(outs, (s, m, p, w, i), strict=True)),
        ]  # fmt: skip

    return one_block(8, 16, make, outs)


def collapses() -> TileProgram:
    """Merges along either axis of a block, of values that lack an axis, and of small integers."""
    u8 = DTYPES["u8"]
    kinds = (("rows", f32, 8), ("columns", f32, 16), ("best", f32, 16), ("where", i64, 16), ("bytes", u8, 8),
             ("some", bool_, 8))  # fmt: skip
    outs = [Buffer(n, t, integer(k)) for n, t, k in kinds]

    def make(v: Var, r: Axis, c: Axis) -> list[Stmt]:
        var = Vars()
        place, small, truth = var(i64, r), var(u8, r, c), var(bool_, r, c)
        found = [var(f32, r), var(f32, c), var(f32, c), var(i64, c), var(u8, r), var(bool_, r)]
        return [
            Compute(place, axis(r)), Compute(small, cast(dims.mul(axis(c), axis(r)), u8)),
            Compute(truth, call("gt", value_of(v), const(2, f32))),
            Collapse((found[0],), (v,), sum_(f32), (c,)), Collapse((found[1],), (v,), maximum(f32), (r,)),
            Collapse((found[2], found[3]), (v, place), argmax(f32), (r,)),
            Collapse((found[4],), (small,), sum_(u8), (c,)),
            Collapse((found[5],), (truth,), any_(), (c,)),
            *(Store(b, axis(f.axes[0]), value_of(f), f.axes) for b, f in zip(outs, found, strict=True)),
        ]  # fmt: skip

    return one_block(8, 16, make, outs)


def checks() -> TileProgram:
    """A gather with a checked index, a branch, and a state that only one side of it changes."""
    c, k = Axis("c", integer(32)), Axis("k", integer(3))
    var = Vars()
    index, table, y = (
        Buffer("index", i64, integer(32)),
        Buffer("table", f32, integer(50)),
        Buffer("y", f32, integer(32)),
    )
    i, v, total, number = var(i64, c), var(f32, c), var(f32, c), var(f32)
    safe = call("minimum", call("maximum", value_of(i), const(0, i64)), const(49, i64))
    inside = call("and", call("ge", value_of(i), const(0, i64)), call("lt", value_of(i), const(50, i64)))
    body = (
        Load(i, index, axis(c)), Check(inside, 3, (c,), call("lt", axis(c), integer(30))), Load(v, table, safe),
        Declare((total, number), (value_of(v), const(0, f32))),
        Loop(k, dims.ZERO, integer(3), 1, (
            Branch(call("lt", axis(k), integer(2)),
                   (Update((total, number), (call("add", value_of(total), value_of(number)),
                                             call("add", value_of(number), const(1, f32))), None),),
                   (Update((total,), (call("neg", value_of(total)),), call("lt", axis(c), integer(7))),)),
        )),
        Store(y, axis(c), call("add", value_of(total), value_of(number)), (c,)),
    )  # fmt: skip
    return TileProgram((index, table, y), (), (Loop(c, dims.ZERO, integer(32), 32, body),), lane=c)


def large_integers() -> TileProgram:
    """Sum and maximum of 64-bit data, which 32 bits do not hold, and the place of the maximum, which they do."""
    c = Axis("c", M)
    var = Vars()
    x = Buffer("x", i64, M)
    outs = [Buffer(n, i64, integer(1)) for n in ("total", "most", "place", "beyond")]
    v = var(i64, c)
    states = [var(i64, c) for _ in range(3)]
    merged, place = [var(i64) for _ in range(3)], value_of(states[2])
    better = call("gt", value_of(v), value_of(states[1]))
    new = (
        call("add", value_of(states[0]), value_of(v)),
        call("maximum", value_of(states[1]), value_of(v)),
        call("where", better, axis(c), place),
    )
    first = (const(0, i64), const(-(1 << 63), i64), const(-1, i64))
    mask = call("lt", axis(c), M)
    loop = Loop(
        c, dims.ZERO, M, 32, (Load(v, x, axis(c), mask, const(0, i64)), Update(tuple(states), new, mask))
    )
    reductions = [sum_(i64), maximum(i64), maximum(i64)]
    ends = [Collapse((r,), (s,), f, (c,)) for r, s, f in zip(merged, states, reductions, strict=True)]
    results = [*map(value_of, merged), call("mul", value_of(merged[2]), const(1 << 33, i64))]
    stores = [Store(b, dims.ZERO, r) for b, r in zip(outs, results, strict=True)]
    return TileProgram((x, *outs), (), (Declare(tuple(states), first), loop, *ends, *stores), lane=c)


def foreign_masks() -> TileProgram:
    """Loads and stores whose masks have axes that their places lack."""
    r, c = Axis("r", integer(8)), Axis("c", integer(16))
    var = Vars()
    x, y, last = (
        Buffer("x", f32, integer(16)),
        Buffer("y", f32, integer(128)),
        Buffer("last", f32, integer(2)),
    )
    v, one, w = var(f32, r, c), var(f32, c), var(f32, r, c)
    above = call("lt", axis(c), dims.mul(axis(r), integer(2)))
    end = call("and", call("eq", axis(c), integer(15)), call("eq", axis(r), integer(7)))
    body = (
        Load(v, x, axis(c), above, cast(axis(r), f32)),
        Load(one, x, integer(3), call("ge", axis(c), integer(5)), const(-1, f32)),
        Compute(w, call("add", value_of(v), value_of(one))),
        Store(y, dims.add(dims.mul(axis(r), c.extent), axis(c)), value_of(w), (r, c)),
        Store(last, dims.ONE, value_of(w), (r, c), end),
        Store(last, dims.ZERO, const(7, f32), (r, c), call("lt", axis(r), integer(2))),
    )
    inner = Loop(c, dims.ZERO, c.extent, 16, body)
    return TileProgram((x, y, last), (), (Loop(r, dims.ZERO, r.extent, 8, (inner,)),), lane=c)


def test_states_take_the_bits_that_they_need() -> None:
    program = large_integers()
    kinds = re.findall(r"tl\.full\(\[32\], .*?, tl\.(int\d+)\)", text(program))
    assert kinds == ["int64", "int64", "int32"]
    assert "int32" not in text(program, GENERIC)


def statement_jobs() -> list[Job]:
    """A run of each of these programs."""
    x = np.random.standard_normal((8, 16)).astype(np.float32)
    x[3, 4] = x[3, 9] = np.nan
    index = np.random.randint(0, 50, 32)
    ones = np.ones((64, 128), np.float32)
    jobs = [
        Job(prefixes(), [x, *[None] * 5], {}, name="prefixes"),
        Job(collapses(), [x, *[None] * 6], {}, name="collapses"),
        Job(checks(), [index, np.arange(50, dtype=np.float32), None], {}, name="checks"),
        Job(
            large_integers(),
            [np.arange(70) * (1 << 50) - (1 << 54), *[None] * 4],
            {"n": 1, "m": 70},
            name="integers",
        ),
        Job(foreign_masks(), [np.arange(16, dtype=np.float32), None, None], {}, name="foreign masks"),
        Job(dot_tiles(16, 128, 32, 8, 64), [ones[:16, :32], ones[:32], None], {}, name="outer"),
        Job(
            row_sum(integer(3), integer(100), argmax(f32), tile=32),
            [ones[:3, :100], None, None],
            {},
            name="ties",
        ),
    ]
    for dtype in (f32, f16):
        a, b = (np.random.standard_normal(s).astype(np.float16) for s in ((32, 48), (48, 64)))
        given = [a.astype(f"f{dtype.bytes}"), b.astype(f"f{dtype.bytes}"), None]
        jobs += [Job(matrices(dtype, s), given, {}, name=f"{dtype} {s}") for s in (False, True)]
    return jobs


def test_statements(tmp_path: Path) -> None:
    jobs = statement_jobs()
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        assert outcome.error == 0
        same_as_interpreter(job, outcome, rtol=1e-4, atol=1e-4)


def test_a_failed_check_sets_the_error_word(tmp_path: Path) -> None:
    table = np.arange(50, dtype=np.float32)
    jobs: list[Job] = []
    for place, bad in [(5, 50), (5, -1), (31, 50), (5, 49)]:
        index = np.zeros(32, np.int64)
        index[place] = bad
        jobs.append(Job(checks(), [index, table, None], {}, name="check"))
    found = [o.error for o in interpret(tmp_path, jobs)]
    assert found == [3, 3, 0, 0], "the last two are masked, and inside"


def test_statements_build(tmp_path: Path) -> None:
    built = {j.name: build(tmp_path / str(k), j.source()) for k, j in enumerate(statement_jobs())}
    assert "mma.sync" in built["f16 False"].text
    large = print_triton(matrices(f16, False, 64), (), GPU, FAST, "k0")
    assert "tl.dot(v1, tl.trans(v2), v0)" in large.text
    whole = build(tmp_path / "large", large)
    assert "wgmma" in whole.text and "mma.sync" not in whole.text and 16 not in whole.accesses
    pieces = built["f32 False"].text
    assert "tf32" not in pieces and "f32.bf16.bf16.f32" in pieces, "fp32 is not rounded on the way"
    assert all(b.facts.spills == 0 for b in built.values())
