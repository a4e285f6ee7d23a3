"""What a step left behind, judged: over other draws of inputs where the first does not decide, and by the law of
tensors that jump (`chaos`) where eager does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.zoo import chaos
from tilewright import accuracy

DRAWS = 20
"""Other inputs over which a tensor is judged that does not pass with the first ones alone. Where a gradient jumps, as
at the edge of a ReLU, one input may meet our rounding or eager's, and neither errs by little then. A jump meets one
element in a million, so a few draws may show it on one side only."""
MANY = (100, 400)
"""Draws over which is judged what fewer refuse: an error that either may meet shows on both sides over so many, and
what always errs stays. None is allowed to be larger for it."""
PATIENCE = 600.0
"""Seconds of a processor that the draws before may take if so many are to follow."""
NEAR = 1.5
"""So many times the k of the plain rule may be chance, where exchanging the roles shows it."""
PROBES = 8
"""Tensors from first to last in which jumps of eager's are looked for beside as many of those that do not pass. An edge
moves the gradients of all weights before it."""
TELLING = 1 << 14
"""About so many elements of a tensor are kept of other draws: those of all weights would be gigabytes."""


@dataclass(frozen=True)
class Step:
    """What a training step leaves behind."""

    results: list[Tensor]
    gradients: list[Tensor]
    buffers: list[Tensor]


Triple = tuple[Tensor, Tensor, Tensor]
Trio = tuple[Step, Step, Step]
"""Ours, eager's and that of float64."""


Kept = Mapping[int, Tensor | None]
"""Places of tensors in what a step calls by a name, and which rows of them are looked at: None is all."""
More = Callable[[str, Kept, Sequence[int]], list[list[Triple]]]
"""Of such tensors: ours, eager's and that of float64, per draw of these numbers (0 is the first inputs)."""
Others = Callable[[str, Kept, Sequence[int]], list[list[list[Tensor]]]]
"""Of such tensors: those of eager in each other way to round (`chaos.ways`), per draw of these numbers."""


def taken(found: Sequence[Tensor], kept: Kept) -> list[Tensor]:
    """The rows that are kept of the tensors at these places."""
    return [found[k].cpu() if rows is None else found[k].cpu()[rows] for k, rows in kept.items()]


