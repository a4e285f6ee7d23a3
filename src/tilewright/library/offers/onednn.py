"""Faster forms of matrix products and convolutions: torch's oneDNN ops, on weights packed once.

On processors where MKL takes a slow path, oneDNN is more than twice as fast, even on plain weights. Below about two
million operations its call costs more than it saves (10 us against 2 us).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.ir.dtype import f32
from tilewright.ir.expr import Expr, Symbol, slot, substitute
from tilewright.ir.graph import LibraryCall, Operand, Routine
from tilewright.ir.ops.epilogue import activations, total
from tilewright.ir.sizes import dims
from tilewright.ir.task import Attention, Convolution, Product
from tilewright.target import Target
from tilewright.tuning.thresholds import ONEDNN, SIZES

from .offer import Epilogue, Fusible, KnownOperands, Offer, channels_last

onednn = torch.ops.mkldnn

Attribute = tuple[str, tuple[float, ...], str]
"""What the library does on its result: name, numbers, algorithm."""
PLAIN: Attribute = ("none", (), "")


def offers(known: KnownOperands, target: Target) -> Sequence[Offer]:
    """The library on packed weights, which it has no form for where a convolution is one over lines."""
    del target
    task, bias = known.task, known.bias
    match task:
        case Product():
            make = lambda: PackedLinear(packed_parts(known.used_weight()), bias, task.shape).call()  # noqa: E731
        case Convolution() if len(task.shape) != 3:
            window = PackedWindow(
                list(task.padding), list(task.output_padding), list(task.stride), list(task.dilation), task.groups,
                task.transposed, tuple(n for pair in reversed(task.uneven) for n in pair),
            )  # fmt: skip
            make = lambda: window.call(known.used_weight(), bias, task.x_shape, task.shape)  # noqa: E731
            # With channels innermost the library sums all products of a result in one chain.
            chain = known.weight[0].numel() if known.weight is not None else 0
            return (Offer("onednn", make, coarse=chain > ONEDNN.max_sum_chain),)
        case Convolution() | Attention():
            return ()
    return (Offer("onednn", make),)


# --- what the library can do on its result -------------------------------------------------------


class _Extensible(Protocol):
    """A routine that can take an activation, or a vector that is added along its channels."""

    @property
    def bias(self) -> Tensor | None: ...
    @property
    def attribute(self) -> Attribute: ...
    def activated(self, attribute: Attribute) -> LibraryCall: ...
    def shifted(self, vector: Tensor) -> LibraryCall: ...


_ATTRIBUTES: Mapping[str, tuple[str, str]] = {
    "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", ""), "hardswish": ("hardswish", ""),
    "sigmoid": ("sigmoid", ""), "tanh": ("tanh", ""), "leaky_relu": ("leaky_relu", ""), "relu": ("relu", ""),
    "clamp": ("hardtanh", ""), "hardsigmoid": ("hardsigmoid", ""),
}  # fmt: skip
_HIDES_NAN = frozenset({"relu", "clamp", "hardsigmoid"})
"""The library computes these with instructions that take the other operand of a NaN."""


def _epilogues(form: _Extensible) -> list[Epilogue]:
    """Activations, and a bias where there is none yet."""
    if form.attribute != PLAIN:
        return []
    found = [
        Epilogue(body, functools.partial(_activated, form, _ATTRIBUTES[name]), hides_nan=name in _HIDES_NAN)
        for name, body in activations().items()
    ]
    if form.bias is None:
        found.append(Epilogue(total(), functools.partial(_shifted, form), "channel"))
    return found


def _activated(
    form: _Extensible, named: tuple[str, str], constants: tuple[float, ...], _: object
) -> LibraryCall:
    name, algorithm = named
    return form.activated((name, constants, algorithm))


def _shifted(form: _Extensible, _: tuple[float, ...], vector: object) -> LibraryCall:
    assert isinstance(vector, Tensor)
    return form.shifted(vector.detach().reshape(-1).contiguous())


# --- matrix products -----------------------------------------------------------------------------


def operations(task: Product) -> int:
    """2 x multiply-adds of a product; unseen sizes are typical."""
    size = dims.mul(dims.integer(2), dims.prod(task.shape), task.x_shape[-1])
    symbols = [s.value for s in dims.symbols_of(size)]
    return dims.evaluate(size, {s.name: SIZES.unseen_size for s in symbols if isinstance(s, Symbol)})


def open_product(call: LibraryCall, task: Product, target: Target) -> LibraryCall | None:
    """The product with a weight that may change from call to call; None where that is not faster."""
    x, weight = call.args[task.x], call.args[task.weight]
    bias = call.args[task.bias] if task.bias is not None else None
    if task.scaled or x == weight or not isinstance(x, Operand) or not target.slow_products:
        return None
    chain, rows = dims.static(task.x_shape[-1]), dims.static(dims.prod(task.shape[:-1]))
    if operations(task) < ONEDNN.min_plain_product_work or (
        chain is not None and chain > ONEDNN.max_sum_chain
    ):
        return None
    if (bias is not None and task.bias_rank != 1) or (rows is not None and rows < ONEDNN.min_plain_rows):
        return None
    return LibraryCall(
        "onednn.linear", OpenLinear(task.transposed), (x, weight, bias),
        strides=(dims.dense_strides(task.shape),), reason="contraction", rows=x.index, reuses=-1,
    )  # fmt: skip


_linear = onednn._linear_pointwise.default
_linear_add = onednn._linear_pointwise.binary


@dataclass(frozen=True, slots=True)
class OpenLinear(Routine):
    """x [.., K] times a weight that may change, [K, N] if `transposed`, else [N, K], plus a vector."""

    transposed: bool

    def bind(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """What runs."""
        return _plain_transposed if self.transposed else lambda x, w, b: _plain_transposed(x, w.t(), b)


def _plain_transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The library sums K in one chain, and brings a weight with gaps into form a thousand times as slowly as it
    multiplies."""
    dense = weight.is_contiguous() or weight.t().is_contiguous()
    if (
        x.numel() >= ONEDNN.min_plain_rows * weight.shape[0]
        and weight.shape[0] <= ONEDNN.max_sum_chain
        and dense
    ):
        return _linear(x, weight.t(), bias, "none", [], "")
    flat = x.reshape(-1, weight.shape[0])
    out = torch.mm(flat, weight) if bias is None else torch.addmm(bias, flat, weight)
    return out.view(*x.shape[:-1], weight.shape[1])


