"""Asks every provider for offers: which tasks there may be faster forms of, and what stands for one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.errors import VerifyError
from tilewright.ir.dtype import f32
from tilewright.ir.graph import LibraryCall, Operand, Routine
from tilewright.ir.sizes import dims
from tilewright.ir.task import Attention, Convolution, Offered, Product
from tilewright.library.spare import bound
from tilewright.target import Target
from tilewright.tuning.thresholds import ONEDNN

from . import mkl, onednn, plain
from .offer import KnownOperands, Maker, Offer, Provider, channels_last, flushed
from .own import own_provider

PROVIDERS: tuple[Provider, ...] = (onednn.offers, mkl.offers, plain.offers)
"""Asked behind code of our own. The first offer is taken where nothing is timed."""


@dataclass(frozen=True, slots=True, eq=False)
class Faster:
    """What stands in the place of a call: a faster one, or one of `offers`, for which `call` stands."""

    call: LibraryCall
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True, slots=True)
class Unchosen(Routine):
    """Stands for the function of a call for which an offer is still to be chosen."""

    def bind(self) -> Callable[..., object]:
        """Raises VerifyError: there is none yet."""
        raise VerifyError("a call was run before one of its forms was chosen", phase="run")


def is_offered(call: LibraryCall) -> bool:
    """Whether providers may have a faster form of a call."""
    task = call.task
    known = isinstance(task, (Product, Convolution, Attention)) and task.dtype is f32
    return known and torch.backends.mkldnn.is_available()


def find_faster(
    call: LibraryCall, frozen: Mapping[int, object], target: Target, maker: Maker | None, number: int
) -> Faster | None:
    """What may be faster than a call that `is_offered`, of which operands are `frozen`, on the operands that are left.
    `number` is one that no other call that stands for offers has."""
    task = call.task
    match task:
        case Product():
            if not frozen:
                made = onednn.open_product(call, task, target)
                return None if made is None else Faster(made)
            known = _frozen_product(call, task, frozen)
            least = target.small_product if maker is not None else ONEDNN.min_packed_product_work
            # What is computed step by step is worth it at any size.
            if not task.repeated and onednn.operations(task) < least:
                known = None
        case Convolution():
            known = _frozen_convolution(call, task, frozen)
        case Attention():
            known = None if maker is None else _attention(call, task, frozen)
        case _:
            known = None
    if known is None:
        return None
    own = () if maker is None else (own_provider(maker),)
    others = () if own and _is_for_own_code(task) else PROVIDERS
    found = [offer for provider in (*own, *others) for offer in provider(known, target)]
    found.sort(key=lambda offer: offer.slow)
    return Faster(_open(call, known, number, found), tuple(found))


def _is_for_own_code(task: object) -> bool:
    """Whether the way to a library takes so much of a product's time that only code of our own is tried."""
    return (
        isinstance(task, Product)
        and not task.repeated
        and onednn.operations(task) < ONEDNN.min_packed_product_work
    )


def _open(call: LibraryCall, known: KnownOperands, number: int, offers: Sequence[Offer]) -> LibraryCall:
    """The call that stands for offers, as far as all of them are alike."""
    task, weight, names = known.task, known.weight, tuple(offer.name for offer in offers)
    biased = known.bias is not None
    match task:
        case Product():
            assert weight is not None
            return LibraryCall(
                "linear", Unchosen(), (Operand(0),), strides=(dims.dense_strides(task.shape),), reason="contraction",
                rows=0, task=Offered(number, f"linear {tuple(weight.shape)} {biased}", names),
            )  # fmt: skip
        case Convolution():
            assert weight is not None
            window = (
                task.padding,
                task.output_padding,
                task.stride,
                task.dilation,
                task.groups,
                task.transposed,
                task.uneven,
            )
            return LibraryCall(
                "convolution", Unchosen(), (Operand(0),), strides=(channels_last(task.shape),), reason="convolution",
                wants=(channels_last(task.x_shape),), channel=1,
                task=Offered(number, f"convolution {tuple(weight.shape)} {window} {biased}", names),
            )  # fmt: skip
        case Attention():
            masked = task.mask is not None
            key = f"{task.causal} {task.scale} {masked}"
            return replace(call, task=Offered(number, key, names))


def _frozen_product(call: LibraryCall, task: Product, frozen: Mapping[int, object]) -> KnownOperands | None:
    """A product of which all but x is frozen."""
    x, weight = call.args[task.x], call.args[task.weight]
    bias = call.args[task.bias] if task.bias is not None else None
    if task.scaled or not isinstance(x, Operand) or not isinstance(weight, Operand) or x.index in frozen:
        return None
    vector = frozen.get(bias.index) if isinstance(bias, Operand) else None
    held = frozen.get(weight.index)
    if x == weight or (isinstance(vector, Tensor) and vector.dim() != 1) or not isinstance(held, Tensor):
        return None
    if bias is not None and vector is None:
        return None
    matrix = held.detach().t() if task.transposed else held.detach()
    packed = flushed(vector) if isinstance(vector, Tensor) else None
    return KnownOperands(task, bound(call, frozen), matrix, packed, functools.cache(lambda: flushed(matrix)))


def _frozen_convolution(
    call: LibraryCall, task: Convolution, frozen: Mapping[int, object]
) -> KnownOperands | None:
    """A convolution of which all but x is frozen. A weight that is not packed gains nothing (and if it is large, much
    is lost where x has its channels innermost)."""
    x, weight, bias = call.args[task.x], call.args[task.weight], call.args[task.bias]
    if not isinstance(x, Operand) or not isinstance(weight, Operand) or x.index in frozen:
        return None
    held = frozen.get(weight.index)
    vector = frozen.get(bias.index) if isinstance(bias, Operand) else None
    if not isinstance(held, Tensor) or (bias is not None and not isinstance(vector, Tensor)):
        return None
    if task.transposed and len(task.shape) != 4:
        return None
    inner = held.detach()
    packed = flushed(vector.detach()) if isinstance(vector, Tensor) else None
    return KnownOperands(task, bound(call, frozen), inner, packed, functools.cache(lambda: flushed(inner)))


def _attention(call: LibraryCall, task: Attention, frozen: Mapping[int, object]) -> KnownOperands | None:
    """Attention on operands that are not frozen, but for its mask."""
    if any(k in frozen for k in range(3)):
        return None
    given = dict(call.kwargs)
    mask = given.get(task.mask) if isinstance(task.mask, str) else None
    mask = call.args[task.mask] if isinstance(task.mask, int) else mask
    held = frozen.get(mask.index) if isinstance(mask, Operand) else None
    return KnownOperands(task, bound(call, frozen), masked=mask is not None and held is None, mask=held)