def telling(ours: Tensor, eager: Tensor, exact: Tensor) -> Tensor | None:
    """Rows that are kept of a tensor: a third where ours errs most, a third where eager does, a third from first to
    last. Exchanging ours and eager's chooses the same."""
    ours, eager, exact = ours.cpu(), eager.cpu(), exact.cpu()
    if exact.dim() < 1 or not exact.is_floating_point() or exact.numel() <= TELLING:
        return None
    rows = len(exact)
    third = -(-TELLING * rows // (3 * exact.numel()))
    if 3 * third >= rows or ours.shape != exact.shape:
        return None
    errors = [(t.double() - exact).abs().nan_to_num(torch.inf, torch.inf) for t in (ours, eager)]
    worst = [e.reshape(rows, -1).amax(1).topk(third).indices for e in errors]
    return torch.cat([*worst, torch.arange(0, rows, -(-rows // third))]).unique()


Verdicts = dict[int, accuracy.Verdict | chaos.Judgement]
"""By place."""


def judged(name: str, first: Trio, more: More, others: Others = lambda *_: []) -> record.Facts:
    """The worst verdict of the tensors that a step calls `name`. What does not pass in the first step is judged over
    that one and `more` of them, all at once: eager must err as much somewhere (of another shape than eager's it stays
    wrong: here elements stand in a row). What does not pass so is judged by the law of tensors that jump, if eager's
    `others` show that the model is one where they do, beside these `others`, and as chance (`_exchanged`); and what
    does not pass then over `MANY` draws, by all of these."""
    ours, eager, exact = (getattr(s, name) for s in first)
    if len(ours) != len(eager):
        return {"passed": False, "why": f"{len(ours)} tensors, eager {len(eager)}"}
    trios = enumerate(zip(ours, eager, exact, strict=True))
    verdicts: Verdicts = {k: accuracy.compare(*(t.cpu() for t in trio)) for k, trio in trios}
    doubtful = [k for k, v in verdicts.items() if not v.passed and ours[k].shape == eager[k].shape]
    facts: record.Facts = {}
    if doubtful:
        probes = [k for k in range(0, len(ours), -(-len(ours) // PROBES)) if k not in doubtful]
        kept: Kept = {k: telling(ours[k], eager[k], exact[k]) for k in (*doubtful, *probes)}
        first_draw = zip(*(taken(t, kept) for t in (ours, eager, exact)), strict=True)
        found, jumping = _over_draws(name, kept, len(doubtful), list(first_draw), more, others)
        verdicts |= found
        facts |= {"jumping": jumping} if jumping else {}
    for k, verdict in verdicts.items():
        if not verdict.passed:
            why = verdict.why if isinstance(verdict, chaos.Judgement) else str(verdict)
            return {"passed": False, "why": f"tensor {k}: {why}", "relative_k": verdict.relative_k, **facts}
    return {
        "passed": True,
        "relative_k": max((v.relative_k for v in verdicts.values()), default=0.0),
        **facts,
    }


def _over_draws(
    name: str, kept: Kept, doubtful: int, first_draw: list[Triple], more: More, others: Others
) -> tuple[Verdicts, int]:
    """Verdicts on the `doubtful` first ones of the tensors that are kept, by place, and how many of them are judged by
    more than the plain rule."""
    places, start = list(kept), time.process_time()
    draws, runs = [first_draw, *more(name, kept, range(1, DRAWS + 1))], list[list[list[Tensor]]]()
    verdicts: Verdicts = {places[n]: _plainly(n, draws) for n in range(doubtful)}
    jumping: set[int] = set()
    for late, (before, last) in enumerate(itertools.pairwise((-1, DRAWS, *MANY))):
        numbers = range(before + 1, last + 1)
        failed = [n for n in range(doubtful) if not verdicts[places[n]].passed]
        if not failed or (late and time.process_time() - start > PATIENCE):
            break
        if late:
            chosen = [*failed, *range(doubtful, len(kept))]  # so many draws of all tensors are gigabytes
            kept = {places[n]: kept[places[n]] for n in chosen}
            draws = [[draw[n] for n in chosen] for draw in draws]
            runs = [[[draw[n] for n in chosen] for draw in run] for run in runs]
            places, doubtful, failed = list(kept), len(failed), [*range(len(failed))]
            draws += more(name, kept, numbers)
            verdicts |= {places[n]: _plainly(n, draws) for n in failed}
            failed = [n for n in failed if not verdicts[places[n]].passed]
        made = others(name, kept, numbers)
        runs = [[*old, *new] for old, new in zip(runs or [[]] * len(made), made, strict=True)]
        found = _again(failed, range(doubtful, len(kept)), draws, runs) if failed else {}
        verdicts |= {places[n]: verdict for n, verdict in found.items()}
        jumping |= {places[n] for n in found}
    return verdicts, len(jumping)


def _plainly(n: int, draws: Sequence[Sequence[Triple]]) -> accuracy.Verdict:
    """By the plain rule, over all draws at once."""
    return accuracy.compare(*(torch.cat([d[n][i].reshape(-1) for d in draws]) for i in range(3)))


def _again(
    failed: Sequence[int], probes: Sequence[int], draws: list[list[Triple]], runs: list[list[list[Tensor]]]
) -> dict[int, chaos.Judgement]:
    """Verdicts on those at `failed` among those that are kept, by the law of tensors that jump where eager does, beside
    eager in other ways, or with the roles exchanged; none where the plain rule's stand."""

    def of_eager(n: int) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
        eager, exact = ([draw[n][i] for draw in draws] for i in (1, 2))
        return eager, exact, [[draw[n] for draw in run] for run in runs]

    looked_at = [*failed[:: -(-len(failed) // PROBES)], *probes]
    largest = max(chaos.jump(*of_eager(n)) for n in looked_at)
    found: dict[int, chaos.Judgement] = {}
    for n in failed:
        ours, (eager, exact, others) = [draw[n][0] for draw in draws], of_eager(n)
        verdict = chaos.noise(ours, eager, exact) or chaos.judged(ours, eager, exact, others, largest)
        verdict = verdict or _beside_others(ours, exact, others)
        if verdict is None or not verdict.passed:
            verdict = (
                _exchanged(ours, eager, exact, None if verdict is None else verdict.relative_k) or verdict
            )
        if verdict is not None:
            found[n] = verdict
    return found


def _beside_others(
    ours: Sequence[Tensor], exact: Sequence[Tensor], others: Sequence[Sequence[Tensor]]
) -> chaos.Judgement | None:
    """Passes what errs no more than eager in one of its other ways to round, by the plain rule over all draws."""
    y, r = (torch.cat([t.reshape(-1) for t in of]) for of in (ours, exact))
    for run in others:
        verdict = accuracy.compare(y, torch.cat([t.reshape(-1) for t in run]), r)
        if verdict.passed:
            return chaos.Judgement(True, "as eager in another way", verdict.relative_k)
    return None


def _exchanged(
    ours: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor], k: float | None = None
) -> chaos.Judgement | None:
    """Passes what is chance: over all draws the smallest k, of the law of jumps if that gave one, is below `NEAR` times
    the one of the rule, and with the roles of ours and eager exchanged the rule refuses about as many draws (two
    standard deviations of so many throws of a coin)."""
    if k is None:
        k = accuracy.compare(
            *(torch.cat([t.reshape(-1) for t in of]) for of in (ours, eager, exact))
        ).relative_k
    mine = sum(not accuracy.compare(y, e, r).passed for y, e, r in zip(ours, eager, exact, strict=True))
    theirs = sum(not accuracy.compare(e, y, r).passed for y, e, r in zip(ours, eager, exact, strict=True))
    if k > NEAR * accuracy.default_k(eager[0].dtype) or mine - theirs > 2 * (mine + theirs) ** 0.5:
        return None
    return chaos.Judgement(True, f"refuses {mine} draws, exchanged {theirs}", k)


def redrawn(inputs: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Inputs with their elements in another order: the same range and kind of numbers."""
    made: dict[str, Tensor] = {}
    for name, t in inputs.items():
        order = torch.randperm(t.numel(), generator=torch.Generator().manual_seed(seed)).to(t.device)
        made[name] = torch.empty_like(t).copy_(t.reshape(-1)[order].reshape(t.shape))
    return made


__all__ = [
    "DRAWS",
    "MANY",
    "Kept",
    "More",
    "Others",
    "Step",
    "Trio",
    "Triple",
    "judged",
    "redrawn",
    "taken",
    "telling",
]
