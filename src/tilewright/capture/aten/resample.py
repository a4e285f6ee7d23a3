"""Pooling and resampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tilewright.ir.expr import Expr
from tilewright.ir.graph import Value
from tilewright.ir.ops import pool
from tilewright.ir.ops import upsample as ops
from tilewright.ir.sizes import dims

from .registry import Call, NoDeclaration, Rule, Size, known, lower

aten = torch.ops.aten
Sizes = Sequence[Size]


def _each(values: Sizes, rank: int) -> tuple[int, ...]:
    fixed = tuple(known(v) for v in values)
    return fixed * rank if len(fixed) == 1 else fixed


def _window(
    rank: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil: bool
) -> pool.Window:
    size = _each(kernel, rank)
    return pool.Window(
        size, _each(stride, rank) if stride else size, _each(padding, rank), _each(dilation, rank), ceil
    )  # fmt: skip


def _max_pool(rank: int) -> Rule:
    def rule(c: Call, x: Value, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), dilation: Sizes = (1,),
             ceil_mode: bool = False) -> tuple[Value | None, ...]:  # fmt: skip
        window = _window(rank, kernel, stride, padding, dilation, ceil_mode)
        if 1 in c.used:
            return pool.max_pool_with_index(c.b, x, window)
        return pool.max_pool(c.b, x, window), None

    return rule


lower(aten.max_pool2d_with_indices.default)(_max_pool(2))
lower(aten.max_pool3d_with_indices.default)(_max_pool(3))


def _avg_pool(rank: int) -> Rule:
    def rule(c: Call, x: Value, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), ceil_mode: bool = False,
             count_include_pad: bool = True, divisor_override: int | None = None) -> Value:  # fmt: skip
        window = _window(rank, kernel, stride, padding, (1,), ceil_mode)
        return pool.avg_pool(c.b, x, window, count_include_pad, divisor_override)

    return rule


lower(aten.avg_pool1d.default)(_avg_pool(1))
lower(aten.avg_pool2d.default)(_avg_pool(2))
lower(aten.avg_pool3d.default)(_avg_pool(3))


def _avg_pool_gradient(rank: int) -> Rule:
    def rule(c: Call, gradient: Value, x: Value, kernel: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool,
             count_include_pad: bool, divisor_override: int | None) -> Value:  # fmt: skip
        window = _window(rank, kernel, stride, padding, (1,), ceil_mode)
        if any(step not in (1, n) for n, step in zip(window.kernel, window.stride, strict=True)):
            raise NoDeclaration("overlapping windows")  # which of them hold an element is slow to find
        return pool.avg_pool_gradient(c.b, gradient, x, window, count_include_pad, divisor_override)

    return rule


lower(aten.avg_pool2d_backward.default)(_avg_pool_gradient(2))
lower(aten.avg_pool3d_backward.default)(_avg_pool_gradient(3))


@lower(
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default,
)  # fmt: skip
def _adaptive_avg_pool(c: Call, x: Value, output_size: Sizes) -> Value:
    return pool.adaptive_avg_pool(c.b, x, c.sizes_of_results[0][-len(output_size) :])


@lower(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def _adaptive_max_pool(c: Call, x: Value, output_size: Sizes) -> tuple[Value, Value]:
    return pool.adaptive_max_pool(c.b, x, c.sizes_of_results[0][-len(output_size) :])


def _target(c: Call, x: Value, rank: int) -> tuple[Expr, ...]:
    """Output sizes of a resampling: torch has already rounded them."""
    return c.sizes_of_results[0][-rank:]


def _scales(scales: Sequence[float | None] | None, rank: int) -> list[float | None]:
    values: list[float | None] = list(scales) if scales else [None] * rank
    if any(isinstance(s, Expr) for s in values):
        raise NoDeclaration("symbolic attribute")
    return values


def _ratios(
    c: Call, x: Value, rank: int, scales: Sequence[float | None] | None, corners: bool = False
) -> list[ops.Ratio]:
    pairs = zip(x.shape[-rank:], _target(c, x, rank), _scales(scales, rank), strict=True)
    return [ops.ratio_of(n, m, s, corners) for n, m, s in pairs]


def _nearest(rank: int, centred: bool = False) -> Rule:
    def rule(c: Call, x: Value, output_size: Sizes | None, *scales: object) -> Value:
        given = _scale_list(scales)
        ratios = _ratios(c, x, rank, given)
        for n, m, s, ratio in zip(
            x.shape[-rank:], _target(c, x, rank), given or [None] * rank, ratios, strict=True
        ):
            _check_rounding(n, m, s, ratio, centred)
        return ops.nearest(c.b, x, _target(c, x, rank), ratios, centred)

    return rule


def _scale_list(scales: Sequence[object]) -> list[float | None] | None:
    """Scales come as one list (overload `vec`) or as one argument per dim."""
    if len(scales) == 1 and isinstance(scales[0], (list, tuple)):
        return [float(s) for s in scales[0]]
    if any(isinstance(s, Expr) for s in scales):
        raise NoDeclaration("symbolic attribute")
    values = [float(s) if isinstance(s, (int, float)) else None for s in scales]
    return values if any(v is not None for v in values) else None


def _check_rounding(source: Expr, size: Expr, scale: float | None, ratio: ops.Ratio, centred: bool) -> None:
    """Eager computes source places in fp32. Refuse sizes for which that is not where the exact ratio is."""
    n, m = dims.static(source), dims.static(size)
    if scale is not None and scale > 0:
        step = np.float32(1.0 / scale)
    elif n is None or m is None:
        return
    else:
        step = np.float32(n) / np.float32(m)
    a, d = dims.static(ratio.numerator), dims.static(ratio.denominator)
    if a is None or d is None:
        return
    places = np.arange(m if m is not None else 4096)
    shift = np.float32(0.5 if centred else 0)
    eager = np.floor((places.astype(np.float32) + shift) * step).astype(np.int64)
    exact = ((2 * places + 1) * a) // (2 * d) if centred else (places * a) // d
    if not np.array_equal(eager, exact):
        raise NoDeclaration("rounded places")


lower(aten.upsample_nearest1d.default, aten.upsample_nearest1d.vec)(_nearest(1))
lower(aten.upsample_nearest2d.default, aten.upsample_nearest2d.vec)(_nearest(2))
lower(aten.upsample_nearest3d.default, aten.upsample_nearest3d.vec)(_nearest(3))
lower(aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact1d.vec)(_nearest(1, centred=True))
lower(aten._upsample_nearest_exact2d.default, aten._upsample_nearest_exact2d.vec)(_nearest(2, centred=True))
lower(aten._upsample_nearest_exact3d.default, aten._upsample_nearest_exact3d.vec)(_nearest(3, centred=True))


def _nearest_gradient(rank: int, centred: bool = False) -> Rule:
    def rule(c: Call, gradient: Value, output_size: Sizes, input_size: Sizes, *scales: object) -> Value:
        given = _scale_list(scales) or [None] * rank
        shape = c.sizes_of_results[0]
        ratios: list[ops.Ratio] = []
        for n, m, s in zip(shape[-rank:], gradient.shape[-rank:], given, strict=True):
            ratio = ops.ratio_of(n, m, s)
            _check_rounding(n, m, s, ratio, centred)
            room = dims.sub(dims.mul(n, ratio.denominator), dims.mul(m, ratio.numerator))
            if not dims.at_least(room, 0):
                raise NoDeclaration("places at the border")
            ratios.append(ratio)
        return ops.nearest_gradient(c.b, gradient, shape, ratios, centred)

    return rule


lower(aten.upsample_nearest1d_backward.default)(_nearest_gradient(1))
lower(aten.upsample_nearest2d_backward.default)(_nearest_gradient(2))
lower(aten.upsample_nearest3d_backward.default)(_nearest_gradient(3))
lower(aten._upsample_nearest_exact1d_backward.default)(_nearest_gradient(1, centred=True))
lower(aten._upsample_nearest_exact2d_backward.default)(_nearest_gradient(2, centred=True))
lower(aten._upsample_nearest_exact3d_backward.default)(_nearest_gradient(3, centred=True))


def _smooth(rank: int, cubic: bool = False) -> Rule:
    def rule(c: Call, x: Value, output_size: Sizes | None, align_corners: bool, *scales: object) -> Value:
        given = _scale_list(scales)
        given = given if cubic or given is None else _scales_used(c, x, given)
        ratios = _ratios(c, x, rank, given, align_corners)
        return ops.interpolate(c.b, x, _target(c, x, rank), ratios, align_corners, cubic)

    return rule


def _scales_used(c: Call, x: Value, scales: Sequence[float | None]) -> list[float | None]:
    """The scales by which linear resampling finds its places: eager copies along a dim that keeps its size."""
    found: list[float | None] = []
    for n, m, s in zip(x.shape[-len(scales) :], _target(c, x, len(scales)), scales, strict=True):
        before, after = dims.static(n), dims.static(m)
        known = before is not None and after is not None
        if not known and s is not None and 1 < s < 2:
            raise NoDeclaration("a size that may stay")
        found.append(None if known and before == after else s)
    return found


lower(aten.upsample_linear1d.default, aten.upsample_linear1d.vec)(_smooth(1))
lower(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d.vec)(_smooth(2))
lower(aten.upsample_trilinear3d.default, aten.upsample_trilinear3d.vec)(_smooth(3))
lower(aten.upsample_bicubic2d.default, aten.upsample_bicubic2d.vec)(_smooth(2, cubic=True))
