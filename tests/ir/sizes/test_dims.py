"""Index arithmetic in normal form against plain integers: every simplification, on every point of small
domains."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, Symbol, axis, integer, make, substitute, symbol, walk
from tilewright.ir.sizes import dims

N = symbol("n", 2)
M = symbol("m", 0, 5)
K = symbol("k", 1, 3)
SYMBOLS = {"n": (2, 3, 5), "m": (0, 1, 4, 5), "k": (1, 2, 3)}
AXES = (
    axis(Axis("i", integer(4))),
    axis(Axis("j", integer(6))),
    axis(Axis("p", N)),
    axis(Axis("q", dims.mul(K, integer(2)))),
    axis(Axis("z", M)),
)
BUILD = {
    "add": dims.add, "sub": dims.sub, "mul": dims.mul, "floordiv": dims.floordiv, "mod": dims.mod,
    "maximum": dims.maximum, "minimum": dims.minimum,
}  # fmt: skip
PLAIN = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "floordiv": lambda a,
    b: a // b,
    "mod": lambda a, b: a % b, "maximum": max, "minimum": min,
}  # fmt: skip


@dataclass(frozen=True)
class Tree:
    """An index expression as it was asked for, before any simplification."""

    op: str
    args: tuple[Tree | Expr, ...]

    def build(self) -> Expr:
        return BUILD[self.op](*[a.build() if isinstance(a, Tree) else a for a in self.args])

    def leaves(self) -> set[Expr]:
        found: set[Expr] = set()
        for a in self.args:
            found |= a.leaves() if isinstance(a, Tree) else {x for x in walk(a) if x.op in ("axis", "symbol")}
        return found

    def at(self, point: dict[str, int]) -> int:
        args = [a.at(point) if isinstance(a, Tree) else dims.evaluate(a, point) for a in self.args]
        return PLAIN[self.op](*args)


leaf = st.one_of(st.sampled_from([*AXES, N, M, K]), st.integers(-7, 12).map(integer))
positive = st.one_of(
    st.integers(1, 12).map(integer),
    st.sampled_from([N, K, dims.mul(K, integer(2)), dims.mul(N, K), dims.mul(N, integer(4)), dims.mul(N, N)]),
)


def extend(inner: st.SearchStrategy[Tree | Expr]) -> st.SearchStrategy[Tree]:
    ring = st.tuples(st.sampled_from(["add", "add", "sub", "mul", "maximum", "minimum"]), inner, inner)
    division = st.tuples(st.sampled_from(["floordiv", "mod"]), inner, positive)
    return st.one_of(ring, division, division).map(lambda t: Tree(t[0], t[1:]))


trees = st.recursive(leaf, extend, max_leaves=7).filter(lambda t: isinstance(t, Tree))


def domain(leaves: set[Expr]) -> list[dict[str, int]]:
    """Every assignment of sizes and axis positions."""
    names = {x.value.name for x in leaves if isinstance(x.value, Symbol)}
    axes = [x.value for x in leaves if isinstance(x.value, Axis)]
    for a in axes:
        names |= {x.value.name for x in walk(a.extent) if isinstance(x.value, Symbol)}
    points: list[dict[str, int]] = []
    ordered = sorted(names)
    for sizes in itertools.product(*[SYMBOLS[n] for n in ordered]):
        env = dict(zip(ordered, sizes, strict=True))
        ranges = [range(dims.evaluate(a.extent, env)) for a in axes]
        for at in itertools.product(*ranges):
            points.append(env | dict(zip([a.name for a in axes], at, strict=True)))
    return points


def sampled(points: list[dict[str, int]], most: int = 400) -> list[dict[str, int]]:
    return points[:: max(1, len(points) // most)]


@settings(max_examples=1500)
@given(trees)
def test_normal_form_has_the_same_value_everywhere(tree: Tree):
    built = tree.build()
    for point in sampled(domain(tree.leaves())):
        assert dims.evaluate(built, point) == tree.at(point), (built, point)


@settings(max_examples=700)
@given(trees)
def test_bounds_hold_everywhere(tree: Tree):
    built = tree.build()
    points = sampled(domain(tree.leaves()))
    low, high = dims.bounds(built)
    least, most = dims.int_range(built)
    proved = [b for b in range(-6, 12) if dims.at_least(built, b)]
    for point in points:
        value = dims.evaluate(built, point)
        assert low is None or dims.evaluate(low, point) <= value, (built, low, point)
        assert high is None or dims.evaluate(high, point) >= value, (built, high, point)
        assert least is None or least <= value, (built, least, point)
        assert most is None or most >= value, (built, most, point)
        assert all(value >= b for b in proved), (built, proved, point)


@settings(max_examples=500)
@given(trees, positive)
def test_exact_division_and_divisibility(tree: Tree, by: Expr):
    built = tree.build()
    quotient = dims.exact_div(built, by)
    divisors = [d for d in (2, 3, 4) if dims.divisible(built, d)]
    for point in sampled(domain(tree.leaves() | {x for x in walk(by) if x.op == "symbol"})):
        value = dims.evaluate(built, point)
        if quotient is not None:
            assert dims.evaluate(quotient, point) * dims.evaluate(by, point) == value
        assert all(value % d == 0 for d in divisors)


@settings(max_examples=500)
@given(trees, st.sampled_from([*AXES, N, K]))
def test_coefficient_splits_off_an_affine_part(tree: Tree, of: Expr):
    built = tree.build()
    factor = dims.coefficient(built, of)
    if factor is None:
        return
    rest = dims.sub(built, dims.mul(factor, of))
    assert of not in set(walk(rest)) and of not in set(walk(factor))


@settings(max_examples=500)
@given(trees, trees)
def test_equal_is_never_claimed_wrongly_and_sums_are_canonical(a: Tree, b: Tree):
    x, y = a.build(), b.build()
    assert dims.add(x, y) is dims.add(y, x) and dims.sub(x, x) is dims.ZERO
    assert dims.equal(dims.add(dims.sub(x, y), y), x)
    if dims.equal(x, y):
        for point in sampled(domain(a.leaves() | b.leaves())):
            assert a.at(point) == b.at(point)


@settings(max_examples=500)
@given(trees, st.lists(trees, min_size=1, max_size=2))
def test_substitution_keeps_the_value(tree: Tree, inner: list[Tree]):
    """Replacing an axis by an expression that stays inside its extent."""
    from tilewright.ir.expr import substitute

    built = tree.build()
    i = AXES[0]
    new = dims.mod(inner[0].build(), integer(4))
    moved = substitute(built, {i: new})
    leaves = (tree.leaves() - {i}) | inner[0].leaves()
    for point in sampled(domain(leaves)):
        want = tree.at(point | {"i": inner[0].at(point) % 4})
        inside = point
        assert dims.evaluate(moved, inside) == want, (built, new, moved, point)


def ax(name: str, extent: int | Expr) -> Expr:
    return axis(Axis(name, extent if isinstance(extent, Expr) else integer(extent)))


def test_view_round_trips_vanish():
    """What refinement lives on: splitting and merging an index is the identity."""
    h, d = ax("h", 12), ax("d", 64)
    flat = dims.add(dims.mul(h, integer(64)), d)
    assert dims.floordiv(flat, integer(64)) is h and dims.mod(flat, integer(64)) is d
    b, s = ax("b", symbol("B", 1)), ax("s", N)
    rows = dims.add(dims.mul(b, N), s)
    assert dims.floordiv(rows, N) is b and dims.mod(rows, N) is s
    f = ax("f", 768)
    again = dims.add(dims.mul(dims.floordiv(f, integer(64)), integer(64)), dims.mod(f, integer(64)))
    assert again is f
    x = ax("x", dims.mul(N, integer(3)))
    assert dims.add(dims.mul(dims.floordiv(x, N), N), dims.mod(x, N)) is x


def test_mixed_radix_digits_join_to_the_number():
    x = ax("x", dims.mul(N, integer(24)))
    quarter, low = dims.floordiv(x, integer(4)), dims.mod(x, integer(4))
    high, middle = dims.floordiv(quarter, integer(6)), dims.mod(quarter, integer(6))
    assert dims.add(dims.mul(dims.add(dims.mul(high, integer(6)), middle), integer(4)), low) is x
    minus = dims.sub(dims.ZERO, dims.add(dims.mul(high, integer(6)), middle))
    assert minus is dims.mul(quarter, integer(-1))


def test_division_of_nested_views():
    c, h, w = ax("c", 8), ax("h", 6), ax("w", 10)
    flat = dims.add(dims.mul(c, integer(60)), dims.mul(h, integer(10)), w)
    assert dims.mod(dims.floordiv(flat, integer(10)), integer(6)) is h
    assert dims.floordiv(flat, integer(60)) is c
    assert dims.floordiv(dims.floordiv(flat, integer(10)), integer(6)) is c


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_dense_strides_are_torchs(size: int):
    import torch

    shape = (integer(3), symbol("s"), integer(4))
    strides = [dims.evaluate(e, {"s": size}) for e in dims.dense_strides(shape)]
    assert tuple(strides) == torch.empty(3, size, 4).stride()


def test_unprovable_division_stays_as_it_is():
    a = make("mod", (AXES[0], dims.sub(N, M)), i64)
    assert dims.mod(AXES[0], dims.sub(N, M)) is a


def test_digits_of_one_number_are_joined() -> None:
    """`x % n + n * (x // n % m)` is `x % (n * m)`; not where a digit is missing, or of another number."""
    x, y = (axis(Axis(name, integer(4096))) for name in "xy")
    low, middle, high = (
        dims.mod(dims.floordiv(x, integer(d)), integer(m)) for d, m in ((1, 2), (2, 16), (32, 32))
    )
    joined = dims.add(low, dims.mul(middle, integer(2)), dims.mul(high, integer(32)))
    assert joined is dims.mod(x, integer(1024))
    assert dims.add(dims.mul(low, y), dims.mul(middle, integer(2), y)) is dims.mul(
        dims.mod(x, integer(32)), y
    )
    kept = {
        dims.add(low, dims.mul(high, integer(32))): lambda a: a % 2 + 32 * (a // 32 % 32),
        dims.add(low, dims.mul(middle, integer(3))): lambda a: a % 2 + 3 * (a // 2 % 16),
        dims.add(dims.mod(y, integer(2)), dims.mul(middle, integer(2))): lambda a: 1 + 2 * (a // 2 % 16),
        joined: lambda a: a % 1024,
    }
    for e, plain in kept.items():
        for a in range(0, 4096, 7):
            assert dims.evaluate(substitute(e, {x: integer(a), y: integer(5)}), {}) == plain(a)
