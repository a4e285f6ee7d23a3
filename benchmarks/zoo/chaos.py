"""Tensors that jump where eager itself rounds in another way, and how they are judged.

At the edge of a ReLU the last bit of a sum decides whether an element's gradient passes, so in a deep network single
elements of gradients are off by all of their value, at other places with each way to sum. The plain rule compares the
largest error with eager's largest, and of two samples of rare and large numbers either is often several times the
other: it says nothing here. Whether a model is of this kind is not for us to say: eager is run in other ways that are
as legal (`ways`), and if none of them fails the plain rule beside eager in any draw of inputs and any of the tensors
that are looked at, the plain rule's verdict stands. If one does, by `jump` of a tensor's size, the draws are judged
together, eager's runs being eager and the other ways, k as in the plain rule. Of each run the `RARE` worst draws are
set aside first: near the end of a network an edge is met once in a hundred draws, in one run and not in the next, and
how far it moves a tensor has nothing to do with rounding.

(a) what is set aside errs at most `FAR` times as far as the largest jump of eager's, as a share of the tensor's size,
    or as the worst draw of eager's runs in this tensor;
(b) the rms error of what remains is at most k times the worst of eager's runs;
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
CAPTURED = "as torch captures it"
"""Op by op, with the routines that torch chooses for a captured graph: for attention, others than eager's."""
FEW = 4
"""So many jumps more or less are chance."""
RARE = 2
"""Draws of a run, of about twenty, that are set aside. A run that jumps as often as eager has so many more than it
with a chance of a few in a hundred."""
NOTHING = 1e-3
"""What is smaller than such a share of eager's error has no digit that is right."""
FAR = 10.0
"""The edges of a draw are few, so that the largest jump of some draws is a sample of one."""


def ways(pixels: bool, device: str = "cpu") -> list[str]:
    """The ways to round in which eager runs as well; images have memory formats."""
    of_device = ["two threads", "without oneDNN"] if device == "cpu" else ["without cuDNN"]
    return [*([FORMAT] if pixels else []), *of_device, "attention in parts", CAPTURED]


@contextlib.contextmanager
def rounding(way: str) -> Iterator[None]:
    """Within it, eager rounds in a way. `FORMAT` is a matter of the model (`in_format`), and so is `CAPTURED`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if way == "two threads" else 1)
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of graphics cards that torch has no build for
        if way == "without oneDNN":
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        if way == "without cuDNN":
            stack.enter_context(torch.backends.cudnn.flags(enabled=False, allow_tf32=False))
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


def jump(eager: Sequence[Tensor], exact: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> float:
    """How far eager jumps in a tensor of which there is one per draw, as a share of its size: the largest rms error of
    a draw in which eager in another way fails the plain rule beside eager. 0 if none does."""
    if not eager[0].is_floating_point():
        return 0.0
    found = [0.0]
    for run in others:
        for w, e, r in zip(run, eager, exact, strict=True):
            if not accuracy.compare(w, e, r).passed:
                found.append(max(_share(w, r), _share(e, r)))
    return max(found)


def judged(
    ours: Sequence[Tensor],
    eager: Sequence[Tensor],
    exact: Sequence[Tensor],
    others: Sequence[Sequence[Tensor]],
    largest: float,
) -> Judgement | None:
    """The verdict on a tensor of which there is one per draw: ours, eager's and that of float64, and those of eager in
    other ways. `largest` is the largest jump of eager's, in this tensor or in others of the model: where it is 0 the
    plain rule's verdict stands, and there is none here."""
    if not eager[0].is_floating_point() or not largest:
        return None
    k, u = accuracy.default_k(eager[0].dtype), torch.finfo(eager[0].dtype).eps / 2
    every = [_errors(run, exact) for run in (ours, eager, *others)]
    if not bool(every[0].isfinite().all()):
        return Judgement(False, "not finite", float("inf"))
    size = torch.stack([t.reshape(-1).cpu().abs().float() for t in exact])
    kept = [_common(errors) for errors in every]
    free, rows = u * _rms(size), exact[0].shape[0] if exact[0].dim() else 1
    limit = k * (_quantile(every[1][kept[1]]) + u * size) + free
    beyond = [_rows_beyond(e[c], limit[c], rows) for e, c in zip(every, kept, strict=True)]
    rms = [_rms(e[c]) for e, c in zip(every, kept, strict=True)]
    worst_of_eager = max(float(_of_draws(e).amax()) for e in every[1:])
    far = FAR * (largest * _of_draws(size)).clamp_min(max(worst_of_eager, 1e-300))
    aside = torch.ones(len(size), dtype=torch.bool).index_fill(0, kept[0], False)
    by = {
        "what is set aside": k * max((_of_draws(every[0]) / far)[aside].tolist(), default=0.0),
        "its rms error": max(0.0, rms[0] - free) / max(*rms[1:], 1e-300),
        "its median error": min(_by_medians(every[0], e, size, eager[0].dtype) for e in every[1:]),
        f"{beyond[0]} jumps": max(0, beyond[0] - FEW) / max(1, *beyond[1:]),
    }
    worst = max(by, key=lambda name: by[name])
    text = f"jumps: smallest k {by[worst]:.3g} of {k:g} by {worst} (eager's runs jump {beyond[1:]} times)"
    return Judgement(by[worst] <= k, text, by[worst])


