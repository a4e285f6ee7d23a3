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
from torch.nn.functional import hardshrink

from tilewright.errors import VerifyError
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Expr, Symbol, slot, substitute
from tilewright.ir.graph import (
    Attention,
    Epilogue,
    FrozenProduct,
    LibraryCall,
    Maker,
    Offer,
    Operand,
    Specialise,
    Value,
)
from tilewright.ir.ops.epilogue import activations, total
from tilewright.ir.sizes import dims
from tilewright.ir.spare import bound
from tilewright.target import Target
from tilewright.tuning.input_limits import PIECES
from tilewright.tuning.thresholds import ONEDNN

from . import mkl

aten = torch.ops.aten
onednn = torch.ops.mkldnn


SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
LARGEST_DENORMAL = SMALLEST_NORMAL * (1 - 2.0**-23)

Attribute = tuple[str, tuple[float, ...], str]
"""What the library does on its result: name, numbers, algorithm."""
PLAIN: Attribute = ("none", (), "")


def specialiser(
    target: object, inputs: Sequence[Value], shape: Sequence[Expr], *, repeated: bool = False
) -> Specialise | None:
    """How to make a call of op `target`, with a result of `shape`, faster; None if it is not one that can be. What is
    `repeated` step by step is worth it at any size."""
    if not torch.backends.mkldnn.is_available() or not all(v.dtype is f32 for v in inputs):
        return None
    if target in _PRODUCTS:
        least = 0 if repeated else ONEDNN.min_packed_product_work
        product = _Product(_PRODUCTS[target], tuple(inputs), tuple(shape), least)
        return product.specialise
    if target in (aten.convolution.default, aten._convolution.default) and len(shape) in (3, 4, 5):
        return _Convolve(tuple(inputs), tuple(shape)).specialise
    if target in _ATTENTIONS:
        return functools.partial(_attention, _ATTENTIONS[target], tuple(inputs))
    return None


def unchosen(*_: object) -> Tensor:
    """Stands for the function of a call whose rivals are still to be chosen from."""
    raise VerifyError("a call was run before one of its forms was chosen", phase="run")


_ATTENTIONS: dict[object, tuple[int, int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (3, -1),
    aten.scaled_dot_product_attention.default: (4, 3),
}
"""Where dropout (causal behind it) and the mask (-1: by name) stand among the arguments."""


def _attention(
    places: tuple[int, int], inputs: tuple[Value, ...], call: LibraryCall, frozen: Mapping[int, object],
    maker: Maker | None, _: Target,
) -> LibraryCall | None:  # fmt: skip
    """Attention as the maker has it, if it has it."""
    given, (dropout, at_mask) = dict(call.kwargs), places
    args = list(call.args) + [None] * 6
    mask = given.get("attn_mask") if at_mask < 0 else args[at_mask]
    scale = given.get("scale")
    operands = [a for a in args[:3] if isinstance(a, Operand) and a.index not in frozen]
    if maker is None or len(operands) < 3 or args[dropout] or not isinstance(scale, (int, float, type(None))):
        return None
    if any(len(inputs[a.index].shape) != 4 for a in operands) or not isinstance(mask, (Operand, type(None))):
        return None
    q, k, v = (inputs[a.index].shape for a in operands)
    if not dims.equal(q[-1], v[-1]) or not dims.equal(q[0], k[0]) or [a.index for a in operands] != [0, 1, 2]:
        return None
    held = frozen.get(mask.index) if mask is not None else None
    task = Attention(q, k, bool(args[dropout + 1]), scale, mask is not None and held is None, held)
    rivals = (Offer("own", lambda: maker(task)), Offer("library", lambda: bound(call, frozen)))
    return replace(call, specialise=None, rivals=rivals, key=f"{task.causal} {scale} {mask is not None}")


# --- what the library can do on its result -------------------------------------------------------


class _Fusible(Protocol):
    """A form of a call that can take an activation, or a vector that is added along its channels."""

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


def _epilogues(form: _Fusible) -> list[Epilogue]:
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
    form: _Fusible, named: tuple[str, str], constants: tuple[float, ...], _: object
) -> LibraryCall:
    name, algorithm = named
    return form.activated((name, constants, algorithm))


