"""Matrix products, convolutions, and what goes with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import (
    Dim,
    Host,
    broadcast_dims,
    dense,
    has_symbols,
    is_static,
    known_equal,
    sym_max,
)
from tilewright.errors import UnsupportedError

Pads = tuple[Sequence[Dim], Sequence[Dim]]


def spatial_pads(
    auto_pad: str,
    pads: Sequence[int] | None,
    sizes: Sequence[Dim],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Pads:
    """Padding before and after each spatial dim, from the `pads` and `auto_pad` attributes."""
    rank = len(kernel)
    if auto_pad in ("NOTSET", ""):
        flat = list(pads) if pads else [0] * (2 * rank)
        return flat[:rank], flat[rank:]
    if auto_pad == "VALID":
        return [0] * rank, [0] * rank
    before: list[Dim] = []
    after: list[Dim] = []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        out = (size + s - 1) // s
        total = sym_max((out - 1) * s + (k - 1) * d + 1 - size, 0)
        half = total // 2
        low, high = (half, total - half) if auto_pad == "SAME_UPPER" else (total - half, half)
        before.append(low)
        after.append(high)
    return before, after


def constant_pad(x: Tensor, before: Sequence[Dim], after: Sequence[Dim], value: float = 0.0) -> Tensor:
    """Pad the last dims of x with a constant."""
    flat: list[Dim] = []
    for low, high in zip(reversed(before), reversed(after), strict=True):
        flat += [low, high]
    if all(is_static(p) and p == 0 for p in flat):
        return x
    return F.pad(x, flat, value=value)  # type: ignore[arg-type]


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _rank(x: Tensor, op_name: str) -> int:
    rank = x.dim() - 2
    if rank not in _CONV:
        raise UnsupportedError(
            f"{rank} spatial dims", phase="capture", op=op_name, hint="1, 2 or 3 spatial dims are supported"
        )
    return rank


@op("Conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Convolution of [N, C, ...] with [M, C / group, ...]."""
    rank = _rank(x, "Conv")
    strides = strides or (1,) * rank
    dilations = dilations or (1,) * rank
    kernel = tuple(weight.shape[2:])
    before, after = spatial_pads(auto_pad, pads, x.shape[2:], kernel, strides, dilations)
    if all(is_static(p) for p in (*before, *after)) and list(before) == list(after) and min(before) >= 0:
        padding = tuple(before)
    else:
        x = constant_pad(x, before, after)
        padding = (0,) * rank
    return _CONV[rank](x, weight, bias, tuple(strides), padding, tuple(dilations), group)


@op("ConvTranspose")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Transposed convolution of [N, C, ...] with [C, M / group, ...]; the output is cut by `pads`."""
    rank = _rank(x, "ConvTranspose")
    strides = strides or (1,) * rank
    dilations = dilations or (1,) * rank
    extra = tuple(output_padding) if output_padding else (0,) * rank
    before: list[Dim] = list(pads[:rank]) if pads else [0] * rank
    after: list[Dim] = list(pads[rank:]) if pads else [0] * rank
    if output_shape or auto_pad.startswith("SAME"):
        for i in range(rank):
            full = strides[i] * (x.shape[2 + i] - 1) + extra[i] + (weight.shape[2 + i] - 1) * dilations[i] + 1
            wanted = output_shape[-rank + i] if output_shape else x.shape[2 + i] * strides[i]
            total = full - wanted
            half = total - total // 2 if auto_pad != "SAME_UPPER" else total // 2
            low = 0 if total < 0 else half
            before[i], after[i] = low, total - low
    same = [i for i in range(rank) if before[i] == after[i] and before[i] >= 0]
    run = _CONV_TRANSPOSE[rank]
    if len(same) == rank and all(e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        return run(x, weight, bias, tuple(strides), tuple(before), extra, group, tuple(dilations))
    y = run(x, weight, bias, tuple(strides), 0, 0, group, tuple(dilations))
    return constant_pad_bias(
        y, [-b for b in before], [e - a for e, a in zip(extra, after, strict=True)], bias
    )


def constant_pad_bias(y: Tensor, before: Sequence[Dim], after: Sequence[Dim], bias: Tensor | None) -> Tensor:
    """Crop or extend the output of a transposed convolution; what is added holds the bias."""
    if bias is None or all(p <= 0 for p in (*before, *after)):
        return constant_pad(y, before, after)
    shaped = bias.reshape(-1, *[1] * (y.dim() - 2))
    return constant_pad(y - shaped, before, after) + shaped


@op("MatMul", view=True)
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product with numpy's rules for other ranks."""
    if a.dim() > 1 and b.dim() > 1 and a.dim() + b.dim() > 4 and (has_symbols(a) or has_symbols(b)):
        return _symbolic_matmul(a, b)
    return torch.matmul(a, b)


