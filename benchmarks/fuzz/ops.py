"""The statements that programs are grown from: for each kind, how often it comes and how a line of it is made.

A maker may propose what eager refuses: such lines are dropped. Sizes in templates are read off shapes, so that one text
serves all sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.fuzz.lines import (
    ATTENTION,
    BINARY,
    GATHER,
    GATHER_ALIKE,
    IMAGE,
    INTEGER,
    JOINED,
    MUTATION,
    MUTATION_BY,
    NORMS,
    REDUCE,
    SHAPED,
    UNARY,
    VIEW,
)  # fmt: skip

if TYPE_CHECKING:
    from benchmarks.fuzz.grow import Grower


@dataclass(frozen=True)
class Line:
    """A statement without the names that it binds. No `results`: it writes to its first operand."""

    template: str
    operands: tuple[str, ...]
    results: int = 1


@dataclass(frozen=True)
class Kind:
    """How often, and how."""

    weight: float
    make: Callable[[Grower], Line | None]


def _float(t: Tensor) -> bool:
    return t.is_floating_point()


def _dims(least: int, most: int = 9) -> Callable[[Tensor], bool]:
    return lambda t: t.is_floating_point() and least <= t.dim() <= most


def _line(g: Grower, fits: Callable[[Tensor], bool], templates: tuple[str, ...]) -> Line | None:
    """One of the templates, over one value. `D`, `E` and `K` stand for dims and a small number."""
    a = g.some(fits)
    if a is None:
        return None
    return Line(_filled(g.draw.choice(templates), g.values[a], g.draw), (a,))


def _filled(template: str, t: Tensor, draw: random.Random) -> str:
    d = draw.randrange(-t.dim(), t.dim()) if t.dim() else 0
    e = draw.randrange(t.dim()) if t.dim() else 0
    p = list(range(t.dim()))
    draw.shuffle(p)
    known = {"$D": d, "$E": e, "$K": draw.choice([1, 1, 2, 3]), "$P": p, "$B": draw.random() < 0.5,
             "$C": draw.choice([0.5, 2.0, -1.0, 0.1, 3])}  # fmt: skip
    for name, value in known.items():
        template = template.replace(name, str(value))
    return template


def _unary(g: Grower) -> Line | None:
    return _line(g, _float, UNARY)


def _broadcasts(a: Tensor) -> Callable[[Tensor], bool]:
    def fits(b: Tensor) -> bool:
        if not b.is_floating_point() or b is a:
            return False
        try:
            torch.broadcast_shapes(a.shape, b.shape)
        except RuntimeError:
            return False
        return True

    return fits


def _binary(g: Grower) -> Line | None:
    a = g.some(_float)
    if a is None:
        return None
    t = g.values[a]
    b = g.some(_broadcasts(t)) if g.draw.random() < 0.8 else None
    if b is None:
        keep = g.draw.randint(0, t.dim())
        names = g.size_names(tuple(t.shape))[keep:]
        b = g.given(tuple(1 if g.draw.random() < 0.2 else n for n in names))
    operands = (a, b) if g.draw.random() < 0.5 else (b, a)
    return Line(g.draw.choice(BINARY), operands)


def _reduce(g: Grower) -> Line | None:
    return _line(g, _dims(1), REDUCE)


def _view(g: Grower) -> Line | None:
    return _line(g, lambda t: t.dim() >= 1, VIEW)


def _shaped(g: Grower) -> Line | None:
    return _line(g, _dims(1, 5), SHAPED)


def _image(g: Grower) -> Line | None:
    return _line(g, _dims(4, 4), IMAGE)


def _integer(g: Grower) -> Line | None:
    return _line(g, lambda t: not t.is_floating_point() and t.dim() > 0, INTEGER)


def _mutation(g: Grower) -> Line | None:
    inputs = {x.name for x in g.givens if x.grad}
    if g.draw.random() < 0.5:
        a = g.some(lambda t: t.is_floating_point() and t.dim() > 0)
        return None if a is None or a in inputs else Line(g.draw.choice(MUTATION), (a,), 0)
    a = g.some(lambda t: t.is_floating_point() and t.dim() > 0)
    if a is None or a in inputs:
        return None
    t = g.values[a]
    b = g.some(lambda u: u.is_floating_point() and u.shape == t.shape and u is not t)
    return None if b is None else Line(g.draw.choice(MUTATION_BY), (a, b), 0)


def _rest(g: Grower, a: str, least: int) -> tuple[int | str, ...]:
    return g.size_names(tuple(g.values[a].shape))[least:]


def _product(g: Grower) -> Line | None:
    a = g.some(_dims(2, 4))
    if a is None:
        return None
    t = g.values[a]
    dtype = str(t.dtype).removeprefix("torch.")
    depth = g.size_names(tuple(t.shape))[-1]
    wide = g.draw.choice([1, 3, 8, 16, 17])
    kind = g.draw.randint(0, 7)
    if kind == 0:
        return Line("F.linear({0}, {1})", (a, g.given((wide, depth), dtype)))
    if kind == 1:
        return Line("F.linear({0}, {1}, {2})", (a, g.given((wide, depth), dtype), g.given((wide,), dtype)))
    if kind == 2:
        return Line("{0} @ {1}", (a, g.given((depth, wide), dtype)))
    if kind == 3:
        return Line("{0} @ {0}.mT", (a,))
    if kind == 4:
        return Line("torch.einsum('...ij,...kj->...ik', {0}, {0})", (a,))
    if kind == 5:
        return Line("torch.einsum('...i,ji->...j', {0}, {1})", (a, g.given((wide, depth), dtype)))
    if kind == 6:
        other = g.some(
            lambda u: (
                u.dim() == t.dim()
                and u.dtype == t.dtype
                and u.shape[-2] == t.shape[-1]
                and u.shape[:-2] == t.shape[:-2]
            )
        )
        return None if other is None else Line("torch.matmul({0}, {1})", (a, other))
    return Line("({0}.unsqueeze(-1) * {1}).sum(-2)", (a, g.given((depth, wide), dtype)))


def _attention(g: Grower) -> Line | None:
    return _line(g, lambda t: _dims(3, 4)(t) and t.shape[-1] <= 64 and t.shape[-2] <= 80, ATTENTION)


def _convolution(g: Grower) -> Line | None:
    a = g.some(_dims(3, 4))
    if a is None:
        return None
    t = g.values[a]
    dtype = str(t.dtype).removeprefix("torch.")
    channels = t.shape[1]
    groups = g.draw.choice([1, 1, 1, channels, 2 if channels % 2 == 0 else 1])
    wide = groups * g.draw.choice([1, 2, 4, 5])
    size = g.draw.choice([1, 3, 3, 2])
    if not isinstance(g.size_names((channels,))[0], int) or channels > 64:
        return None
    spatial = t.dim() - 2
    stride, dilation = g.draw.choice([1, 1, 2]), g.draw.choice([1, 1, 2])
    extra = (
        f"stride={stride}, padding={g.draw.choice([0, 1, size // 2])}, dilation={dilation}, groups={groups}"
    )
    if g.draw.random() < 0.2:
        weight = g.given((channels, wide // groups, *[size] * spatial), dtype)
        return Line(
            f"F.conv_transpose{spatial}d({{0}}, {{1}}, None, {extra.replace('dilation=2', 'dilation=1')})",
            (a, weight),
        )
    weight = g.given((wide, channels // groups, *[size] * spatial), dtype)
    if g.draw.random() < 0.5:
        return Line(f"F.conv{spatial}d({{0}}, {{1}}, None, {extra})", (a, weight))
    return Line(f"F.conv{spatial}d({{0}}, {{1}}, {{2}}, {extra})", (a, weight, g.given((wide,), dtype)))


def _norm(g: Grower) -> Line | None:
    a = g.some(_dims(2, 4))
    if a is None:
        return None
    dtype = str(g.values[a].dtype).removeprefix("torch.")
    sizes = g.size_names(tuple(g.values[a].shape))
    kind = g.draw.randrange(len(NORMS))
    size = sizes[-1:] if kind < 2 else sizes[1:2]
    return Line(NORMS[kind], (a, g.given(size, dtype), g.given(size, dtype)))


def _gather(g: Grower) -> Line | None:
    i = g.some(lambda t: t.dtype == torch.int64 and t.dim() > 0 and 0 <= int(t.min()) and int(t.max()) < 9)
    a = g.some(_dims(1, 4))
    if i is None or a is None:
        return None
    t = g.values[a]
    alike = g.values[i].dim() == t.dim() and g.draw.random() < 0.7
    return Line(_filled(g.draw.choice(GATHER_ALIKE if alike else GATHER), t, g.draw), (a, i))


def _cast(g: Grower) -> Line | None:
    if g.halves:
        return _line(g, _float, ("{0}.to(torch.float16)", "{0}.to(torch.bfloat16)", "{0}.to(torch.float32)"))
    return _line(g, lambda t: True, ("{0}.to(torch.float32)", "{0}.to(torch.float32) * 0.1"))


def _joined(g: Grower) -> Line | None:
    a = g.some(_dims(1))
    if a is None:
        return None
    t = g.values[a]
    b = g.some(lambda u: u.is_floating_point() and u.shape == t.shape and u is not t)
    if b is None:
        return None
    return Line(_filled(g.draw.choice(JOINED), t, g.draw), (a, b))


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "unary": Kind(20, _unary),
        "binary": Kind(18, _binary),
        "reduce": Kind(14, _reduce),
        "view": Kind(16, _view),
        "shaped": Kind(7, _shaped),
        "image": Kind(5, _image),
        "integer": Kind(4, _integer),
        "mutation": Kind(5, _mutation),
        "product": Kind(5, _product),
        "attention": Kind(1.5, _attention),
        "convolution": Kind(3, _convolution),
        "norm": Kind(3, _norm),
        "gather": Kind(3, _gather),
        "cast": Kind(2, _cast),
        "joined": Kind(3, _joined),
    }
)
