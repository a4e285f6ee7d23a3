"""Torch's size expressions as ours: same value for every size, and no guard."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from tilewright.capture.environment import conditions
from tilewright.capture.symbols import Symbols
from tilewright.errors import UnsupportedError
from tilewright.ir.dtype import i64
from tilewright.ir.expr import Symbol
from tilewright.ir.sizes import dims


def _sizes(hints: tuple[int, int] = (12, 35)) -> tuple[ShapeEnv, torch.SymInt, torch.SymInt]:
    env = ShapeEnv(duck_shape=False)
    made: list[torch.SymInt] = []
    for k, hint in enumerate(hints):
        source = ConstantSource(f"x{k}")
        expr = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        made.append(env.create_symintnode(expr, hint=hint, source=source))  # type: ignore[arg-type]
    return env, made[0], made[1]


FUNCTIONS: dict[str, Callable[[torch.SymInt, torch.SymInt], torch.SymInt]] = {
    "polynomial": lambda a, b: a * b + 3 * a * a - 7,
    "floordiv": lambda a, b: (a * b + 5) // 4,
    "floordiv_by_size": lambda a, b: (a * b) // b,
    "mod": lambda a, b: (a + 9) % 5,
    "max_min": lambda a, b: torch.sym_max(a, 2 * b) + torch.sym_min(a, b),
    "ceil_of_ratio": lambda a, b: torch.sym_int((a + b) / 2 + 0.5),
    "scaled": lambda a, b: torch.sym_int(a * 1.5),
    "power": lambda a, b: a**2 * b,
    "power_of_size": lambda a, b: a ** torch.sym_min(b, 3),
    "shift_left": lambda a, b: a << torch.sym_min(b, 9),
    "shift_right": lambda a, b: (a * a) >> torch.sym_min(b, 3),
    "negative": lambda a, b: -a + b,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    env, a, b = _sizes()
    made = FUNCTIONS[name](a, b)
    before = len(env.guards)
    e = Symbols(env).expr(made)
    assert len(env.guards) == before
    assert e.dtype is i64
    keys = (a.node.expr, b.node.expr)
    for values in ((12, 35), (7, 3), (64, 64), (3, 2)):
        plain = made.node.expr.xreplace(dict(zip(keys, map(sympy.Integer, values), strict=True)))
        assert dims.evaluate(e, {str(k): v for k, v in zip(keys, values, strict=True)}) == int(plain)


def test_ranges() -> None:
    env, a, _ = _sizes()
    e = Symbols(env).expr(a)
    assert isinstance(e.value, Symbol) and e.value.low == 2 and e.value.high is None
    torch._check(a <= 100)
    bounded = Symbols(env).expr(a)
    assert isinstance(bounded.value, Symbol) and bounded.value.high == 100


def test_equal_sizes_become_one_symbol() -> None:
    env, a, b = _sizes((12, 12))
    assert Symbols(env).expr(a) is not Symbols(env).expr(b)
    assert bool(a == b)  # torch installs a guard and remembers the equality
    assert Symbols(env).expr(a) is Symbols(env).expr(b)


def test_host_booleans() -> None:
    env, a, b = _sizes()
    before = len(env.guards)
    assert Symbols(env).expr(a < b).op == "lt"
    assert len(env.guards) == before


def test_an_unknown_function_is_refused() -> None:
    env, a, _ = _sizes()
    odd = sympy.Function("odd")(a.node.expr)
    with pytest.raises(UnsupportedError, match="odd"):
        Symbols(env)._convert(odd)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    "size", [lambda a: (a - 3) // 2 + 1, lambda a: (3 - a) // 2 + 1, lambda a: a // 3, lambda a: (a - 1) // 2]
)
def test_a_size_that_a_guard_makes_one(size: Callable[[torch.SymInt], torch.SymInt]) -> None:
    """Torch keeps the expression, and stretches the dim."""
    env, a, _ = _sizes((3, 35))
    made = size(a)
    assert [dims.static(e) for e in Symbols(env).shape((made, a))] == [None, None]
    assert made == 1
    before = len(env.guards)
    symbols = Symbols(env)
    assert [dims.static(e) for e in symbols.shape((made, a))] == [1, None] and len(env.guards) == before
    assert symbols.expr(a * made) is symbols.expr(a)


def test_a_size_that_was_a_number_before_it_was_known_to_be_one() -> None:
    """As where a tensor is split, whose parts' sizes are arguments first."""
    env, a, _ = _sizes((3, 35))
    torch._check(a <= 3)
    made = a // 2
    symbols = Symbols(env)
    assert dims.static(symbols.expr(made)) is None
    assert symbols.shape((made,)) == (dims.ONE,)


def test_a_size_that_a_range_makes_one() -> None:
    env, a, _ = _sizes((3, 35))
    torch._check(a <= 3)
    assert Symbols(env).shape(((3 - a) // 2 + 1,)) == (dims.ONE,)


@pytest.mark.parametrize(
    ("size", "number"),
    [
        (lambda a, b: a // (a // 4), 4),  # as unflatten and pixel_unshuffle make them
        (lambda a, b: a + b, 47),  # parts of a list that is joined again
        (lambda a, b: (a + 2) // 4 - 1, 2),
    ],
)
def test_a_size_that_a_guard_makes_a_number(size: Callable[..., torch.SymInt], number: int) -> None:
    env, a, b = _sizes()
    made = size(a, b)
    assert dims.static(Symbols(env).expr(made)) is None
    assert made == number
    before = len(env.guards)
    symbols = Symbols(env)
    assert dims.static(symbols.expr(made)) == number and len(env.guards) == before
    assert symbols.expr(made * a) is dims.mul(symbols.expr(a), dims.integer(number))


def test_a_guard_does_not_make_itself_true() -> None:
    env, a, _ = _sizes()
    assert a // (a // 4) == 4
    held = [all(dims.evaluate(c, {str(a.node.expr): n}) for c in conditions(env)) for n in (12, 14, 15)]
    assert held == [True, True, False]


def test_a_length_of_which_nothing_is_proved_is_equal_to_itself() -> None:
    """A convolution with a free window: its result may be no longer than nothing, and is declared as torch has it."""

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.conv2d(x, w, padding=1)
        return y.reshape(*y.shape[:-1], -1, 2) + 1

    compiled = torch.compile(run, backend="tilewright", dynamic=True)
    w = torch.randn(8, 4, 3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # which tells of a graph that runs as it was captured
        for sizes in ((3, 4, 12, 12), (5, 4, 14, 16)):
            x = torch.randn(sizes)
            torch.testing.assert_close(compiled(x, w), run(x, w))