def _symbolic_matmul(a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul for symbolic sizes, with batch dims flattened on dense tensors.

    torch flattens strided ones, which asks whether a size is 1, and may expand a matrix over the whole batch.
    """
    if b.dim() == 2:
        lead = tuple(a.shape[:-1])
        return torch.mm(dense(a).flatten(0, -2), b).unflatten(0, lead)
    batch = broadcast_dims(a.shape[:-2], b.shape[:-2])
    sides: list[Tensor] = []
    for x in (a, b):
        same = len(batch) == x.dim() - 2 and all(
            known_equal(p, q) for p, q in zip(batch, x.shape[:-2], strict=True)
        )
        wide = x if same else x.expand(*batch, -1, -1)
        sides.append(dense(wide).flatten(0, -3) if len(batch) > 1 else wide)
    y = torch.bmm(sides[0], sides[1])
    return y.unflatten(0, tuple(batch)) if len(batch) > 1 else y


@op("Gemm", since=7)
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """alpha * A' B' + beta * C."""
    a = a.transpose(0, 1) if transA else a
    if c is not None and alpha == 1.0 and beta == 1.0 and c.dim() == 1 and a.is_floating_point():
        return (
            F.linear(a, b if transB else b.transpose(0, 1), c)
            if c.shape[0] != 1
            else _plain(a, b, transB) + c
        )
    product = _plain(a, b, transB)
    if alpha != 1.0:
        product = (product * alpha).to(a.dtype)
    if c is None or beta == 0.0:
        return product
    return product + (c if beta == 1.0 else (c * beta).to(a.dtype))


def _plain(a: Tensor, b: Tensor, transposed: int) -> Tensor:
    return torch.matmul(a, b.transpose(0, 1) if transposed else b)


@op("Einsum", since=12)
def einsum(*operands: Tensor, equation: str) -> Tensor:
    """Sum of products by index letters."""
    return torch.einsum(equation.replace(" ", ""), *operands)


@op("Dropout", since=7)
def dropout_old(x: Tensor, *, ratio: float = 0.5, outputs: int) -> Tensor | tuple[Tensor, Tensor]:
    """Identity (inference), with an all-true mask if asked for."""
    return x if outputs == 1 else (x, torch.ones_like(x, dtype=torch.bool))


@op("Dropout", since=12, host=(1, 2))
def dropout(
    x: Tensor, ratio: object = None, training: object = None, *, seed: int = 0, outputs: int
) -> Tensor | tuple[Tensor, Tensor]:
    """Identity unless the training input is true."""
    if isinstance(training, Host) and bool(training.item()):
        rate = float(ratio.item()) if isinstance(ratio, Host) else 0.5  # type: ignore[arg-type]
        if rate > 0:
            mask = torch.rand_like(x, dtype=torch.float32) >= rate
            y = torch.where(mask, x / (1.0 - rate), torch.zeros_like(x))
            return y if outputs == 1 else (y, mask)
    return x if outputs == 1 else (x, torch.ones_like(x, dtype=torch.bool))
