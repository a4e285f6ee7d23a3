"""Resize and Upsample: separable resampling, one axis at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import Dim, Host, check_size, is_static, is_symbolic, to_int
from tilewright.errors import ModelError, UnsupportedError


@dataclass(frozen=True)
class ResampledAxis:
    """One axis to resample: from `size` to `out` elements; `scale` is the ratio that the coordinates use.

    `by_size`: the scale is out / size by definition.
    """

    dim: int
    size: Dim
    out: Dim
    scale: float
    roi: tuple[float, float]
    by_size: bool = False

    @property
    def integer_scale(self) -> int | None:
        """The scale as an integer, if it is one and gives exactly `out`."""
        if not is_symbolic(self.scale) and self.scale >= 1 and float(self.scale).is_integer():
            return int(self.scale)
        return None


@dataclass(frozen=True)
class How:
    """The attributes of Resize."""

    mode: str
    coordinates: str
    nearest: str
    cubic: float
    exclude_outside: bool
    antialias: bool
    outside: float


def _coordinates(axis: ResampledAxis, how: How, device: torch.device) -> Tensor:
    """Source coordinate of each output element, in float64."""
    i = torch.arange(axis.out, dtype=torch.float64, device=device)  # type: ignore[arg-type]
    n, m, s = axis.size, axis.out, axis.scale
    if how.coordinates == "half_pixel":
        return (i + 0.5) / s - 0.5
    if how.coordinates == "half_pixel_symmetric":
        offset = n / 2 * (1 - m / (s * n))
        return offset + (i + 0.5) / s - 0.5
    if how.coordinates == "pytorch_half_pixel":
        return (i + 0.5) / s - 0.5 if m != 1 else i * 0
    if how.coordinates == "align_corners":
        length = s * n  # not rounded: the standard's own reference keeps the fraction
        return i * (n - 1) / (length - 1) if length != 1 else i * 0
    if how.coordinates == "asymmetric":
        return i / s
    if how.coordinates == "tf_half_pixel_for_nn":
        return (i + 0.5) / s
    if how.coordinates == "tf_crop_and_resize":
        start, end = axis.roi
        length = s * n
        if length == 1:
            return i * 0 + 0.5 * (start + end) * (n - 1)
        return start * (n - 1) + i * ((end - start) * (n - 1) / (length - 1))
    raise UnsupportedError(
        f"coordinate mode {how.coordinates!r}", phase="capture", op="Resize", hint="use one of the standard's"
    )


OPSET_10 = "opset 10"
"""The one nearest mode of opset 10: down where an axis grows, up where it shrinks, as the standard's tests say."""


def _nearest_index(x: Tensor, mode: str, scale: float) -> Tensor:
    # Scales are singles: what is a whole number or a half is told in singles, as the standard's reference does.
    x = x.to(torch.float32).to(torch.float64)
    if mode == OPSET_10:
        if not is_symbolic(scale):
            return torch.ceil(x) if scale < 1 else torch.floor(x)
        return torch.where(torch.zeros_like(x) + scale < 1, torch.ceil(x), torch.floor(x))
    if mode == "round_prefer_floor":
        return torch.ceil(x - 0.5)
    if mode == "round_prefer_ceil":
        return torch.floor(x + 0.5)
    if mode == "floor":
        return torch.floor(x)
    if mode == "ceil":
        return torch.ceil(x)
    raise UnsupportedError(f"nearest mode {mode!r}", phase="capture", op="Resize", hint="use a standard mode")


def _filter(d: Tensor, how: How) -> Tensor:
    """The interpolation kernel at distance d."""
    d = d.abs()
    if how.mode == "linear":
        return (1 - d).clamp(min=0)
    a = how.cubic
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))


def _taps(axis: ResampledAxis, how: How, x: Tensor) -> tuple[Tensor, Tensor]:
    """Index and weight [out, taps] of the source elements that each output element blends."""
    reach = 1 if how.mode == "linear" else 2
    shrink = min(axis.scale, 1.0) if how.antialias else 1.0
    half = math.ceil(reach / shrink)
    base = torch.floor(x)
    steps = torch.arange(-half + 1, half + 1, dtype=torch.float64, device=x.device)
    at = base.unsqueeze(1) + steps
    weights = _filter((x.unsqueeze(1) - at) * shrink, how)
    inside = (at >= 0) & (at <= axis.size - 1)
    if how.exclude_outside:
        weights = torch.where(inside, weights, torch.zeros_like(weights))
    if how.exclude_outside or how.antialias:
        weights = weights / weights.sum(1, keepdim=True)
    return at.clamp(0, axis.size - 1).to(torch.int64), weights


def _resample(x: Tensor, axis: ResampledAxis, how: How) -> Tensor:
    """Resample one axis."""
    where = _coordinates(axis, how, x.device)
    if how.mode == "nearest":
        index = _nearest_index(where, how.nearest, axis.scale).clamp(0, axis.size - 1).to(torch.int64)
        return x.index_select(axis.dim, index)
    index, weights = _taps(axis, how, where)
    shape = [1] * x.dim()
    shape[axis.dim] = -1
    wide = (
        x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) or not x.is_floating_point() else x
    )
    weights = weights.to(wide.dtype)
    total: Tensor | None = None
    for k in range(index.shape[1]):
        part = wide.index_select(axis.dim, index[:, k]) * weights[:, k].reshape(shape)
        total = part if total is None else total + part
    assert total is not None
    return total


def _outside(axis: ResampledAxis, how: How, device: torch.device) -> Tensor:
    where = _coordinates(axis, how, device)
    return (where < 0) | (where > axis.size - 1)


