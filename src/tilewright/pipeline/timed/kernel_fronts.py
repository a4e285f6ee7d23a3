"""Kernels that take in the kernel in front of them, where a clock finds that faster: a norm becomes the prologue of the
products that read it, each of which computes it again; a product that one kernel alone reads, as the sums of its rows
or the product behind a depthwise convolution, is computed there.

Every grid point of a product with a norm inside folds anew what all have in common, of which the model knows little:
how long it waits before it can begin with its own part. And products that a clock chose stay apart in `partition`. So
both are timed here, in a row as they run.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tilewright.errors import IllegalSchedule
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Step
from tilewright.ir.sizes import dims
from tilewright.partition.regions import is_product
from tilewright.pipeline.build import Clock, JoinedKernelRefused, KernelBuilder
from tilewright.pipeline.replay_trial import ReplayContestant, ReplayTrial
from tilewright.pipeline.trial import told
from tilewright.runtime.cpu.toolchain import usable_cores
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.tuned import Verdicts
from tilewright.schedule.scheduler import Solution
from tilewright.tuning.timing_limits import PRODUCTS

from .joined_cover import Front, JoinedCover
from .kernel_ways import has_known_sizes, seconds_for

LOG = logging.getLogger("tilewright")

KIND = "front"
"""The name of these decisions."""
REASON = "takes in the kernel in front, by the clock"


def join_fronts(cover: Cover, builder: KernelBuilder, device: str, clock: Clock, where: str) -> JoinedCover:
    """The cover in which kernels have taken in what is in front of them where that is faster: as a clock says now, or
    has said before on such a device."""
    seconds = seconds_for(builder)
    verdicts = Verdicts(KIND, builder.decisions, builder.tuned, where, seconds > 0)
    tasks: dict[str, list[Front]] = {}
    for front in find_fronts(cover, builder):
        tasks.setdefault(front.key(cover), []).append(front)
    known = {key: bool(entry["joined"]) for key in tasks if (entry := verdicts.get(key)) is not None}
    left = {key: fronts[0] for key, fronts in tasks.items() if key not in known}
    if left and builder.tuned.seconds(seconds) > 0:
        known |= _timed(left, cover, builder, ReplayTrial(builder, device, clock), verdicts)
    for key in left:
        if key not in known:
            verdicts.leave(key)
    taken = {front: key for key, fronts in tasks.items() if known.get(key) for front in fronts}
    for front, key in taken.items():
        for kernel, solution in front.joined.items():
            builder.solver.prefer(kernel, solution, partial(_drop, verdicts, key))
    return JoinedCover(cover, tuple(taken))


def _drop(verdicts: Verdicts, key: str, why: str) -> None:
    """Forget that kernels are faster as one."""
    verdicts.drop(key)
    message = (
        "a kernel that takes in the one in front does not build, though a clock preferred it: they stay apart"
    )
    raise JoinedKernelRefused(f"{message}: {why}" if why else message, phase="build")


def find_fronts(cover: Cover, builder: KernelBuilder) -> list[Front]:
    """Kernels that fold, with those that alone read their results. A norm may have a few readers, each of which folds
    it anew; a product has one. Only what is modelled as no slower together, about. No kernel is in two: norms are
    looked at before products."""
    place = {step: n for n, step in enumerate(cover.steps)}
    readers: dict[Value, list[Step]] = {}
    for step in cover.steps:
        for v in _read_by(step):
            readers.setdefault(v, []).append(step)
    kept, busy = set(cover.graph.kept()), set[Kernel]()
    found: list[Front] = []
    kernels = [s for s in cover.steps if isinstance(s, Kernel) and not kept.intersection(s.outputs)]
    for front in sorted(kernels, key=lambda k: bool(_products(k))):
        if front in busy:
            continue
        behind = sorted({r for v in front.outputs for r in readers.get(v, ())}, key=place.__getitem__)
        reading = [r for r in behind if isinstance(r, Kernel)]
        if len(reading) != len(behind) or busy.intersection(reading) or not _may_join(front, reading):
            continue
        joined = _joined(front, reading, cover, builder)
        if joined:
            found.append(Front(front, tuple(reading), joined))
            busy.update(reading, (front,))
    return found


def _read_by(step: Step) -> Collection[Value]:
    match step:
        case Kernel():
            return step.inputs
        case LibraryStep():
            return dict.fromkeys(step.op.inputs)
        case _:
            return (step.source,)


def _may_join(front: Kernel, readers: Sequence[Kernel]) -> bool:
    """Whether these kernels may fold anew what is in front. A product is computed once: two kernels may add up in other
    orders."""
    if not 1 <= len(readers) <= PRODUCTS.max_siblings or not _are_joinable(_products(front), readers):
        return False
    if not any(op.expr is not None and op.expr.reduce for op in front.ops):
        return False
    if not all(map(has_known_sizes, (front, *readers))):
        return False
    made: dict[Value, Op] = {}
    every = [(v, op) for k in (front, *readers) for op in k.ops for v in op.outputs]
    return all(made.setdefault(v, op) is op for v, op in every)  # none rounds what another does not


def _products(kernel: Kernel) -> list[Op]:
    return [op for op in kernel.ops if is_product(op)]


def _are_joinable(products: Sequence[Op], readers: Sequence[Kernel]) -> bool:
    """Whether products in front may be worth a try in what reads them: short sums, as those of windows, in another
    product; any in a kernel that only folds their results."""
    if not products:
        return True
    if len(readers) != 1:
        return False
    (reader,) = readers
    if not _products(reader):
        return any(op.expr is not None and op.expr.reduce for op in reader.ops)
    lengths = [dims.static(dims.prod(a.extent for a in op.expr.reduce)) for op in products if op.expr]
    return all(n is not None and n <= PRODUCTS.max_front_sum for n in lengths)


def _joined(
    front: Kernel, readers: Sequence[Kernel], cover: Cover, builder: KernelBuilder
) -> dict[Kernel, Solution]:
    """Each reader with what is in front of it, and its schedule; none if one has no such schedule, or if together they
    are modelled as much slower."""
    solver, layouts = builder.solver, cover.layouts
    found: dict[Kernel, Solution] = {}
    try:
        for reader in readers:
            ops = tuple(dict.fromkeys((*front.ops, *reader.ops)))
            kernel = replace(reader, ops=ops, reason=REASON)
            # Behind a product the joined kernel has the schedule of any; a norm is folded anew in each grid point.
            plain = bool(_products(front))
            solution = solver.solution(kernel, layouts) if plain else solver.repeating(kernel, layouts)
            if solution is None:
                return {}
            found[kernel] = solution
        apart = sum(solver.price(k, layouts) for k in (front, *readers))
    except IllegalSchedule:
        return {}
    together = sum(s.seconds for s in found.values())
    return found if together <= PRODUCTS.max_joined_ratio * apart else {}


def _timed(
    fronts: Mapping[str, Front], cover: Cover, builder: KernelBuilder, trial: ReplayTrial, verdicts: Verdicts
) -> dict[str, bool]:
    """By key, what a clock says: of as many as there is time to build."""
    left = int(builder.tuned.seconds(seconds_for(builder)) * usable_cores() * PRODUCTS.builds_per_core_second)
    asked: dict[str, Graph] = {}
    contests: list[list[ReplayContestant]] = []
    for key, front in fronts.items():
        region = front.region(cover)
        joined = {replace(k): s.schedule for k, s in front.joined.items()}
        ways = [
            ReplayContestant(Cover(region, tuple(replace(k) for k in front.apart), region.layouts)),
            ReplayContestant(Cover(region, tuple(joined), region.layouts), joined),
        ]
        left -= sum(len(way.kernels) for way in ways)
        if left >= 0 and trial.fits(ways[:1]):
            asked[key] = region
            contests.append(ways)
    STATS.timed += len(contests)
    found: dict[str, bool] = {}
    for (key, region), (apart, joined) in zip(
        asked.items(), trial(contests) if contests else (), strict=True
    ):
        if apart is None:
            continue
        found[key] = joined is not None and joined <= PRODUCTS.max_preferred_ratio * apart
        verdicts.put(
            key, {"what": told(region), "joined": found[key], "seconds": joined, "apart_seconds": apart}
        )
        LOG.info("%s: %.3g us apart, %s s in one", told(region), apart * 1e6, joined)
    return found
