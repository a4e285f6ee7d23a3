"""Code of our own as a provider: whoever compiles hands in what makes its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.task import Attention, Convolution, Product
from tilewright.target import Target
from tilewright.tuning.thresholds import ONEDNN

from .offer import FrozenAttention, FrozenProduct, KnownOperands, Maker, Offer, Provider


def own_provider(maker: Maker) -> Provider:
    """The provider whose calls `maker` makes."""

    def offers(known: KnownOperands, target: Target) -> Sequence[Offer]:
        del target
        task, weight = known.task, known.weight
        match task:
            case Attention():
                attention = FrozenAttention(task, known.masked, known.mask)
                return (Offer("own", lambda: maker(attention)),)
            case Product():
                made = FrozenProduct(weight, known.bias, task.x_shape, task.shape, flush=known.flush)
                return (Offer("own", lambda: maker(made)),)
            case Convolution(transposed=False):
                window = (task.stride, task.padding, task.dilation, task.groups, known.flush)
                made = FrozenProduct(
                    weight, known.bias, task.x_shape, task.shape, *window, uneven=task.uneven
                )
                slow = (
                    task.groups > 1
                    and weight is not None
                    and weight[0, 0].numel() > ONEDNN.max_unblocked_taps
                )
                fewer = replace(made, fewer_products=True)
                return (Offer("own", lambda: maker(made), slow), Offer("winograd", lambda: maker(fewer)))
            case Convolution():
                return ()

    return offers
