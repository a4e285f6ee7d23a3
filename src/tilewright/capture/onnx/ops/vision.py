"""Operators of detection and sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import Host
from tilewright.errors import UnsupportedError

_CUBIC = -0.75


def _unnormalise(grid: Tensor, size: int, align_corners: int) -> Tensor:
    if align_corners:
        return (grid + 1) / 2 * (size - 1)
    return ((grid + 1) * size - 1) / 2


def _reflect(at: Tensor, size: int, align_corners: int) -> Tensor:
    """Coordinates mirrored into the image, at the centres or at the edges of the border pixels."""
    low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    span = high - low
    if span <= 0:
        return torch.zeros_like(at)
    away = torch.remainder(at - low, 2 * span)
    return low + torch.where(away > span, 2 * span - away, away)


def _fetch(x: Tensor, places: Sequence[Tensor], padding: str, align_corners: int) -> Tensor:
    """x [N, C, *spatial] at integer places [N, *out] (one tensor per spatial dim): [N, C, *out]."""
    sizes = x.shape[2:]
    inside = torch.ones_like(places[0], dtype=torch.bool)
    flat = torch.zeros_like(places[0], dtype=torch.int64)
    for at, size in zip(places, sizes, strict=True):
        if padding == "reflection":
            at = _reflect(at, size, align_corners)
        inside = inside & (at >= 0) & (at <= size - 1)
        flat = flat * size + at.clamp(0, size - 1).to(torch.int64)
    n, c = x.shape[:2]
    index = flat.reshape(n, 1, -1).expand(n, c, -1)
    values = torch.gather(x.flatten(2), 2, index).reshape(n, c, *flat.shape[1:])
    if padding == "zeros":
        values = torch.where(inside.unsqueeze(1), values, torch.zeros_like(values))
    return values


def _cubic_weights(t: Tensor) -> list[Tensor]:
    a = _CUBIC

    def near(d: Tensor) -> Tensor:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Tensor) -> Tensor:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


@op("GridSample", since=16)
def grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    """Sample an image of any rank at normalised coordinates (last dim of grid: x, y, ...)."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    rank = x.dim() - 2
    direct = rank == 2 or (rank == 3 and mode != "cubic")
    if direct and grid.dtype == x.dtype and x.numel() and grid.numel():
        torch_mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
        return F.grid_sample(x, grid, torch_mode, padding_mode, bool(align_corners))
    coordinates: list[Tensor] = []
    for d in range(rank):
        at = _unnormalise(grid[..., rank - 1 - d], x.shape[2 + d], align_corners)
        if padding_mode == "border" and mode != "cubic":
            at = at.clamp(0, x.shape[2 + d] - 1)
        elif padding_mode == "reflection" and mode != "cubic":
            at = _reflect(at, x.shape[2 + d], align_corners)
        coordinates.append(at)
    if mode == "nearest":
        return _fetch(x, [torch.round(c) for c in coordinates], padding_mode, align_corners)
    if mode not in ("linear", "cubic"):
        raise UnsupportedError(
            f"mode {mode!r}", phase="capture", op="GridSample", hint="linear, nearest, cubic"
        )
    return _blend(x, coordinates, mode, padding_mode, align_corners)


def _blend(x: Tensor, coordinates: Sequence[Tensor], mode: str, padding: str, align_corners: int) -> Tensor:
    """Sum over all corners of the neighbourhood, weights multiplied over the dims."""
    terms: list[tuple[list[Tensor], Tensor | None]] = [([], None)]
    for at in coordinates:
        base = torch.floor(at)
        t = at - base
        if mode == "linear":
            options = [(base, 1 - t), (base + 1, t)]
        else:
            options = [(base + k - 1, w) for k, w in enumerate(_cubic_weights(t))]
        terms = [
            ([*places, place], w if weight is None else weight * w)
            for places, weight in terms
            for place, w in options
        ]
    total: Tensor | None = None
    for places, weight in terms:
        assert weight is not None
        part = _fetch(x, places, padding, align_corners) * weight.unsqueeze(1)
        total = part if total is None else total + part
    assert total is not None
    return total


