"""Products and convolutions with frozen weights in code of our own, with what is fused into them, as library calls."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Operand, Routine
from tilewright.ir.ops.epilogue import activations, affine, total
from tilewright.ir.sizes import dims
from tilewright.library.offers.offer import Epilogue, FrozenProduct, Fusible, channels_last
from tilewright.runtime.plan.tensors import same_layout
from tilewright.tuning.runtime_thresholds import OWN_KERNELS

from .conv_window import ConvWindow, dense, laid_out
from .native import LINEAR, BoundProduct, Linear, Packed, Task, once

ACTIVATIONS = (
    "none", "relu", "clamp", "leaky_relu", "gelu", "gelu_tanh", "silu", "hardswish", "hardsigmoid", "sigmoid", "tanh",
)  # fmt: skip
"""In the order of the native enumeration."""

PLAIN = "none"


class NativeMethod(Enum):
    """How the native side does it."""

    SUMS = "sums"
    DEPTHWISE = "depthwise"
    DEPTHWISE_CHAIN = "depthwise chain"
    WINOGRAD = "winograd"
    FEW_CHANNELS = "few channels"


class Owner(Protocol):
    """What of the built library is needed here."""

    @property
    def panel(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def cached_bytes(self) -> int: ...
    @property
    def runs(self) -> Mapping[NativeMethod, NativeFunction]: ...
    @property
    def scratch(self) -> int: ...
    @property
    def threads(self) -> Callable[[], int]: ...


@dataclass(frozen=True, slots=True)
class NativeFunction:
    """A function of the native side, and where it lies."""

    run: Callable[..., object]
    address: int


def padded(bias: Tensor | None, panel: int) -> Tensor | None:
    """A bias as the native side reads it."""
    if bias is None:
        return None
    flat = bias.detach().reshape(-1)
    return pad(flat, (0, -flat.numel() % panel)).contiguous()


@dataclass(frozen=True, eq=False)
class FusedProduct(Fusible):
    """A product with what is fused into it. `sizes` are columns, inputs of a tap, taps."""

    owner: Owner
    weight: Packed
    bias: Tensor | None
    sizes: tuple[int, ...]
    window: ConvWindow | None
    task: FrozenProduct
    way: NativeMethod = NativeMethod.SUMS
    plain: Tensor | None = None
    """The weight as it came."""
    activation: str = PLAIN
    constants: tuple[float, ...] = ()
    added: bool = False
    affine: tuple[float, ...] = ()
    """Scale and shift of what the activation makes."""
    first: FusedProduct | None = None
    """The product that makes the image of a depthwise convolution, in a chain."""
    then: FusedProduct | None = None
    """The product of what a depthwise convolution makes, in a chain."""

    def call(self) -> LibraryCall:
        """The library call on x, or on x and the tensor that is added before the activation."""
        image = self.window is not None
        shape = (self.then or self).task.shape
        strides = channels_last(shape) if image else dims.dense_strides(shape)
        few = self.way is NativeMethod.FEW_CHANNELS
        source = (self.first or self).task.source
        wants = (channels_last(source) if image and not few else None, strides if image else None)
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
        if self.affine or self.way is NativeMethod.DEPTHWISE_CHAIN:
            return []
        if self.activation != PLAIN:
            return [Epilogue(affine(), lambda constants, _: replace(self, affine=constants).call())]
        found = [
            Epilogue(body, self.activated(name))
            for name, body in activations().items()
            if name in ACTIVATIONS
        ]
        if not self.added and self.way is not NativeMethod.DEPTHWISE:
            found.append(Epilogue(total(), lambda _, __: replace(self, added=True).call(), "equal"))
        if not self.added and self.bias is None:
            found.append(Epilogue(total(), lambda _, vector: self.shifted(vector), "channel"))
        return found

    def behind(self, first: Routine) -> LibraryCall | None:
        """The call of a chain: this one and `first`, of which one is a depthwise convolution and the other a product
        over channels, where the image between them, or one that such a chain has already, is large."""
        if not isinstance(first, FusedProduct):
            return None
        if (
            first.is_product
            and not first.added
            and self.way is NativeMethod.DEPTHWISE
            and self.fits_chains(first.task.shape)
        ):
            return replace(self, way=NativeMethod.DEPTHWISE_CHAIN, first=first).call()
        chained = first.way is NativeMethod.DEPTHWISE_CHAIN and first.then is None
        plain = first.way is NativeMethod.DEPTHWISE and first.fits_chains(first.task.shape)
        if not self.is_product or not (chained or plain):
            return None
        return replace(first, way=NativeMethod.DEPTHWISE_CHAIN, then=self, added=self.added).call()

    @property
    def is_whole(self) -> bool:
        """Whether it has the products that its way is done with, and these fit."""
        columns = self.sizes[0]
        if self.way is not NativeMethod.DEPTHWISE_CHAIN:
            return self.first is self.then is None
        first = self.first is None or (
            self.first.is_product and not self.first.added and self.first.sizes[0] == columns
        )
        then = self.then is None or (self.then.is_product and self.then.sizes[1:] == (columns, 1))
        return first and then and self.sizes[1] == 1 and not (self.first is self.then is None)

    @property
    def is_product(self) -> bool:
        """Whether it multiplies the channels of each place of an image."""
        return self.way is NativeMethod.SUMS and self.window is not None and self.window.pointwise

    def fits_chains(self, image: Sequence[Expr]) -> bool:
        """Whether a depthwise convolution can be one of a chain, and an `image` that it reads or makes is known to be
        larger than what stays in the own caches of the cores in use."""
        known = [n for size in image if (n := dims.static(size)) is not None]
        large = OWN_KERNELS.min_between_ratio * self.owner.cached_bytes
        return (
            len(known) == len(image) == 4
            and math.prod(known) * ctypes.sizeof(ctypes.c_float) >= large
            and self.window is not None
            and self.window.is_small
            and self.sizes[0] >= self.owner.lanes
        )

    def activated(self, name: str) -> Callable[[tuple[float, ...], object], LibraryCall]:
        """How to make the call with an activation."""
        return lambda constants, _: replace(self, activation=name, constants=constants).call()

    def shifted(self, vector: object) -> LibraryCall:
        """The call with a bias."""
        assert isinstance(vector, Tensor)
        return replace(self, bias=padded(vector, self.owner.panel)).call()

    def native(self, run: int = 1, **places: int) -> Task:
        """The structure for the native side, with taps in runs of `run`; the tensors that it points to are kept by the
        caller."""
        low, high = (*self.constants, 0.0, 0.0)[:2]
        scale, shift = self.affine or (1.0, 0.0)
        columns, channels, taps = self.sizes
        inner, taps = channels * run, taps // run
        return Task(
            weights=self.weight().data_ptr(), bias=self.bias.data_ptr() if self.bias is not None else None,
            columns=columns, inner=inner, taps=taps, activation=ACTIVATIONS.index(self.activation), low=low, high=high,
            scale=scale, shift=shift, affine=bool(self.affine), step=channels, **places,
        )  # fmt: skip

    def multiply(self) -> Callable[..., Tensor]:
        """What runs for x [.., K]."""
        routine, threads = self.owner.runs[self.way], self.owner.threads
        run = routine.run
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
        ) -> BoundProduct | None:
            out_shape = (*shape[:-1], columns)
            if not dense(shape, strides) or not dense(out_shape, out_strides):
                return None
            return BoundProduct(ctypes.addressof(native()), math.prod(shape) // length, length)

        LINEAR[linear] = Linear(routine.address, prepared)
        return linear

    def convolve(self) -> Callable[..., Tensor]:
        """What runs for x [batch, channel, height, width]."""
        routine, threads, form = self.owner.runs[self.way], self.owner.threads, self
        run = routine.run
        lay = Tensor.contiguous if self.way is NativeMethod.FEW_CHANNELS else laid_out
        known: dict[torch.Size, ConvolutionPlace] = {}

        def convolution(x: Tensor, added: Tensor | None = None) -> Tensor:
            place = known.get(x.shape)
            if place is None:
                place = known[x.shape] = form.place(x.shape)
            if x.stride() != place.source:
                x = lay(x)
            out = torch.empty_strided(place.shape, place.strides)
            beside = None
            if added is not None:
                added = laid_out(added)
                beside = added.data_ptr()
            run(place.address, x.data_ptr(), place.rows, place.inner, beside, out.data_ptr(), threads())
            return out

        def prepared(
            shape: Sequence[int], strides: Sequence[int], out_strides: Sequence[int]
        ) -> BoundProduct | None:
            size = torch.Size(shape)
            place = known.get(size)
            if place is None:
                place = known[size] = form.place(size)
            laid = same_layout(shape, strides, place.source) and same_layout(
                place.shape, out_strides, place.strides
            )
            return BoundProduct(place.address, place.rows, place.inner) if laid else None

        LINEAR[convolution] = Linear(routine.address, prepared)
        return convolution

    def place(self, shape: torch.Size) -> ConvolutionPlace:
        """The product for images of this shape."""
        assert self.window is not None
        w, (batch, channels), (height, width) = self.window, shape[:2], (1, *shape[2:])[-2:]
        out_height, out_width = w.sizes(height, width)
        space = (out_height, out_width)[4 - len(shape) :]
        zeros = torch.zeros(channels)
        few = self.way is NativeMethod.FEW_CHANNELS
        places: dict[str, int] = {}
        if not w.pointwise or self.way is not NativeMethod.SUMS:
            places = {
                "zeros": zeros.data_ptr(), "height": height, "width": width, "out_height": out_height,
                "out_width": out_width, "kernel_width": w.kernel[1], "stride_y": w.stride[0], "stride_x": w.stride[1],
                "pad_y": w.padding[0], "pad_x": w.padding[1], "dilate_y": w.dilation[0], "dilate_x": w.dilation[1],
                "run": w.run if self.way is NativeMethod.SUMS else 1, "line": width * channels,
            }  # fmt: skip
            if places["run"] > 1:
                places |= {"width": width - w.run + 1, "kernel_width": 1}
        if few:
            places |= {"run": w.kernel[1], "scratch": self.owner.scratch}
        kept: list[object] = []
        if self.way is NativeMethod.WINOGRAD:
            assert self.plain is not None
            kept.append(plain := self.plain.detach().contiguous())
            places |= {"plain": plain.data_ptr(), "scratch": self.owner.scratch}
        for name, product in (("first", self.first), ("then", self.then)):
            if product is not None:
                kept.append(part := product.native())
                places |= {name: ctypes.addressof(part), "scratch": self.owner.scratch}
        native = self.native(**places)
        columns = (self.then or self).sizes[0]
        return ConvolutionPlace(
            (batch, columns, *space),
            (out_height * out_width * columns, 1, *(out_width * columns, columns)[4 - len(shape) :]),
            (height * width * channels, height * width, width, 1)
            if few
            else (height * width * channels, 1, *(width * channels, channels)[4 - len(shape) :]),
            batch * out_height * out_width,
            channels,
            ctypes.addressof(native),
            (self, native, zeros, *kept),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionPlace:
    """A convolution for one shape of images: of the result, strides; those of x; rows, channels; what the native side
    reads."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: tuple[int, ...]
    rows: int
    inner: int
    address: int
    kept: tuple[object, ...]
