"""Which builds a kernel needs, and which calls may run them."""

from __future__ import annotations

import torch
from tests.support.corpus import Case
from tests.support.tile_programs import M, N, column_sum, elementwise, row_sum, softmax
from tests.support.triton.corpus import BY_NAME, entry

from tilewright.ir.dtype import f32, i64
from tilewright.ir.expr import Axis, axis, call, integer
from tilewright.ir.program import Var, value_of
from tilewright.ir.reduction import sum_
from tilewright.ir.sizes import dims
from tilewright.lower.variants import (
    GENERIC,
    NARROW_LIMIT,
    Variant,
    aligning,
    is_index,
    quotients,
    reach,
    variants,
)


def test_static_sizes_decide_the_width() -> None:
    small = row_sum(integer(100), integer(1000), sum_(f32))
    assert variants(small) == (Variant(True, False), Variant(False, False)) and reach(small) == ()
    large = row_sum(integer(1 << 20), integer(1 << 12), sum_(f32))
    assert variants(large) == (Variant(True, True), GENERIC)


def test_sizes_not_known_need_both_widths() -> None:
    program = softmax(N, M, scratch=False)
    assert variants(program) == (Variant(True, False), Variant(False, False), Variant(True, True), GENERIC)
    ends = reach(program)
    assert ends is not None
    for n, m, wide in [
        (5, 7, False),
        (1 << 16, 1 << 15, True),
        (1 << 15, 1 << 15, False),
        (1 << 32, 0, True),
    ]:
        found = any(dims.evaluate(e, {"n": n, "m": m}) > NARROW_LIMIT for e in ends)
        assert found == wide, (n, m)


def test_reach_covers_every_index_of_the_corpus() -> None:
    for name in ("column_sum", "batch_statistics", "attention"):
        program = entry(BY_NAME[name], True).scheduled.program
        ends = reach(program)
        assert ends is not None and variants(program)[0] == Variant(True, False), name
        assert all(x.op != "axis" for e in ends for x in dims.leaves(e, "axis")) and len(ends) <= 8


def test_alignment_asks_for_strides_and_ends_of_rows_only() -> None:
    assert aligning(softmax(N, M, scratch=False)) == ("m",)
    assert aligning(row_sum(N, M, sum_(f32))) == ("m",)
    assert aligning(column_sum(N, M)) == ("m",)
    assert aligning(row_sum(N, integer(64), sum_(f32))) == ()
    assert aligning(row_sum(N, integer(65), sum_(f32))) == ()
    assert aligning(entry(BY_NAME["chain"], True).scheduled.program) == (), "the end has a block of its own"
    pixels = entry(BY_NAME["group_norm_silu"], True)
    assert len(aligning(pixels.scheduled.program)) == 1, "one factor of h * w is enough"
    assert aligning(elementwise(integer(100), (f32,), f32, lambda x: x)) == ()


def test_half_a_row_is_known_to_be_a_multiple() -> None:
    """Of what a multiple of 16 leaves when it is halved, whichever way the program rounds."""

    def halves(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return first * torch.sigmoid(second)

    program = entry(Case("gate", halves, ((6, 64),), ({0: "n", 1: "m"},)), True).scheduled.program
    ((quotient, divisor),) = quotients(program).items()
    assert quotient.op == "floordiv" and divisor == 8 and aligning(program) != ()
    thirds = entry(Case("thirds", lambda x: x.chunk(3, -1)[1] + 1, ((6, 96),), ({0: "n", 1: "m"},)), True)
    assert not quotients(thirds.scheduled.program), "a third of 16 m is no multiple of anything"
    assert not quotients(softmax(N, M, scratch=False))


def test_what_is_an_index() -> None:
    c = axis(Axis("c", N))
    assert is_index(dims.add(dims.mul(c, M), dims.ONE))
    assert not is_index(call("lt", c, N)) and not is_index(value_of(Var(0, i64)))
    assert not is_index(call("where", call("lt", c, N), c, dims.ZERO))