def _bilinear(x: Tensor, y_at: Tensor, x_at: Tensor) -> tuple[list[Tensor], Tensor]:
    """Four weighted corner values of x [R, C, H, W] at [R, P] points, and where the point is outside."""
    h, w = x.shape[2], x.shape[3]
    outside = (y_at < -1.0) | (y_at > h) | (x_at < -1.0) | (x_at > w)
    y_at, x_at = y_at.clamp(0, h - 1), x_at.clamp(0, w - 1)
    y0, x0 = torch.floor(y_at), torch.floor(x_at)
    y1, x1 = (y0 + 1).clamp(max=h - 1), (x0 + 1).clamp(max=w - 1)
    ly, lx = y_at - y0, x_at - x0
    flat = x.flatten(2)
    corners: list[Tensor] = []
    for ys, xs, weight in (
        (y0, x0, (1 - ly) * (1 - lx)),
        (y0, x1, (1 - ly) * lx),
        (y1, x0, ly * (1 - lx)),
        (y1, x1, ly * lx),
    ):
        index = (ys * w + xs).to(torch.int64).unsqueeze(1).expand(-1, x.shape[1], -1)
        value = torch.gather(flat, 2, index) * weight.unsqueeze(1)
        corners.append(torch.where(outside.unsqueeze(1), torch.zeros_like(value), value))
    return corners, outside


def _roi_align(
    x: Tensor,
    rois: Tensor,
    batch: Tensor,
    sizes: tuple[int, int],
    ratio: int,
    scale: float,
    mode: str,
    shift: float,
) -> Tensor:
    """Regions pooled to a fixed size; with `ratio` 0 the number of points depends on each region."""
    height, width = sizes
    outs: list[Tensor] = []
    low = rois * scale - shift
    for i in range(rois.shape[0]):
        x1, y1, x2, y2 = low[i].unbind()
        roi_w, roi_h = x2 - x1, y2 - y1
        if shift == 0.0:
            roi_w, roi_h = roi_w.clamp(min=1.0), roi_h.clamp(min=1.0)
        ny = ratio if ratio > 0 else max(int(math.ceil(float(roi_h) / height)), 1)
        nx = ratio if ratio > 0 else max(int(math.ceil(float(roi_w) / width)), 1)
        ys = y1 + (torch.arange(height * ny, device=x.device) + 0.5) * (roi_h / height / ny)
        xs = x1 + (torch.arange(width * nx, device=x.device) + 0.5) * (roi_w / width / nx)
        y_at = ys.unsqueeze(1).expand(-1, xs.shape[0]).reshape(1, -1).to(x.dtype)
        x_at = xs.unsqueeze(0).expand(ys.shape[0], -1).reshape(1, -1).to(x.dtype)
        corners, _ = _bilinear(x.index_select(0, batch[i : i + 1].to(torch.int64)), y_at, x_at)
        if mode == "avg":
            total = corners[0] + corners[1] + corners[2] + corners[3]
            outs.append(total.reshape(-1, height, ny, width, nx).mean((2, 4)))
        else:
            best = torch.stack(corners).amax(0)
            outs.append(best.reshape(-1, height, ny, width, nx).amax((2, 4)))
    if not outs:
        return x.new_zeros(0, x.shape[1], height, width)
    return torch.stack(outs)


def _points_of_each(attributes: Mapping[str, object]) -> bool:
    """Whether the number of points depends on each region."""
    return not attributes.get("sampling_ratio")


