"""Tensors that jump where eager itself rounds in another way, and how they are judged.

At the edge of a ReLU the last bit of a sum decides whether an element's gradient passes, so in a deep network single
elements of gradients are off by all of their value, at other places with each way to sum. The plain rule compares the
largest error with eager's largest, and of two samples of rare and large numbers either is often several times the
other: it says nothing here. Whether a tensor is of this kind is not for us to say, nor of a model: eager is run in
other ways that are as legal (`ways`), and if none of them fails the plain rule beside eager in some draw of inputs, the
plain rule's verdict stands. If one does, the draws are judged together, eager's runs being eager and the other ways, k
as in the plain rule:

(b) the rms error over all draws is at most k times the worst of eager's runs;
(c) the median over the draws of each element's error fulfils the plain rule beside the same of each of eager's runs:
    jumps are rare and elsewhere each time, so that they vanish in medians, and what errs always stays;
(d) rows (of the first dim, by draw) with elements beyond the plain rule's bound are at most k times as many as in the
    worst of eager's runs, and `FEW`. Of a weight's gradient one edge moves all of a row, the one of its channel, so
    that elements are not counted one by one: their number would be that of a few throws of dice, times a row.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright import accuracy

FORMAT = "the other memory format"
FEW = 4
"""So many jumps more or less are chance."""


def ways(pixels: bool) -> list[str]:
    """The ways to round in which eager runs as well; images have memory formats."""
    return [*([FORMAT] if pixels else []), "two threads", "without oneDNN", "attention in parts"]


@contextlib.contextmanager
def rounding(way: str) -> Iterator[None]:
    """Within it, eager rounds in a way. `FORMAT` is a matter of the model (`in_format`)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if way == "two threads" else 1)
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of graphics cards that torch has no build for
        if way == "without oneDNN":
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        if way == "attention in parts":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def in_format(model: nn.Module, channels_last: bool) -> nn.Module:
    """A copy of a model, its weights in a memory format."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    return copy.deepcopy(model).to(memory_format=form)


def inputs_in_format(inputs: Mapping[str, Tensor], channels_last: bool) -> dict[str, Tensor]:
    """Inputs, images in a memory format."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    return {
        n: t.contiguous(memory_format=form) if t.dim() == 4 and t.is_floating_point() else t
        for n, t in inputs.items()
    }


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a tensor that jumps passes, why not, and the smallest k of the law."""

    passed: bool
    why: str
    relative_k: float


def judged(
    ours: Sequence[Tensor],
    eager: Sequence[Tensor],
    exact: Sequence[Tensor],
    others: Sequence[Sequence[Tensor]],
) -> Judgement | None:
    """The verdict on a tensor of which there is one per draw: ours, eager's and that of float64, and those of eager in
    other ways. None if none of these jumps: the plain rule's verdict stands."""
    if not eager[0].is_floating_point() or not _jumps(eager, exact, others):
        return None
    k, u = accuracy.default_k(eager[0].dtype), torch.finfo(eager[0].dtype).eps / 2
    mine, error = _errors(ours, exact), _errors(eager, exact)
    if not bool(mine.isfinite().all()):
        return Judgement(False, "not finite", float("inf"))
    size = torch.stack([t.reshape(-1).cpu().abs().float() for t in exact])
    bound, free = _quantile(error), u * _rms(size)
    rows = exact[0].shape[0] if exact[0].dim() else 1
    rms_of_runs: list[float] = []
    medians: list[float] = []
    beyond: list[int] = []
    for run in (eager, *others):
        error = _errors(run, exact)
        rms_of_runs.append(_rms(error))
        medians.append(_by_medians(mine, error, size, u))
        beyond.append(_rows_beyond(error, k * (bound + u * size) + free, rows))
    by_rms = max(0.0, _rms(mine) - free) / max(*rms_of_runs, 1e-300)
    by_median = min(medians)
    number = _rows_beyond(mine, k * (bound + u * size) + free, rows)
    by_number = max(0, number - FEW) / max(1, *beyond)
    found = {"its rms error": by_rms, "its median error": by_median, f"{number} jumps": by_number}
    worst = max(found, key=lambda name: found[name])
    text = f"jumps: smallest k {found[worst]:.3g} of {k:g} by {worst} (eager's runs jump {beyond} times)"
    return Judgement(found[worst] <= k, text, found[worst])


def _jumps(eager: Sequence[Tensor], exact: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> bool:
    """Whether eager in another way fails the plain rule beside eager in some draw."""
    return any(
        not accuracy.compare(w, e, r).passed
        for run in others
        for w, e, r in zip(run, eager, exact, strict=True)
    )


def _errors(run: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """By draw and element, as singles: there may be millions."""
    pairs = zip(run, exact, strict=True)
    return torch.stack([(t.double() - r.double()).abs().float().reshape(-1).cpu() for t, r in pairs])


def _rms(t: Tensor) -> float:
    return float(t.square().mean(dtype=torch.float64).sqrt())


def _by_medians(ours: Tensor, eager: Tensor, size: Tensor, u: float) -> float:
    """The smallest relative k of the plain rule for the median errors of elements."""
    around = size.median(0).values.double()
    y, e = (around + t.median(0).values for t in (ours, eager))
    all_ = torch.ones_like(around, dtype=torch.bool)
    found = accuracy._smallest_k(y, e, around, all_, all_, u, False)  # pyright: ignore[reportPrivateUsage]
    return max(found.by_rms, found.by_element / max(1.0, found.eager_k))


def _quantile(error: Tensor) -> float:
    return accuracy._quantile(error.reshape(-1))  # pyright: ignore[reportPrivateUsage]


def _rows_beyond(error: Tensor, limit: Tensor, rows: int) -> int:
    """In how many rows, of all draws, elements are beyond a limit."""
    return int((error > limit).reshape(len(error), rows, -1).any(-1).sum())


__all__ = ["FORMAT", "Judgement", "in_format", "inputs_in_format", "judged", "rounding", "ways"]
