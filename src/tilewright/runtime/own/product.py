"""Products with frozen weights in code of our own (`native/product.cpp`): packed once, with what follows fused in.

Faster than the library on few rows and equal on many; as exact as eager, whose sums are also taken in blocks; NaN goes
through every activation; and the threads are those of the generated kernels, so that the two do not get in each other's
way.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.ir.graph import LibraryCall, Operand, bind
from tilewright.ir.ops.epilogue import activations, affine, total
from tilewright.ir.sizes import dims
from tilewright.library.offers.offer import (
    Epilogue,
    FrozenAttention,
    FrozenProduct,
    Fusible,
    Maker,
    channels_last,
)
from tilewright.options import Options
from tilewright.runtime.cpu.huge_pages import on_large_pages
from tilewright.runtime.cpu.pool import pool
from tilewright.runtime.cpu.toolchain import built
from tilewright.runtime.plan.tensors import same_layout
from tilewright.runtime.store.cache import Store
from tilewright.target import Target
from tilewright.tuning.thresholds import OWN_KERNELS

from .attention import attention_call
from .conv_window import Window, dense, laid_out, window_of

SOURCES = tuple(
    Path(__file__).parents[1] / "native" / name for name in ("product.cpp", "depthwise.cpp", "attention.cpp")
)
MAX_DEPTHWISE_TAPS = 64
"""Taps of a depthwise convolution that the native side has room for."""

_ACTIVATIONS = (
    "none", "relu", "clamp", "leaky_relu", "gelu", "gelu_tanh", "silu", "hardswish", "hardsigmoid", "sigmoid", "tanh",
)  # fmt: skip
"""In the order of the native enumeration."""



PLAIN = "none"

_NOT_FINITE, _DENORMAL = 1, 2
"""What `tw_look` says of a weight, as bits."""


class _Task(ctypes.Structure):
    """A product as the native side reads it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "bias", "zeros")),
        *(
            (name, ctypes.c_int64)
            for name in ("columns", "inner", "taps", "height", "width", "out_height", "out_width")
        ),
        *((name, ctypes.c_int64) for name in ("kernel_width", "stride_y", "stride_x", "pad_y", "pad_x")),
        *((name, ctypes.c_int64) for name in ("dilate_y", "dilate_x", "activation")),
        *((name, ctypes.c_float) for name in ("low", "high", "scale", "shift")),
        ("affine", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("line", ctypes.c_int64),
    )


def maker(target: Target, store: Store, options: Options, *, pack_lazily: bool = False) -> Maker:
    """What `library.specialise` asks; it is built (or loaded) when it is asked first."""
    made: list[Products] = []

    def make(task: FrozenProduct | FrozenAttention) -> LibraryCall | None:
        if not made:
            made.append(Products(target, store, options, pack_lazily=pack_lazily))
        return made[0](task)

    return make


