"""Torch's side of buffers: element types, layouts that fit, copies between layouts."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewright.ir.dtype import DType
from tilewright.tuning.search_limits import TIMER

TORCH: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
"""Torch's dtype by the name of ours."""


def torch_dtype(d: DType) -> torch.dtype:
    """The torch dtype; types that only library calls can hold are named as torch names them."""
    found = TORCH.get(d.name) or getattr(torch, d.name)
    assert isinstance(found, torch.dtype)
    return found


_short = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)


def _empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


Make = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]
empty_strided: Make = _short or _empty
"""A new CPU tensor of a shape, strides in elements, and dtype."""


def maker_on(device: str) -> Make:
    """As `empty_strided`, on another device."""
    if device == "cpu":
        return empty_strided
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if quick is not None and torch.cuda.device_count() == 1:  # it makes tensors on the current device
        return quick
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def same_layout(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether strides `a` and `b` (elements) address the same elements: strides of sizes 0 and 1 do not matter."""
    return 0 in shape or all(n == 1 or x == y for n, x, y in zip(shape, a, b, strict=True))


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy the elements; dims that `target` repeats (stride 0) are written once."""
    for d, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, source = target.narrow(d, 0, 1), source.narrow(d, 0, 1)
    target.copy_(source)


def lay_out(source: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of `source` with these strides (elements)."""
    if source.is_cpu:
        out = empty_strided(tuple(source.shape), tuple(strides), source.dtype)
    else:
        out = torch.empty_strided(source.shape, strides, dtype=source.dtype, device=source.device)
    copy_into(out, source)
    return out


def drawn(t: Tensor, seed: int | None = None) -> Tensor:
    """`t` filled with normal random numbers that the program's own generators know nothing of; those of one `seed`, and
    of none, are always the same."""
    generator = torch.Generator(t.device)
    return t.normal_(generator=generator if seed is None else generator.manual_seed(seed))


def filled(t: Tensor) -> Tensor:
    """`t`, new and alone in its storage, filled with ordinary numbers, for clocks: some normal random ones again and
    again. To draw as many as a large tensor has takes longer than most calls that are timed with it."""
    flat = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
    done = min(flat.numel(), TIMER.drawn_elements)
    drawn(flat[:done])
    while done < flat.numel():
        more = min(done, flat.numel() - done)
        flat[done : done + more] = flat[:more]
        done += more
    return t


def memory_range(t: Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that `t` touches; empty tensors touch nothing."""
    start = t.data_ptr()
    if t.numel() == 0:
        return start, start
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return start, start + (reach + 1) * t.element_size()


def repeats_memory(t: Tensor) -> bool:
    """Whether two elements of `t` may share memory (a sufficient test: sorted strides must nest)."""
    need = 1
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1):
        if stride < need:
            return True
        need = stride * (size - 1) + need
    return False