def _shifted(form: _Fusible, _: tuple[float, ...], vector: object) -> LibraryCall:
    assert isinstance(vector, Tensor)
    return form.shifted(vector.detach().reshape(-1).contiguous())


# --- matrix products -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slots:
    """Where the arguments of a product stand; the weight is [K, N] if `transposed`, else [N, K]."""

    x: int
    weight: int
    bias: int | None
    transposed: bool


_PRODUCTS: dict[object, _Slots] = {
    aten.mm.default: _Slots(0, 1, None, True),
    aten.addmm.default: _Slots(1, 2, 0, True),
    aten.linear.default: _Slots(0, 1, 2, False),
}


@dataclass(frozen=True, slots=True)
class _Product:
    """A captured product: its operands, and its shape."""

    slots: _Slots
    inputs: tuple[Value, ...]
    shape: tuple[Expr, ...]
    least: int
    """Operations from which packing pays."""

    def specialise(
        self, call: LibraryCall, frozen: Mapping[int, object], maker: Maker | None, target: Target
    ) -> LibraryCall | None:
        """The packed form if all but x is frozen, else the plain one; None where neither is faster."""
        args, slots = call.args, self.slots
        x, weight = args[slots.x], args[slots.weight]
        bias = args[slots.bias] if slots.bias is not None and slots.bias < len(args) else None
        if any(value != 1 for _, value in call.kwargs) or len(args) > 3:  # beta and alpha
            return None
        if not isinstance(x, Operand) or not isinstance(weight, Operand) or x.index in frozen or x == weight:
            return None
        vector = frozen.get(bias.index) if isinstance(bias, Operand) else None
        if isinstance(vector, Tensor) and vector.dim() != 1:
            return None
        held = frozen.get(weight.index)
        work = _size(dims.mul(dims.integer(2), dims.prod(self.shape), self.inputs[x.index].shape[-1]))
        if held is None:
            chain = dims.static(self.inputs[x.index].shape[-1])
            plain = target.slow_products and not frozen and work >= ONEDNN.min_plain_product_work
            return (
                self.plain(x, weight, bias)
                if plain and (chain is None or chain <= ONEDNN.max_sum_chain)
                else None
            )
        if not isinstance(held, Tensor) or work < self.least or (bias is not None and vector is None):
            return None
        matrix = held.detach().t() if slots.transposed else held.detach()
        vector = flushed(vector) if isinstance(vector, Tensor) else None
        flush = functools.cache(lambda: flushed(matrix))
        task = FrozenProduct(matrix, vector, self.inputs[x.index].shape, self.shape, flush=flush)
        rivals = [
            Offer("onednn", lambda: _Linear(_packed(flush()), vector, self.shape).call()),
            *mkl.rivals(flush, vector, self.shape),
        ]
        if maker is not None:
            rivals.insert(0, Offer("own", lambda: maker(task)))
        return LibraryCall(
            "linear", unchosen, (Operand(0),), strides=(dims.dense_strides(self.shape),), reason="contraction", rows=0,
            rivals=tuple(rivals), key=f"linear {tuple(matrix.shape)} {vector is not None}",
        )  # fmt: skip

    def plain(self, x: Operand, weight: Operand, bias: object) -> LibraryCall | None:
        """The product with a weight that may change from call to call."""
        if bias is not None and not isinstance(bias, Operand):
            return None
        vector = isinstance(bias, Operand) and len(self.inputs[bias.index].shape) == 1
        rows = dims.static(dims.prod(self.shape[:-1]))
        if isinstance(bias, Operand) and not vector or (rows is not None and rows < ONEDNN.min_plain_rows):
            return None
        function = _plain_transposed if self.slots.transposed else _plain
        return LibraryCall(
            "onednn.linear", function, (x, weight, bias), strides=(dims.dense_strides(self.shape),),
            reason="contraction", rows=x.index, reuses=-1,
        )  # fmt: skip