T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Gives what `make` makes when it is asked first, always the same, to all threads."""
    made: list[T] = []
    lock = threading.Lock()

    def get() -> T:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0]

    return get


@dataclass(frozen=True, slots=True)
class Prepared:
    """A product for one shape of x, as the native side runs it: the address of its task, the rows of the result, and
    how far apart those of x begin."""

    task: int
    rows: int
    stride: int


@dataclass(frozen=True, slots=True)
class Linear:
    """A product as the native side runs it: its function, and what it is given for x of a shape and strides and for a
    result of these strides (None: it does not take them so)."""

    function: int
    prepared: Callable[[Sequence[int], Sequence[int], Sequence[int]], Prepared | None]


_LINEAR: WeakKeyDictionary[Callable[..., object], Linear] = WeakKeyDictionary()


def linear_of(function: Callable[..., object]) -> Linear | None:
    """How the native side runs what a call calls, if it is a matrix product of ours."""
    try:
        return _LINEAR.get(bind(function))
    except TypeError:  # what is no plain function may have no weak references
        return None


Packed = Callable[[], Tensor]
"""Gives a packed weight, always the same."""


_libraries: dict[tuple[object, ...], ctypes.CDLL] = {}
_lock = threading.Lock()


def _library(flags: tuple[str, ...], store: Store, options: Options) -> ctypes.CDLL:
    """The native side for a compiler and its flags: the same for the whole process. Raises what `build` raises."""
    key = (*flags, options.compiler, os.environ.get("CXX"))
    with _lock:
        if key not in _libraries:
            text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
            _libraries[key] = built([text], flags, store, options)
        return _libraries[key]


class Products:
    """Makes calls for products with frozen weights and for attention; give an instance to `library.specialise`.

    With `pack_lazily`, weights are packed by the first call that reads them: whoever runs the calls must see to it that
    the weights do not change before. Raises what `build` raises."""

    def __init__(self, target: Target, store: Store, options: Options, *, pack_lazily: bool = False) -> None:
        library = _library(target.compiler_flags, store, options)
        threads = pool(store, options)
        for name in ("tw_panel", "tw_lanes", "tw_look"):
            getattr(library, name).restype = ctypes.c_int64
        self._pack_lazily = pack_lazily
        library.tw_attach.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64]
        worth = max(1, int(target.flops / target.cores * target.handover_seconds))
        library.tw_attach(threads.parallel, threads.resizing, threads.held, worth)
        self._library = library
        self.panel: int = library.tw_panel()
        """Columns that are packed together."""
        self.lanes: int = library.tw_lanes()
        place, count = ctypes.c_void_p, ctypes.c_int64
        self._pack_native = library.tw_pack
        self._pack_native.argtypes = [place, *[count] * 6, place, count]
        self._pack_native.restype = None
        self._look_native = library.tw_look
        self._look_native.argtypes = [place, count, count]
        self.run = library.tw_product
        self.run.restype = None
        self.run.argtypes = [place, place, count, count, place, place, count]
        self.address = ctypes.cast(self.run, place).value or 0
        self.run_depthwise = library.tw_depthwise
        self.run_depthwise.restype = None
        self.run_depthwise.argtypes = [place, place, count, place, count]
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
        if task.stride and (window is None or not self._fits(weight, window, task.groups)):
            return None
        depthwise = window is not None and task.groups > 1
        packed = self._pack_depthwise(task) if depthwise else self._pack(task)
        if packed is None:  # borders of a convolution are products with zero here
            return None
        taps = weight[0, 0].numel() if weight.dim() > 2 else 1
        sizes = (weight.shape[0], weight.shape[1], taps)
        return _Form(self, packed, self._padded(bias), sizes, window, task, depthwise).call()

    def _fits(self, weight: Tensor, window: Window, groups: int) -> bool:
        columns, inner = weight.shape[0], weight.shape[1]
        if groups > 1:  # each channel on its own
            return groups == columns and inner == 1 and weight[0, 0].numel() <= MAX_DEPTHWISE_TAPS
        half = max(1, self.panel // 2)
        return (
            inner * window.run >= OWN_KERNELS.min_run_elements
            and columns / (-(-columns // half) * half) >= OWN_KERNELS.min_filled_ratio
        )

    def _pack(self, task: FrozenProduct) -> Packed | None:
        """[N, K, taps...] as [N / panel, taps, K, panel], the last panel filled up with zeros; None if not finite."""
        weight = task.weight
        assert isinstance(weight, Tensor)
        found = self._unusual(weight)
        if found & _DENORMAL and task.flush is not None:
            weight = task.flush()
            assert isinstance(weight, Tensor)
            found = self._unusual(weight)
        if found & _NOT_FINITE:
            return None
        packed = once(functools.partial(self._packed, weight))
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
        """The packed weight."""
        flat = weight.detach()
        flat = flat.reshape(*flat.shape[:2], -1) if flat.dim() > 2 else flat.unsqueeze(2)
        columns, inner, taps = flat.shape
        packed = on_large_pages(torch.empty((-(-columns // self.panel), taps, inner, self.panel)))
        place = packed.data_ptr()
        self._pack_native(flat.data_ptr(), columns, inner, taps, *flat.stride(), place, self.threads())
        return packed

    def _pack_depthwise(self, task: FrozenProduct) -> Packed | None:
        """[C, 1, taps...] as [taps, C], rows filled up to whole vectors; None if not finite."""
        weight = task.weight if task.flush is None else task.flush()
        assert isinstance(weight, Tensor)
        flat = weight.detach().reshape(weight.shape[0], -1)
        filled = pad(flat.t(), (0, -flat.shape[0] % self.lanes)).contiguous()
        return (lambda: filled) if bool(flat.isfinite().all()) else None

    def _padded(self, bias: Tensor | None) -> Tensor | None:
        if bias is None:
            return None
        flat = bias.detach().reshape(-1)
        return pad(flat, (0, -flat.numel() % self.panel)).contiguous()

    def shifted(self, form: _Form, vector: Tensor) -> LibraryCall:
        """The call of `form` with a bias."""
        return replace(form, bias=self._padded(vector)).call()


@dataclass(frozen=True, eq=False)
class _Form(Fusible):
    """A product with what is fused into it. `sizes` are columns, inputs of a tap, taps."""

    owner: Products
    weight: Packed
    bias: Tensor | None
    sizes: tuple[int, ...]
    window: Window | None
    task: FrozenProduct
    depthwise: bool = False
    activation: str = PLAIN
    constants: tuple[float, ...] = ()
    added: bool = False
    affine: tuple[float, ...] = ()
    """Scale and shift of what the activation makes."""

    def call(self) -> LibraryCall:
        """The library call on x, or on x and the tensor that is added before the activation."""
        image = self.window is not None
        strides = channels_last(self.task.shape) if image else dims.dense_strides(self.task.shape)
        wants = (channels_last(self.task.source) if image else None, strides if image else None)
        return LibraryCall(
            "convolution" if image else "linear",
            self,
            (Operand(0), Operand(1)) if self.added else (Operand(0),),
            strides=(strides,),
            reason="convolution" if image else "contraction",
            wants=wants if self.added else wants[:1],
            rows=None if image or self.added else 0,
            channel=1 if image else -1,
            reuses=-1,
            own=True,
        )

    def bind(self) -> Callable[..., Tensor]:
        """What runs, always the same."""
        return self._bound

    @functools.cached_property
    def _bound(self) -> Callable[..., Tensor]:
        twin = replace(self)  # the function holds what it reads, and must not hold who holds it
        return twin.multiply() if self.window is None else twin.convolve()

    def epilogues(self) -> list[Epilogue]:
        """What else can be fused: a bias first, then a sum, then an activation, then a scale and a shift."""
        if self.affine:
            return []
        if self.activation != PLAIN:
            return [Epilogue(affine(), lambda constants, _: replace(self, affine=constants).call())]
        known = _ACTIVATIONS
        found = [
            Epilogue(body, self.activated(name)) for name, body in activations().items() if name in known
        ]
        if not self.added and not self.depthwise:
            found.append(Epilogue(total(), lambda _, __: replace(self, added=True).call(), "equal"))
        if not self.added and self.bias is None:
            found.append(Epilogue(total(), lambda _, vector: self.shifted(vector), "channel"))
        return found

    def activated(self, name: str) -> Callable[[tuple[float, ...], object], LibraryCall]:
        """How to make the call with an activation."""
        return lambda constants, _: replace(self, activation=name, constants=constants).call()

    def shifted(self, vector: object) -> LibraryCall:
        """The call with a bias."""
        assert isinstance(vector, Tensor)
        return self.owner.shifted(self, vector)

    def native(self, run: int = 1, **places: int) -> _Task:
        """The structure for the native side, with taps in runs of `run`; the tensors that it points to are kept by the
        caller."""
        low, high = (*self.constants, 0.0, 0.0)[:2]
        scale, shift = self.affine or (1.0, 0.0)
        columns, channels, taps = self.sizes
        inner, taps = channels * run, taps // run
        return _Task(
            weights=self.weight().data_ptr(), bias=self.bias.data_ptr() if self.bias is not None else None,
            columns=columns, inner=inner, taps=taps, activation=_ACTIVATIONS.index(self.activation), low=low, high=high,
            scale=scale, shift=shift, affine=bool(self.affine), step=channels, **places,
        )  # fmt: skip

    def multiply(self) -> Callable[..., Tensor]:
        """What runs for x [.., K]."""
        run, threads = self.owner.run, self.owner.threads
        columns, length = self.sizes[0], self.sizes[1] * self.sizes[2]
        empty, native = torch.empty, once(self.native)
        address = 0

        def linear(x: Tensor, added: Tensor | None = None) -> Tensor:
            nonlocal address
            if not address:
                address = ctypes.addressof(native())
            if not x.is_contiguous():
                x = x.contiguous()
            out = empty((*x.shape[:-1], columns))
            beside = None
            if added is not None:
                added = added.contiguous()
                beside = added.data_ptr()
            run(address, x.data_ptr(), x.numel() // length, length, beside, out.data_ptr(), threads())
            return out

        def prepared(
            shape: Sequence[int], strides: Sequence[int], out_strides: Sequence[int]
        ) -> Prepared | None:
            out_shape = (*shape[:-1], columns)
            if not dense(shape, strides) or not dense(out_shape, out_strides):
                return None
            return Prepared(ctypes.addressof(native()), math.prod(shape) // length, length)

        _LINEAR[linear] = Linear(self.owner.address, prepared)
        return linear

    def convolve(self) -> Callable[..., Tensor]:
        """What runs for x [batch, channel, height, width]."""
        run, threads, form = self.owner.run, self.owner.threads, self
        known: dict[torch.Size, _Place] = {}
        run_depthwise = self.owner.run_depthwise

        def channelwise(x: Tensor) -> Tensor:
            place = known.get(x.shape)
            if place is None:
                place = known[x.shape] = form.place(x.shape)
            if x.stride() != place.source:
                x = laid_out(x)
            out = torch.empty_strided(place.shape, place.strides)
            run_depthwise(place.address, x.data_ptr(), place.shape[0], out.data_ptr(), threads())
            return out

        def convolution(x: Tensor, added: Tensor | None = None) -> Tensor:
            place = known.get(x.shape)
            if place is None:
                place = known[x.shape] = form.place(x.shape)
            if x.stride() != place.source:
                x = laid_out(x)
            out = torch.empty_strided(place.shape, place.strides)
            beside = None
            if added is not None:
                added = laid_out(added)
                beside = added.data_ptr()
            run(place.address, x.data_ptr(), place.rows, place.inner, beside, out.data_ptr(), threads())
            return out

        def prepared(
            shape: Sequence[int], strides: Sequence[int], out_strides: Sequence[int]
        ) -> Prepared | None:
            size = torch.Size(shape)
            place = known.get(size)
            if place is None:
                place = known[size] = form.place(size)
            laid = same_layout(shape, strides, place.source) and same_layout(
                place.shape, out_strides, place.strides
            )
            return Prepared(place.address, place.rows, place.inner) if laid else None

        if self.depthwise:
            return channelwise
        _LINEAR[convolution] = Linear(self.owner.address, prepared)
        return convolution

    def place(self, shape: torch.Size) -> _Place:
        """The product for images of this shape."""
        assert self.window is not None
        w, (batch, channels), (height, width) = self.window, shape[:2], (1, *shape[2:])[-2:]
        out_height, out_width = w.sizes(height, width)
        space = (out_height, out_width)[4 - len(shape) :]
        zeros = torch.zeros(channels)
        places: dict[str, int] = {}
        if not w.pointwise or self.depthwise:
            places = {
                "zeros": zeros.data_ptr(), "height": height, "width": width, "out_height": out_height,
                "out_width": out_width, "kernel_width": w.kernel[1], "stride_y": w.stride[0], "stride_x": w.stride[1],
                "pad_y": w.padding[0], "pad_x": w.padding[1], "dilate_y": w.dilation[0], "dilate_x": w.dilation[1],
                "run": 1 if self.depthwise else w.run, "line": width * channels,
            }  # fmt: skip
            if places["run"] > 1:
                places |= {"width": width - w.run + 1, "kernel_width": 1}
        native = self.native(**places)
        columns = self.sizes[0]
        return _Place(
            (batch, columns, *space),
            (out_height * out_width * columns, 1, *(out_width * columns, columns)[4 - len(shape) :]),
            (height * width * channels, 1, *(width * channels, channels)[4 - len(shape) :]),
            batch * out_height * out_width,
            channels,
            ctypes.addressof(native),
            (self, native, zeros),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A convolution for one shape of images: of the result, strides; those of x; rows, channels; what the native side
    reads."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: tuple[int, ...]
    rows: int
    inner: int
    address: int
    kept: tuple[object, ...]
