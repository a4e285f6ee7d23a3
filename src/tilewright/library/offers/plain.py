"""The call as the program wrote it, as one of the offers: where no other library has a packed form."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.task import Attention, Convolution
from tilewright.target import Target

from .offer import KnownOperands, Offer


def offers(known: KnownOperands, target: Target) -> Sequence[Offer]:
    """The call itself, for attention and for convolutions over lines."""
    del target
    task = known.task
    alone = isinstance(task, Attention) or (isinstance(task, Convolution) and len(task.shape) == 3)
    return (Offer("library", lambda: known.plain),) if alone else ()
