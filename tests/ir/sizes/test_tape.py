"""A tape of sizes against each expression by itself, whatever changed before."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.ir.dtype import bool_, f64, i64
from tilewright.ir.expr import Expr, const, integer, make, symbol
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.host import size
from tilewright.ir.sizes.tape import SizeTape

NAMES = ("a", "b", "c")
LEAVES = [*(symbol(n) for n in NAMES), *map(integer, (0, 1, 2, 7))]
BINARY = (dims.add, dims.sub, dims.mul, dims.floordiv, dims.mod, dims.maximum, dims.minimum)
EXPRS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.builds(lambda rule, x, y: rule(x, y), st.sampled_from(BINARY), inner, inner),
    max_leaves=8,
)
SIZES = st.fixed_dictionaries({n: st.integers(0, 9) for n in NAMES})


def chosen(x: Expr, y: Expr) -> Expr:
    """y if x is 0, else x, through types of its own."""
    return make("where", (make("eq", (x, integer(0)), bool_), y, x), i64)


@settings(max_examples=60, deadline=None)
@given(st.lists(EXPRS, min_size=1, max_size=5), st.lists(SIZES, min_size=2, max_size=6))
def test_each_number_is_what_its_expression_says(exprs: list[Expr], order: list[dict[str, int]]) -> None:
    exprs = [*exprs, chosen(exprs[0], exprs[-1])]
    tape = SizeTape(exprs)
    known, values, before = frozenset(NAMES), tape.start[:], dict[str, int]()
    passes = {
        moved: tape.pass_of(frozenset(moved), known, [exprs[:2], [], exprs])
        for k in range(len(NAMES) + 1)
        for moved in itertools.combinations(NAMES, k)
    }
    for sizes in (*order, *order, *order):  # a pass that is run again is another function
        moved = tuple(n for n in NAMES if before.get(n) != sizes[n])
        found = passes[moved].run(values, sizes)
        wanted = [size(e, sizes) for e in exprs]
        assert [values[tape.places[e]] for e in exprs] == wanted
        assert [list(row) for row in found] == [wanted[:2], [], wanted]
        assert all(type(values[tape.places[e]]) is int for e in exprs)
        before = sizes


def test_sizes_that_are_not_known_yet_or_no_longer() -> None:
    a, b = symbol("a"), symbol("b")
    total = dims.add(dims.mul(a, integer(3)), b)
    tape = SizeTape([a, b, total, integer(4)])
    values = tape.start[:]
    read = lambda: [values[tape.places[e]] for e in (a, b, total, integer(4))]  # noqa: E731
    for _ in range(3):
        tape.pass_of(None, {"a"}).run(values, {"a": 2})
        assert read() == [2, None, None, 4]
        tape.pass_of({"b"}, {"a", "b"}).run(values, {"a": 2, "b": 5})
        assert read() == [2, 5, 11, 4]
    later = tape.pass_of({"a", "b"}, {"b"})
    for b_is in (6, 7, 8):
        later.run(values, {"b": b_is})
        assert read() == [None, b_is, None, 4]


def test_numbers_that_are_not_whole_in_between() -> None:
    a = symbol("a")
    half = make("div", (make("cast", (a,), f64), const(2.0, f64)), f64)
    up = make("cast", (make("ceil", (half,), f64),), i64)
    tape = SizeTape([up, half])
    values, again = tape.start[:], tape.pass_of(None, {"a"})
    for n in (5, 4, 7, 0):
        again.run(values, {"a": n})
        assert values[tape.places[up]] == -(-n // 2) == size(up, {"a": n})
        assert values[tape.places[half]] == n // 2 == size(half, {"a": n})


@pytest.mark.parametrize("name", ["a' + x", "__import__('os')", "v", "s", "x0"])
def test_a_name_is_never_text_of_a_program(name: str) -> None:
    e = dims.add(symbol(name), integer(1))
    tape = SizeTape([e])
    values, again = tape.start[:], tape.pass_of(None, {name})
    for n in range(4):
        again.run(values, {name: n})
        assert values[tape.places[e]] == n + 1
