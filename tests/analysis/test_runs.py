"""Which elements of an access lie side by side: what is told holds of every block."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from tilewright.analysis.runs import hidden_runs, interleaved_store, side_by_side
from tilewright.ir.expr import Axis, Expr, axis, integer, substitute, symbol
from tilewright.ir.selection import ElementRun
from tilewright.ir.sizes import dims

M, K = Axis("m", dims.integer(98)), Axis("k", dims.integer(216))
m, k = axis(M), axis(K)


def tap(channels: int, width: int, stride: int = 1) -> Expr:
    """An element of an image of 7 places a line, and 3 taps a line."""
    c = dims.integer(channels)
    kw, kh = dims.mod(dims.floordiv(k, c), integer(3)), dims.floordiv(k, dims.mul(c, integer(3)))
    w, h = dims.mod(m, integer(7)), dims.floordiv(m, integer(7))
    place = dims.add(dims.mul(dims.add(dims.mul(h, integer(stride)), kh), integer(width)),
                     dims.mul(w, integer(stride)), kw)  # fmt: skip
    return dims.add(dims.mul(place, c), dims.mod(k, c), integer(-3 * channels))


OFFSETS: Mapping[str, tuple[Expr, int, int]] = {
    "one place a step": (tap(24, 9), 8, 8),
    "two places a step": (tap(24, 15, 2), 8, 8),
    "four channels beside": (tap(12, 9), 4, 4),
    "odd": (tap(3, 9), 1, 1),
    "a power of two": (tap(32, 9), 32, 32),
    "shifted": (dims.add(tap(32, 9), integer(4)), 32, 4),
    "walked backwards": (dims.sub(integer(500), tap(32, 9)), 1, 1),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_what_is_told_is_so(name: str) -> None:
    offset, length, multiple = OFFSETS[name]
    tiles = {M: 16, K: 32}
    found = hidden_runs(offset, (M, K), tiles, {M, K})
    assert found == (
        (ElementRun(M, 1, found[0].multiple), ElementRun(K, length, multiple)) if length > 1 else ()
    )
    for a, run in zip((M, K), found, strict=bool(found)):
        other = K if a is M else M
        for first, beside in itertools.product(range(0, 96, run.length), range(0, 96, 5)):
            places = [value(offset, {a: first + n, other: beside}) for n in range(run.length)]
            assert places[0] % run.multiple == 0
            assert places == list(range(places[0], places[0] + run.length))


def value(e: Expr, at: Mapping[Axis, int]) -> int:
    number = dims.static(substituted(e, at))
    assert number is not None
    return number


def substituted(e: Expr, at: Mapping[Axis, int]) -> Expr:
    return substitute(e, {axis(a): integer(n) for a, n in at.items()})


def test_blocks_that_begin_anywhere_tell_nothing() -> None:
    assert not hidden_runs(tap(24, 9), (M, K), {M: 16, K: 32}, {M})


def test_what_is_linear_needs_no_word() -> None:
    linear = dims.add(dims.mul(m, integer(24)), k)
    assert not hidden_runs(linear, (M, K), {M: 16, K: 32}, {M, K})
    assert side_by_side(linear, (M, K), 16) == 8


def test_copies_of_sizes_that_are_not_known() -> None:
    n = symbol("n", 1)
    assert side_by_side(dims.add(dims.mul(m, n), k), (M, K), 16) == 16
    assert side_by_side(dims.add(dims.mul(m, dims.integer(147)), k), (M, K), 16) == 1


# --- axes that take turns ------------------------------------------------------------

ROWS, COLUMNS = Axis("r", dims.integer(1024)), Axis("c", dims.integer(64))
LEAST = 16


def shuffled(count: int, width: int) -> Expr:
    """An element of an image `width` places wide whose places become `count` squared ones of fewer channels."""
    r, c, n = axis(ROWS), axis(COLUMNS), dims.integer(count)
    w, h = dims.mod(r, dims.integer(width)), dims.floordiv(r, dims.integer(width))
    across, down = dims.mod(c, n), dims.mod(dims.floordiv(c, n), n)
    channel = dims.floordiv(c, dims.integer(count**2))
    line = dims.add(dims.mul(h, n), down)
    places = dims.integer(1024 * count**2)
    return dims.add(
        dims.mul(channel, places), dims.mul(line, dims.integer(width * count)), dims.mul(w, n), across
    )


@pytest.mark.parametrize(
    ("count", "width", "length"), [(2, 64, 128), (2, 24, 16), (4, 32, 128), (2, 8, 16), (8, 4, 32)]
)
@pytest.mark.parametrize("turned", [False, True])
def test_turns_are_as_they_are_told(count: int, width: int, length: int, *, turned: bool) -> None:
    offset, tiles = shuffled(count, width), {ROWS: 128, COLUMNS: 32}
    axes = (COLUMNS, ROWS) if turned else (ROWS, COLUMNS)
    found = interleaved_store(offset, axes, tiles, {ROWS, COLUMNS}, LEAST)
    assert found is not None
    assert (found.rows, found.columns, found.count, found.length) == (ROWS, COLUMNS, count, length)
    rows = length // count
    for first, beside in itertools.product(range(0, 256, rows), range(0, 64, count)):
        run = [
            value(offset, {ROWS: first + r, COLUMNS: beside + c}) for r in range(rows) for c in range(count)
        ]
        assert run == list(range(run[0], run[0] + length))
        assert run[0] % found.multiple == 0


@pytest.mark.parametrize(
    ("offset", "even"),
    [
        (shuffled(2, 7), {ROWS, COLUMNS}),  # turns of fewer than are stored at once
        (shuffled(2, 64), {COLUMNS}),  # a block may begin in the middle of a line
        (shuffled(16, 4), {ROWS, COLUMNS}),  # columns are enough
        (shuffled(1, 64), {ROWS, COLUMNS}),  # rows alone
        (dims.add(dims.mul(axis(ROWS), symbol("n", 1)), axis(COLUMNS)), {ROWS, COLUMNS}),
    ],
    ids=["short", "anywhere", "columns", "rows", "unknown"],
)
def test_other_axes_take_no_turns(offset: Expr, even: set[Axis]) -> None:
    assert interleaved_store(offset, (ROWS, COLUMNS), {ROWS: 128, COLUMNS: 32}, even, LEAST) is None