@op("RoiAlign", since=10, reads_data=_points_of_each)
def roi_align_10(
    x: Tensor,
    rois: Tensor,
    batch: Tensor,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    """Opset 10: without the half-pixel shift."""
    return _roi_align(x, rois, batch, (output_height, output_width), sampling_ratio, spatial_scale, mode, 0.0)


@op("RoiAlign", since=16, reads_data=_points_of_each)
def roi_align(
    x: Tensor,
    rois: Tensor,
    batch: Tensor,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    """Regions of interest pooled to [output_height, output_width] by bilinear samples."""
    shift = 0.5 if coordinate_transformation_mode == "half_pixel" else 0.0
    return _roi_align(
        x, rois, batch, (output_height, output_width), sampling_ratio, spatial_scale, mode, shift
    )


@op("MaxRoiPool", reads_data=True)
def max_roi_pool(
    x: Tensor, rois: Tensor, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0
) -> Tensor:
    """Maximum over the bins of regions given as rows (image, x1, y1, x2, y2) in whole pixels."""
    height, width = pooled_shape
    outs: list[Tensor] = []
    for row in rois.tolist():
        x1, y1, x2, y2 = (math.floor(v * spatial_scale + 0.5) for v in row[1:])
        tall, wide = max(y2 - y1 + 1, 1), max(x2 - x1 + 1, 1)
        bins: list[Tensor] = []
        for i in range(height):
            top, bottom = y1 + tall * i // height, y1 - (-tall * (i + 1) // height)
            for j in range(width):
                left, right = x1 + wide * j // width, x1 - (-wide * (j + 1) // width)
                part = x[int(row[0]), :, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
                bins.append(part.amax((1, 2)) if part.numel() else x.new_zeros(x.shape[1]))
        outs.append(torch.stack(bins, -1).reshape(-1, height, width))
    return torch.stack(outs) if outs else x.new_zeros(0, x.shape[1], height, width)


def _corners(boxes: Tensor, centred: int) -> Tensor:
    """Boxes [N, 4] as y1, x1, y2, x2 in order."""
    if centred:
        x, y, w, h = boxes.unbind(-1)
        return torch.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1)
    a, b, c, d = boxes.unbind(-1)
    return torch.stack(
        [torch.minimum(a, c), torch.minimum(b, d), torch.maximum(a, c), torch.maximum(b, d)], -1
    )


def _overlap(boxes: Tensor) -> Tensor:
    """Intersection over union of all pairs, [N, N]."""
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    common = (high - low).clamp(min=0).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    union = area[:, None] + area[None, :] - common
    return torch.where(union > 0, common / union, torch.zeros_like(union))


@op("NonMaxSuppression", since=10, host=(2, 3, 4), reads_data=True)
def non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    limit: Host | None = None,
    overlap: Host | None = None,
    threshold: Host | None = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    """Best boxes per class without overlap, as rows (batch, class, box). The row count depends on data."""
    count = 0 if limit is None else limit.int()
    most = 0.0 if overlap is None else overlap.floats()[0]
    least = None if threshold is None else threshold.floats()[0]
    rows: list[list[int]] = []
    for n in range(boxes.shape[0]):
        together = _overlap(_corners(boxes[n], center_point_box)) > most
        for c in range(scores.shape[1]):
            order = torch.argsort(scores[n, c], descending=True, stable=True)
            chosen: list[int] = []
            for i in order.tolist():
                if len(chosen) >= count or (least is not None and not float(scores[n, c, i]) > least):
                    break
                if not any(bool(together[i, j]) for j in chosen):
                    chosen.append(i)
            rows += [[n, c, i] for i in chosen]
    return torch.tensor(rows, dtype=torch.int64, device=boxes.device).reshape(-1, 3)


@op("DeformConv", since=19)
def deform_conv(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: Sequence[int] = (1, 1),
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    offset_group: int = 1,
    pads: Sequence[int] = (0, 0, 0, 0),
    strides: Sequence[int] = (1, 1),
) -> Tensor:
    """2-D convolution whose taps are displaced by learned offsets and weighted by a mask."""
    if x.dim() != 4:
        raise UnsupportedError("other ranks than 4", phase="capture", op="DeformConv", hint="use 2-D images")
    n, c, h, w = x.shape
    kh, kw = weight.shape[2:]
    oh, ow = offset.shape[2:]
    shifts = offset.reshape(n, offset_group, kh * kw, 2, oh, ow)
    factor = None if mask is None else mask.reshape(n, offset_group, 1, kh * kw, oh, ow)
    rows = torch.arange(oh, device=x.device, dtype=x.dtype).reshape(-1, 1) * strides[0] - pads[0]
    columns = torch.arange(ow, device=x.device, dtype=x.dtype) * strides[1] - pads[1]
    parts: list[Tensor] = []
    source = x.reshape(n * offset_group, c // offset_group, h, w)
    for k in range(kh * kw):
        y_at = rows + (k // kw) * dilations[0] + shifts[:, :, k, 0]
        x_at = columns + (k % kw) * dilations[1] + shifts[:, :, k, 1]
        places = [p.reshape(n * offset_group, oh, ow) for p in (y_at, x_at)]
        value = _blend(source, places, "linear", "zeros", 0).reshape(n, offset_group, -1, oh, ow)
        parts.append(value if factor is None else value * factor[:, :, :, k])
    columns_of = torch.stack(parts, 3).reshape(n, group, c // group * kh * kw, oh * ow)
    kernels = weight.reshape(group, weight.shape[0] // group, -1)
    y = torch.matmul(kernels, columns_of).reshape(n, -1, oh, ow)
    return y if bias is None else y + bias.reshape(-1, 1, 1)
