"""Products with frozen weights in code of our own (`native/product.cpp`): packed once, with what follows fused in.

Faster than the library on few rows and equal on many; as exact as eager, whose sums are also taken in blocks; NaN goes
through every activation; and the threads are those of the generated kernels, so that the two do not get in each other's
way.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.ir.graph import LibraryCall
from tilewright.library.offers.offer import FrozenAttention, FrozenProduct, Maker
from tilewright.options import Options
from tilewright.runtime.cpu.huge_pages import on_large_pages
from tilewright.runtime.cpu.pool import pool
from tilewright.runtime.store.cache import ContentStore
from tilewright.target import Target
from tilewright.tuning.runtime_thresholds import OWN_KERNELS

from .attention import attention_call
from .conv_window import ConvWindow, window_of
from .form import FusedProduct, NativeFunction, NativeMethod, padded
from .native import Packed, load_library, once
from .winograd import fits, pack

MAX_FEW_CHANNELS = 4
"""Channels of images whose lines are laid out with borders, so that a line of a window is one run."""

MAX_DEPTHWISE_TAPS = 64
"""Taps of a depthwise convolution that the native side has room for."""

_NOT_FINITE, _DENORMAL = 1, 2
"""What `tw_look` says of a weight, as bits."""


def maker(target: Target, store: ContentStore, options: Options, *, pack_lazily: bool = False) -> Maker:
    """What `library.specialise` asks; it is built (or loaded) when it is asked first."""
    made: list[ProductCalls] = []

    def make(task: FrozenProduct | FrozenAttention) -> LibraryCall | None:
        if not made:
            made.append(ProductCalls(target, store, options, pack_lazily=pack_lazily))
        return made[0](task)

    return make


class ProductCalls:
    """Makes calls for products with frozen weights and for attention; give an instance to `library.specialise`.

    With `pack_lazily`, weights are packed by the first call that reads them: whoever runs the calls must see to it that
    the weights do not change before. Raises what `build` raises."""

    def __init__(
        self, target: Target, store: ContentStore, options: Options, *, pack_lazily: bool = False
    ) -> None:
        library = load_library(target.compiler_flags, store, options)
        threads = pool(store, options)
        for name in ("tw_panel", "tw_lanes", "tw_look", "tw_winograd_panel"):
            getattr(library, name).restype = ctypes.c_int64
        self._pack_lazily = pack_lazily
        library.tw_attach.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64]
        worth = max(1, int(target.flops / target.cores * target.handover_seconds))
        library.tw_attach(threads.parallel, threads.resizing, threads.held, worth)
        self._library = library
        self.panel: int = library.tw_panel()
        """Columns that are packed together."""
        self.winograd_panel: int = library.tw_winograd_panel()
        self.lanes: int = library.tw_lanes()
        place, count = ctypes.c_void_p, ctypes.c_int64
        self._pack_native = library.tw_pack
        self._pack_native.argtypes = [place, *[count] * 6, place, count]
        self._pack_native.restype = None
        self._look_native = library.tw_look
        self._look_native.argtypes = [place, count, count]
        self.runs = {way: _routine(library, way) for way in NativeMethod}
        self.floats = library.tw_attention_floats
        self.floats.restype = count
        self.floats.argtypes = [count, count]
        self.run_attention = library.tw_attention
        self.run_attention.restype = count
        self.run_attention.argtypes = [place, place, count]
        self.scratch = threads.scratch
        self.trim = options.trim == "assume_finite"
        fixed, sign = options.threads, -1 if options.pin_threads else 1
        self.threads: Callable[[], int] = lambda: sign * (fixed or torch.get_num_threads())
        """As the native side wants it: negative for pinned ones."""
        used = min(target.cores, abs(self.threads()))
        self.cached_bytes: int = target.core.capacity * used
        """What the own caches of the cores in use hold together."""

    def __call__(self, task: FrozenProduct | FrozenAttention) -> LibraryCall | None:
        """The call for `task`; None where the library is the better choice."""
        return attention_call(self, task) if isinstance(task, FrozenAttention) else self.product(task)

    def product(self, task: FrozenProduct) -> LibraryCall | None:
        """The call for a product."""
        weight, bias = task.weight, task.bias
        if not isinstance(weight, Tensor) or not (bias is None or isinstance(bias, Tensor)):
            return None
        if weight.dtype is not torch.float32 or not weight.is_cpu or not 0 < weight.numel():
            return None
        window = window_of(task, weight) if task.stride else None
        way = self._way(task, weight, window)
        if way is None:
            return None
        usable = self._usable(weight, task)
        if usable is None:  # borders of a convolution are products with zero here
            return None
        taps = weight[0, 0].numel() if weight.dim() > 2 else 1
        sizes = (weight.shape[0], weight.shape[1], taps)
        return FusedProduct(
            self, self.packed_later(usable, way), padded(bias, self.panel), sizes, window, task, way, usable
        ).call()

    def _way(self, task: FrozenProduct, weight: Tensor, window: ConvWindow | None) -> NativeMethod | None:
        """How a product is done; None where it is not."""
        if not task.stride:
            return None if task.fewer_products else NativeMethod.SUMS
        if window is None:
            return None
        if task.fewer_products:
            return (
                NativeMethod.WINOGRAD
                if task.groups == 1 and weight.dim() == 4 and fits(window, weight, task.shape)
                else None
            )
        if not self._fits(weight, window, task.groups):
            return None
        if task.groups > 1:
            return NativeMethod.DEPTHWISE
        return NativeMethod.FEW_CHANNELS if _in_lines(weight, window) else NativeMethod.SUMS

    def _fits(self, weight: Tensor, window: ConvWindow, groups: int) -> bool:
        columns, inner = weight.shape[0], weight.shape[1]
        if groups > 1:  # each channel on its own
            return groups == columns and inner == 1 and weight[0, 0].numel() <= MAX_DEPTHWISE_TAPS
        half = max(1, self.panel // 2)
        run = window.kernel[1] if _in_lines(weight, window) else window.run
        return (
            inner * run >= OWN_KERNELS.min_run_elements
            and columns / (-(-columns // half) * half) >= OWN_KERNELS.min_filled_ratio
        )

    def _usable(self, weight: Tensor, task: FrozenProduct) -> Tensor | None:
        """The weight as it is used; None if it is not finite."""
        found = self._unusual(weight)
        if found & _DENORMAL and task.flush is not None:
            weight = task.flush()  # type: ignore[assignment]
            assert isinstance(weight, Tensor)
            found = self._unusual(weight)
        return None if found & _NOT_FINITE else weight

    def packed_later(self, weight: Tensor, way: NativeMethod) -> Packed:
        """Gives the weight as the native side reads it."""
        match way:
            case NativeMethod.SUMS | NativeMethod.FEW_CHANNELS:
                packed = once(functools.partial(self._packed, weight))
            case NativeMethod.DEPTHWISE | NativeMethod.DEPTHWISE_CHAIN:
                packed = once(functools.partial(self._packed_depthwise, weight))
            case NativeMethod.WINOGRAD:
                packed = once(functools.partial(pack, weight, self.winograd_panel))
        if not self._pack_lazily:
            packed()
        return packed

    def _unusual(self, weight: Tensor) -> int:
        """Which unusual numbers are in a weight."""
        flat = (
            weight.detach().permute(sorted(range(weight.dim()), key=weight.stride, reverse=True)).contiguous()
        )
        return self._look_native(flat.data_ptr(), flat.numel(), self.threads())

    def _packed(self, weight: Tensor) -> Tensor:
        """[N, K, taps...] as [N / panel, taps, K, panel], the last panel filled up with zeros."""
        flat = weight.detach()
        flat = flat.reshape(*flat.shape[:2], -1) if flat.dim() > 2 else flat.unsqueeze(2)
        columns, inner, taps = flat.shape
        packed = on_large_pages(torch.empty((-(-columns // self.panel), taps, inner, self.panel)))
        place = packed.data_ptr()
        self._pack_native(flat.data_ptr(), columns, inner, taps, *flat.stride(), place, self.threads())
        return packed

    def _packed_depthwise(self, weight: Tensor) -> Tensor:
        """[C, 1, taps...] as [vectors of channels, taps, lanes]: the last vector is that of the last channels, which it
        may share with the one before; fewer channels than a vector has are filled up with zeros."""
        flat = weight.detach().reshape(weight.shape[0], -1)
        flat = pad(flat, (0, 0, 0, max(0, self.lanes - flat.shape[0])))
        starts = [min(c, flat.shape[0] - self.lanes) for c in range(0, weight.shape[0], self.lanes)]
        return torch.stack([flat[c : c + self.lanes].t() for c in starts])


def _in_lines(weight: Tensor, window: ConvWindow) -> bool:
    """Whether a line of the window is one run of floats once the image's borders are laid out."""
    few = weight.dim() == 4 and weight.shape[1] <= MAX_FEW_CHANNELS
    return few and window.kernel[1] > 1 and window.dilation[1] == 1


_FUNCTIONS = {
    NativeMethod.SUMS: "tw_product",
    NativeMethod.DEPTHWISE: "tw_depthwise",
    NativeMethod.DEPTHWISE_CHAIN: "tw_depthwise_chain",
    NativeMethod.WINOGRAD: "tw_winograd",
    NativeMethod.FEW_CHANNELS: "tw_few_channels",
}


def _routine(library: ctypes.CDLL, way: NativeMethod) -> NativeFunction:
    run = getattr(library, _FUNCTIONS[way])
    place, count = ctypes.c_void_p, ctypes.c_int64
    run.restype = None
    run.argtypes = [place, place, count, count, place, place, count]
    return NativeFunction(run, ctypes.cast(run, place).value or 0)