def _direct(x: Tensor, axes: Sequence[ResampledAxis], how: How) -> Tensor | None:
    """torch's own kernel where its definition is the same."""
    spatial = x.dim() - 2
    if spatial not in (1, 2, 3) or how.antialias or any(a.dim < 2 for a in axes):
        return None
    sizes = [next((a.out for a in axes if a.dim == d), x.shape[d]) for d in range(2, x.dim())]
    exact = all(a.integer_scale is not None for a in axes)
    if how.mode == "nearest":
        powers = exact and all((a.integer_scale or 0) & ((a.integer_scale or 0) - 1) == 0 for a in axes)
        floors = how.coordinates == "asymmetric" and how.nearest in ("floor", OPSET_10)
        rounds = how.coordinates in ("half_pixel", "pytorch_half_pixel") and how.nearest.startswith("round")
        if powers and (floors or rounds):
            return F.interpolate(x, size=sizes, mode="nearest")  # type: ignore[arg-type]
        return None
    consistent = all(
        a.by_size or (is_static(a.size) and is_static(a.out) and a.scale == a.out / a.size) for a in axes
    )
    if how.mode != "linear" or not x.is_floating_point() or how.exclude_outside or not (exact or consistent):
        return None
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[spatial]
    if how.coordinates == "half_pixel":
        return F.interpolate(x, size=sizes, mode=mode, align_corners=False)  # type: ignore[arg-type]
    if how.coordinates == "align_corners":
        return F.interpolate(x, size=sizes, mode=mode, align_corners=True)  # type: ignore[arg-type]
    return None


def resample(x: Tensor, axes: Sequence[ResampledAxis], how: How) -> Tensor:
    """Resample all axes whose size or scale changes."""
    check_size([a.out for a in axes], "Resize")
    moving = [a for a in axes if not (a.integer_scale == 1 and how.coordinates != "tf_crop_and_resize")]
    if not moving:
        return x
    direct = _direct(x, moving, how)
    if direct is not None:
        return direct
    y = x
    for axis in moving:
        y = _resample(y, axis, how)
    if how.coordinates == "tf_crop_and_resize":
        for axis in moving:
            shape = [1] * x.dim()
            shape[axis.dim] = -1
            y = torch.where(_outside(axis, how, x.device).reshape(shape), how.outside, y)
    if x.dtype.is_floating_point:
        return y.to(x.dtype)
    if how.mode == "nearest":
        return y
    info = torch.iinfo(x.dtype)
    return y.round().clamp(info.min, info.max).to(x.dtype)


def scaled(size: Dim, scale: float) -> Dim:
    """floor(size * scale), without leaving the integers if the scale is one."""
    if not is_symbolic(scale) and float(scale).is_integer():
        return size * int(scale)
    if is_static(size) and not is_symbolic(scale):
        return math.floor(size * scale)
    return to_int(size * scale)


def _fit(x: Tensor, sizes: list[Dim], places: Sequence[int], policy: str) -> tuple[list[Dim], list[float]]:
    """Sizes and scales under an aspect-ratio policy."""
    if policy == "stretch":
        return sizes, [s / x.shape[a] for s, a in zip(sizes, places, strict=True)]  # type: ignore[misc]
    ratios = [s / x.shape[a] for s, a in zip(sizes, places, strict=True)]
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(ratio * x.shape[a] + 0.5) for a in places], [ratio] * len(places)


MODES = ("nearest", "linear", "cubic")


@op("Resize", since=11, host=(1, 2, 3))
def resize(
    x: Tensor,
    roi: Host | None = None,
    scales: Host | None = None,
    sizes: Host | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    """Resample to given sizes, or by given scales."""
    if mode not in MODES:
        raise UnsupportedError(f"mode {mode!r}", phase="capture", op="Resize", hint=f"use {', '.join(MODES)}")
    places = list(range(x.dim())) if axes is None else [a % x.dim() for a in axes]
    given = scales is not None and bool(scales.values)
    if given:
        assert scales is not None
        factors = scales.floats()
        out: list[Dim] = [scaled(x.shape[a], s) for a, s in zip(places, factors, strict=True)]
    elif sizes is not None:
        out, factors = _fit(x, list(sizes.ints()), places, keep_aspect_ratio_policy)
    else:
        raise ModelError("neither scales nor sizes", phase="capture", op="Resize")
    corners = roi.floats() if roi is not None and roi.values else [0.0] * len(places) + [1.0] * len(places)
    how = How(
        mode=mode,
        coordinates=coordinate_transformation_mode,
        nearest=nearest_mode,
        cubic=cubic_coeff_a,
        exclude_outside=bool(exclude_outside),
        antialias=bool(antialias),
        outside=extrapolation_value,
    )
    by_size = not given and keep_aspect_ratio_policy == "stretch"
    work = [
        ResampledAxis(a, x.shape[a], out[i], factors[i], (corners[i], corners[i + len(places)]), by_size)
        for i, a in enumerate(places)
    ]
    return resample(x, work, how)


@op("Resize", since=10, host=(1,))
def resize_10(x: Tensor, scales: Host, *, mode: str = "nearest") -> Tensor:
    """Opset 10: asymmetric coordinates."""
    return resize(
        x, None, scales, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode=OPSET_10
    )


@op("Upsample", since=7)
def upsample_7(x: Tensor, *, mode: str = "nearest", scales: Sequence[float]) -> Tensor:
    """Opset 7: scales as attribute."""
    return resize_10(x, Host(tuple(scales), (len(scales),), torch.float32), mode=mode)


@op("Upsample", since=9, host=(1,))
def upsample_9(x: Tensor, scales: Host, *, mode: str = "nearest") -> Tensor:
    """Opset 9: scales as input."""
    return resize_10(x, scales, mode=mode)