def packed_parts(weight: Tensor) -> tuple[Tensor, ...]:
    """A weight [N, K] in the library's own form, cut along K into parts of at most `ONEDNN.max_sum_chain`."""
    count = max(1, -(-weight.shape[1] // ONEDNN.max_sum_chain))
    step = max(1, -(-weight.shape[1] // count))
    step += -step % 16
    return tuple(onednn._reorder_linear_weight(w.contiguous()) for w in weight.split(step, 1))


@dataclass(frozen=True, eq=False)
class PackedLinear(Fusible):
    """x [.., K] times a packed weight, plus a vector, then an activation."""

    weights: tuple[Tensor, ...]
    bias: Tensor | None
    shape: tuple[Expr, ...]
    attribute: Attribute = PLAIN

    def call(self) -> LibraryCall:
        """The library call on x alone."""
        return LibraryCall(
            "onednn.linear", self, (Operand(0),), strides=(dims.dense_strides(self.shape),), reason="contraction",
            rows=0, reuses=-1,
        )  # fmt: skip

    def epilogues(self) -> Sequence[Epilogue]:
        """See `Fusible`. Behind a sum of parts the library has no activation."""
        return [e for e in _epilogues(self) if len(self.weights) == 1 or e.extra]

    def activated(self, attribute: Attribute) -> LibraryCall:
        """The call with an activation."""
        return replace(self, attribute=attribute).call()

    def shifted(self, vector: Tensor) -> LibraryCall:
        """The call with a bias."""
        return replace(self, bias=vector).call()

    def bind(self) -> Callable[[Tensor], Tensor]:
        """What runs."""
        bias, (name, numbers, algorithm) = self.bias, self.attribute
        scalars = list(numbers)
        first, *rest = self.weights
        if not rest:
            return lambda x: _linear(x, first, bias, name, scalars, algorithm)
        sizes = [w.shape[1] for w in self.weights]

        def in_parts(x: Tensor) -> Tensor:
            part, *parts = x.split(sizes, -1)
            out = _linear(part, first, bias, "none", [], "")
            for part, weight in zip(parts, rest, strict=True):
                out = _linear_add(part, out, weight, None, "add")
            return out

        return in_parts


# --- convolutions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedWindow:
    """The numbers of a convolution, one list entry per dim of space."""

    padding: list[int]
    output_padding: list[int]
    stride: list[int]
    dilation: list[int]
    groups: int
    transposed: bool
    around: tuple[int, ...] = ()
    """Zeros around the image besides the padding, as torch's `pad` takes them."""

    def call(
        self, weight: Tensor, bias: Tensor | None, source: Sequence[Expr], shape: Sequence[Expr]
    ) -> LibraryCall:
        """The call on a packed weight, for an input of shape `source`."""
        more = [sum(self.around[k : k + 2]) for k in range(len(self.around) - 2, -1, -2)] or [0] * len(
            source[2:]
        )
        sides = [
            (dims.static(s) or ONEDNN.assumed_image_side) + n for s, n in zip(source[2:], more, strict=True)
        ]
        size = (1, dims.static(source[1]) or ONEDNN.assumed_image_side, *sides)
        packed = self.pack(weight.contiguous(), list(size))
        vector = bias.contiguous() if bias is not None else None
        strides = channels_last(source), channels_last(shape)
        return PackedConvolution(packed, vector, self, *strides, size=size).call()

    def pack(self, weight: Tensor, size: list[int]) -> Tensor:
        """The weight in the library's own form, best for an input of `size`."""
        if self.transposed:
            return onednn._reorder_convolution_transpose_weight(
                weight, self.padding, self.output_padding, self.stride, self.dilation, self.groups, size
            )
        return onednn._reorder_convolution_weight(
            weight, self.padding, self.stride, self.dilation, self.groups, size
        )


_convolution = onednn._convolution_pointwise.default
_convolution_add = onednn._convolution_pointwise_.binary
_transposed_convolution = onednn._convolution_transpose_pointwise.default


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, eq=False)
class PackedConvolution(Fusible):
    """A convolution with a packed weight, plus a vector, then a sum or an activation. Channels lie innermost."""

    weight: Tensor
    bias: Tensor | None
    window: PackedWindow
    wants: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    attribute: Attribute = PLAIN
    added: bool = False
    size: tuple[int, ...] = ()
    """That of the image for which the weight was packed."""

    def call(self) -> LibraryCall:
        """The library call on x alone, or on x and the tensor that the result is added to, whose memory it takes."""
        return LibraryCall(
            "onednn.convolution", self, (Operand(0), Operand(1)) if self.added else (Operand(0),),
            strides=(self.strides,), reason="convolution",
            wants=(self.wants, self.strides) if self.added else (self.wants,), channel=1,
            pure=not self.added, reuses=1 if self.added else -1,
        )  # fmt: skip

    def epilogues(self) -> Sequence[Epilogue]:
        """See `Fusible`."""
        epilogues = [] if self.added else _epilogues(self)
        plain = self.attribute == PLAIN and not self.added
        if plain and not self.window.transposed:
            epilogues.append(Epilogue(total(), lambda _, __: replace(self, added=True).call(), "equal"))
            both = substitute(activations()["relu"], {slot("e", 0, f32): total()})
            relu: Attribute = ("relu", (), "")
            epilogues.append(
                Epilogue(both, lambda _, __: replace(self, added=True, attribute=relu).call(), "equal", True)
            )
        return epilogues

    def activated(self, attribute: Attribute) -> LibraryCall:
        """The call with an activation."""
        return replace(self, attribute=attribute).call()

    def shifted(self, vector: Tensor) -> LibraryCall:
        """The call with a bias."""
        return replace(self, bias=vector).call()

    def bind(self) -> Callable[..., Tensor]:
        """What runs."""
        w, weight, bias = self.window, self.weight, self.bias
        name, numbers, algorithm = self.attribute
        scalars, places = list(numbers), (w.padding, w.stride, w.dilation, w.groups)
        widen = functools.partial(pad, pad=list(w.around)) if w.around else _same
        if self.added:
            unary = None if self.attribute == PLAIN else name
            return lambda x, other: _convolution_add(
                other, widen(x), weight, bias, *places, "add", 1.0, unary, scalars, algorithm
            )
        if w.transposed:
            return lambda x: _transposed_convolution(
                x,
                weight,
                bias,
                w.padding,
                w.output_padding,
                w.stride,
                w.dilation,
                w.groups,
                name,
                scalars,
                algorithm,
            )
        return lambda x: _convolution(widen(x), weight, bias, *places, name, scalars, algorithm)