def flushed(weight: Tensor) -> Tensor:
    """The weight with zeros in the place of denormal numbers, if it has some and its largest is 2^64 times larger.

    They are what training leaves of channels that it switched off. Many processors take a hundred times as long for
    products with them, and the sums do not see them: they are rounded away as any float sum rounds."""
    rows = max(1, PIECES.compared_weight_elements // max(1, weight[:1].numel())) if weight.dim() else 1
    parts = weight.split(rows) if weight.dim() else (weight,)
    # Block by block in a core's cache: fresh memory for a second weight would cost more than the comparison.
    if all(torch.equal(hardshrink(part, LARGEST_DENORMAL), part) for part in parts):
        return weight
    large = bool(weight.abs().max() >= SMALLEST_NORMAL * 2.0**64)
    return hardshrink(weight, LARGEST_DENORMAL) if large else weight


def _size(e: Expr) -> int:
    """The value of a size; each symbol in it counts as 64."""
    symbols = [s.value for s in dims.symbols_of(e)]
    return dims.evaluate(e, {s.name: 64 for s in symbols if isinstance(s, Symbol)})


_linear = onednn._linear_pointwise.default
_linear_add = onednn._linear_pointwise.binary


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _plain_transposed(x, weight.t(), bias)


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


def _packed(weight: Tensor) -> tuple[Tensor, ...]:
    """A weight [N, K] in the library's own form, cut along K into parts of at most ONEDNN.max_sum_chain."""
    count = max(1, -(-weight.shape[1] // ONEDNN.max_sum_chain))
    step = max(1, -(-weight.shape[1] // count))
    step += -step % 16
    return tuple(onednn._reorder_linear_weight(w.contiguous()) for w in weight.split(step, 1))


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    """x [.., K] times a packed weight, plus a vector, then an activation."""

    weights: tuple[Tensor, ...]
    bias: Tensor | None
    shape: tuple[Expr, ...]
    attribute: Attribute = PLAIN

    def call(self) -> LibraryCall:
        """The library call on x alone."""
        # Behind a sum of parts the library has no activation.
        epilogues = [e for e in _epilogues(self) if len(self.weights) == 1 or e.extra]
        return LibraryCall(
            "onednn.linear", self.function(), (Operand(0),), strides=(dims.dense_strides(self.shape),),
            reason="contraction", epilogues=tuple(epilogues), rows=0, reuses=-1,
        )  # fmt: skip

    def activated(self, attribute: Attribute) -> LibraryCall:
        """The call with an activation."""
        return replace(self, attribute=attribute).call()

    def shifted(self, vector: Tensor) -> LibraryCall:
        """The call with a bias."""
        return replace(self, bias=vector).call()

    def function(self) -> Callable[[Tensor], Tensor]:
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


def channels_last(shape: Sequence[Expr]) -> tuple[Expr, ...]:
    """The strides of [batch, channel, space...] with the channel innermost."""
    inner = dims.dense_strides((shape[0], *shape[2:], shape[1]))
    return (inner[0], inner[-1], *inner[1:-1])


@dataclass(frozen=True, slots=True)
class _Convolve:
    """A captured convolution: its operands, and its shape."""

    inputs: tuple[Value, ...]
    shape: tuple[Expr, ...]

    def specialise(
        self, call: LibraryCall, frozen: Mapping[int, object], maker: Maker | None, target: Target
    ) -> LibraryCall | None:
        """The packed form, if all but x is frozen. A weight that is not packed gains nothing (and if it is large, much
        is lost where x has its channels innermost)."""
        del target
        x, weight, bias, stride, padding, dilation, transposed, extra, groups = call.args[:9]
        if not isinstance(x, Operand) or not isinstance(weight, Operand) or x.index in frozen:
            return None
        held = frozen.get(weight.index)
        vector = frozen.get(bias.index) if isinstance(bias, Operand) else None
        if not isinstance(held, Tensor) or (bias is not None and not isinstance(vector, Tensor)):
            return None
        rank = len(self.shape) - 2
        numbers = [_each(v, rank) for v in (stride, padding, dilation, extra)]
        if not isinstance(groups, int) or any(n is None for n in numbers) or (transposed and rank != 2):
            return None
        steps, borders, spread, more = (n or [] for n in numbers)
        source, inner = self.inputs[x.index].shape, held.detach()
        vector = flushed(vector.detach()) if isinstance(vector, Tensor) else None
        flush = functools.cache(lambda: flushed(inner))
        window = _Window(borders, more, steps, spread, groups, bool(transposed))
        rivals = [Offer("onednn", lambda: window.call(flush(), vector, source, self.shape))]
        if rank == 1:  # which the library has no packed form for
            rivals = [Offer("library", lambda: bound(call, frozen))]
        if maker is not None and not transposed:
            task = FrozenProduct(
                inner, vector, source, self.shape, tuple(steps), tuple(borders), tuple(spread), groups, flush
            )
            late = groups > 1 and held[0, 0].numel() > ONEDNN.max_unblocked_taps
            rivals.insert(int(late), Offer("own", lambda: maker(task)))
        return LibraryCall(
            "convolution", unchosen, (Operand(0),), strides=(channels_last(self.shape),), reason="convolution",
            wants=(channels_last(source),), channel=1, rivals=tuple(rivals),
            key=f"convolution {tuple(held.shape)} {window} {vector is not None}",
        )  # fmt: skip


def _each(values: object, rank: int) -> list[int] | None:
    """One constant per dim of space; None if there is none."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, int) for v in values):
        return None
    fixed = [int(v) for v in values]
    return fixed * rank if len(fixed) == 1 else fixed


@dataclass(frozen=True, slots=True)
class _Window:
    """The numbers of a convolution, one list entry per dim of space."""

    padding: list[int]
    output_padding: list[int]
    stride: list[int]
    dilation: list[int]
    groups: int
    transposed: bool

    def call(
        self, weight: Tensor, bias: Tensor | None, source: Sequence[Expr], shape: Sequence[Expr]
    ) -> LibraryCall:
        """The call on a packed weight, for an input of shape `source`."""
        packed = self.pack(
            weight.contiguous(), [1, *(dims.static(s) or ONEDNN.assumed_image_side for s in source[1:])]
        )
        vector = bias.contiguous() if bias is not None else None
        return _Conv(packed, vector, self, channels_last(source), channels_last(shape)).call()

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


@dataclass(frozen=True, slots=True, eq=False)
class _Conv:
    """A convolution with a packed weight, plus a vector, then a sum or an activation. Channels lie innermost."""

    weight: Tensor
    bias: Tensor | None
    window: _Window
    wants: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    attribute: Attribute = PLAIN
    added: bool = False

    def call(self) -> LibraryCall:
        """The library call on x alone, or on x and the tensor that the result is added to, whose memory it takes."""
        epilogues = [] if self.added else _epilogues(self)
        plain = self.attribute == PLAIN and not self.added
        if plain and not self.window.transposed:
            epilogues.append(Epilogue(total(), lambda _, __: replace(self, added=True).call(), "equal"))
            both = substitute(activations()["relu"], {slot("e", 0, f32): total()})
            relu: Attribute = ("relu", (), "")
            epilogues.append(
                Epilogue(both, lambda _, __: replace(self, added=True, attribute=relu).call(), "equal", True)
            )
        return LibraryCall(
            "onednn.convolution", self.function(), (Operand(0), Operand(1)) if self.added else (Operand(0),),
            strides=(self.strides,), reason="convolution", epilogues=tuple(epilogues),
            wants=(self.wants, self.strides) if self.added else (self.wants,), channel=1,
            pure=not self.added, reuses=1 if self.added else -1,
        )  # fmt: skip

    def activated(self, attribute: Attribute) -> LibraryCall:
        """The call with an activation."""
        return replace(self, attribute=attribute).call()

    def shifted(self, vector: Tensor) -> LibraryCall:
        """The call with a bias."""
        return replace(self, bias=vector).call()

    def function(self) -> Callable[..., Tensor]:
        """What runs."""
        w, weight, bias = self.window, self.weight, self.bias
        name, numbers, algorithm = self.attribute
        scalars, places = list(numbers), (w.padding, w.stride, w.dilation, w.groups)
        if self.added:
            unary = None if self.attribute == PLAIN else name
            return lambda x, other: _convolution_add(
                other, x, weight, bias, *places, "add", 1.0, unary, scalars, algorithm
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
        return lambda x: _convolution(x, weight, bias, *places, name, scalars, algorithm)
