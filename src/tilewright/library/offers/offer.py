"""Offers, and what they are made for: a task with its frozen tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Routine
from tilewright.ir.sizes import dims
from tilewright.ir.task import Attention, Convolution, Product
from tilewright.target import Target
from tilewright.tuning.input_limits import PIECES

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
LARGEST_DENORMAL = SMALLEST_NORMAL * (1 - 2.0**-23)


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """One way to do what a call does. `make` packs what there is to pack, and gives the call on the same
    operands, or None where this way does not fit. One that is `slow` is expected to be slower than those of other
    providers; one that is `coarse` errs more than the program's own call may, and is a way only where there is no
    other."""

    name: str
    make: Callable[[], LibraryCall | None]
    slow: bool = False
    coarse: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """A pointwise op that a routine can do on its result while it writes it.

    `template` is the body over the slots e0 (the element of the result), c0, c1, ... (any constants), and e1 if `extra`
    is given: the element of a second tensor of the result's shape ("equal"), or of a frozen vector along the call's
    channel dim ("channel"). `make(constants, vector)` is the call that does both; with "equal" its last operand is the
    second tensor. `hides_nan` marks library code that makes a number of NaN, which the op itself does not."""

    template: Expr
    make: Callable[[tuple[float, ...], object], LibraryCall]
    extra: Literal["", "equal", "channel"] = ""
    hides_nan: bool = False


class Fusible(Routine):
    """A routine that can do more than the call asks for."""

    @abstractmethod
    def epilogues(self) -> Sequence[Epilogue]:
        """Pointwise ops that it can do on its one result."""

    def behind(self, first: Routine) -> LibraryCall | None:
        """The call that does `first` on its one operand, and then this on what that makes and on the other operands;
        None where that is no faster."""
        del first
        return None


def epilogues_of(call: LibraryCall) -> Sequence[Epilogue]:
    """Pointwise ops that a call can do on its one result."""
    return call.function.epilogues() if isinstance(call.function, Fusible) else ()


@dataclass(frozen=True, slots=True, eq=False)
class FrozenProduct:
    """x times a frozen weight plus a frozen vector, as a task for code that packs the weight.

    A matrix product has a weight [N, K], x [.., K] and a result [.., N]. A convolution has a weight [N, C / groups,
    kernel...], x and a result with their channels at dim 1, and the numbers of its window. `flush` gives a weight
    that holds denormal numbers in the form in which it is used. With `fewer_products`, sums are turned so that
    fewer are needed, which rounds otherwise (`rewrite/winograd`). `uneven` are zeros besides those of `padding`, as
    of a `Convolution`."""

    weight: object
    bias: object | None
    source: tuple[Expr, ...]
    shape: tuple[Expr, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    flush: Callable[[], object] | None = None
    fewer_products: bool = False
    uneven: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class FrozenAttention:
    """Attention with a frozen `mask`, or with a mask that is operand 3 if it is `masked`."""

    task: Attention
    masked: bool = False
    mask: object | None = None


Maker = Callable[[FrozenProduct | FrozenAttention], LibraryCall | None]
"""Gives a call for a product on its one operand x, or for attention on its operands, or None if it has none that is
faster than the library's."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownOperands:
    """What an offer is made for: a product or a convolution with a frozen weight ([N, K] of a product) and bias, or
    attention. `plain` is the call itself with frozen operands in their places."""

    task: Product | Convolution | Attention
    plain: LibraryCall
    weight: Tensor | None = None
    bias: Tensor | None = None
    flush: Callable[[], Tensor] | None = None
    """Gives the weight as it is used, always the same."""
    masked: bool = False
    mask: object | None = None

    def used_weight(self) -> Tensor:
        """The weight as it is used."""
        assert self.flush is not None
        return self.flush()


Provider = Callable[[KnownOperands, Target], Sequence[Offer]]
"""Gives its offers for a task on a machine, those first that are expected to be faster."""


def channels_last(shape: Sequence[Expr]) -> tuple[Expr, ...]:
    """The strides of [batch, channel, space...] with the channel innermost."""
    inner = dims.dense_strides((shape[0], *shape[2:], shape[1]))
    return (inner[0], inner[-1], *inner[1:-1])


def has_channels_innermost(shape: Sequence[Expr], strides: Sequence[Expr]) -> bool:
    """Whether an image with these strides has its channels innermost; those of dims of size 1 do not matter."""
    triples = zip(shape, strides, channels_last(shape), strict=True)
    return all(n is dims.ONE or dims.equal(s, t) for n, s, t in triples)


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