def noise(ours: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> Judgement | None:
    """The verdict on a tensor that is zero but for rounding in every draw, as the gradient of the bias of keys (which
    moves all logits of a row alike): how large its noise is tells of the routine that is taken (two libraries differ
    by 3), not of what is right. It passes with up to `FAR` times eager's worst draw; none where eager has a right
    digit."""
    if not eager[0].is_floating_point():
        return None
    mine, theirs = (_of_draws(_errors(run, exact)) for run in (ours, eager))
    size = _of_draws(torch.stack([r.reshape(-1).cpu().double() for r in exact]))
    if not bool((size < NOTHING * theirs).all()):
        return None
    k = 2.0 * float(mine.max() / (FAR * theirs.max()))
    return Judgement(k <= 2.0, f"noise {k:.3g} of 2 (zero but for rounding)", k)


def _common(errors: Tensor) -> Tensor:
    """The draws of a run that are not set aside, in order. Half of them always stay."""
    order = errors.square().mean(1, dtype=torch.float64).argsort()
    return order[: max(len(errors) - RARE, (len(errors) + 1) // 2)].sort().values


def _of_draws(t: Tensor) -> Tensor:
    """The rms of each draw."""
    return t.square().mean(1, dtype=torch.float64).sqrt()


def _share(t: Tensor, exact: Tensor) -> float:
    """The rms error of a tensor as a share of its size, at most all of it: of a tensor of zeros it says nothing."""
    return float(
        (_of_draws(_errors([t], [exact])) / _of_draws(exact.reshape(1, -1).cpu())).clamp_max(1.0).nan_to_num()
    )


def _errors(run: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """By draw and element, as singles: there may be millions."""
    pairs = zip(run, exact, strict=True)
    return torch.stack([(t.double() - r.double()).abs().float().reshape(-1).cpu() for t, r in pairs])


def _rms(t: Tensor) -> float:
    return float(t.square().mean(dtype=torch.float64).sqrt())


def _by_medians(ours: Tensor, eager: Tensor, size: Tensor, dtype: torch.dtype) -> float:
    """The smallest relative k of the plain rule for the median errors of elements."""
    around = size.median(0).values.double()
    y, e = (around + t.median(0).values for t in (ours, eager))
    all_ = torch.ones_like(around, dtype=torch.bool)
    found = accuracy._smallest_k(y, e, around, all_, all_, dtype)  # pyright: ignore[reportPrivateUsage]
    return max(found.by_rms, found.by_element / max(1.0, found.eager_k))


def _quantile(error: Tensor) -> float:
    return accuracy._quantile(error.reshape(-1))  # pyright: ignore[reportPrivateUsage]


def _rows_beyond(error: Tensor, limit: Tensor, rows: int) -> int:
    """In how many rows, of all draws, elements are beyond a limit."""
    return int((error > limit).reshape(len(error), rows, -1).any(-1).sum())


__all__ = [
    "CAPTURED",
    "FORMAT",
    "Judgement",
    "in_format",
    "inputs_in_format",
    "judged",
    "jump",
    "rounding",
    "ways",
]
