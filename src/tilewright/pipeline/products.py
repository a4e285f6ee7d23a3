"""Products of matrices with what stands behind them: kernels of our own where a clock finds them faster than the
library's products and kernels for the rest."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial

from tilewright.errors import IllegalSchedule, warn_once
from tilewright.ir.graph import Graph, Layout, Op, Value
from tilewright.ir.kernel import AS_THEY_LIE, PREPARATIONS, Kernel
from tilewright.partition.products import (
    LIBRARY,
    ChosenProduct,
    ChosenProducts,
    ProductGroup,
    ProductWay,
)
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.cpu.toolchain import usable_cores
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.tuned import Verdicts
from tilewright.runtime.store.tuning_file import Entry
from tilewright.schedule.product_table import product_table
from tilewright.schedule.solver import Solver
from tilewright.tuning.thresholds import GPU_MATMUL
from tilewright.tuning.timing_limits import PRODUCTS

from .build import KernelBuilder, ProductRefused
from .prices import library_seconds
from .product_ways import (
    ProductTask,
    Proposal,
    Rewrite,
    is_copy,
    kernels_of,
    library_way,
    pick_varied,
    proposals_of,
    tasks_of,
    ways_of,
)
from .replay_trial import ReplayTrial
from .tabled_products import measured_first, tabled_product
from .trial import told

LOG = logging.getLogger("tilewright")


def choose_products(
    graph: Graph, builder: KernelBuilder, device: str, seconds: float, improve: Rewrite = lambda graph: graph,
    refused: Set[str] = frozenset(),
) -> ChosenProducts:  # fmt: skip
    """The graph with kernels for those groups of `find_products` for which a kernel is measured as faster on `device`.
    About so many `seconds` go into building and timing, by the number of kernels that this allows; groups for which
    there is no time stay undecided, and a library's but for those that a tuning file or `choose_untimed` decides.
    `improve` does to calls what the later phases do. Groups of tasks with `refused` keys stay the library's: see
    `ProductRefused`."""
    clock = builder.backend.replay_clock(device)
    seconds, tuned = builder.tuned.seconds(seconds), builder.tuned
    solver = builder.solver
    if clock is None or (seconds <= 0 and not tuned):
        return choose_untimed(graph, solver, refused)
    normal = normalise(graph)
    tasks = [t for t in tasks_of(normal, improve, solver.hints) if t.key not in refused]
    if not tasks:
        return ChosenProducts(graph)
    where = builder.backend.timing_key(device, solver.options)
    stored = seconds > 0 or tuned.session is not None
    verdicts = Verdicts("product", builder.decisions, tuned, where, stored)
    known = {t.key: found for t in tasks if (found := _known(verdicts, t)) is not None}
    table, unknown = product_table(solver.target.name), [t for t in tasks if t.key not in known and stored]
    proposed = [(t, measured_first(t, proposals_of(t, solver), solver, table)) for t in unknown]
    left = [(t, p) for t, p in proposed if p]
    left.sort(key=lambda found: (not found[0].is_fusion, -found[1][0].seconds * len(found[0].groups)))
    trial = ReplayTrial(builder, device, clock)
    for task, decided in _decided(left, trial, seconds) if seconds > 0 else ():
        known[task.key] = decided
        LOG.info("%s", decided)
        verdicts.put(task.key, _entry(task, decided))
    for task, _ in left:
        if task.key not in known:
            verdicts.leave(task.key)
    undecided = [t for t in tasks if t.key not in known]
    known |= {t.key: found for t in undecided if (found := _untimed(t, solver)) is not None}
    return _with_kernels(normal, graph, tasks, known, solver, verdicts)


def choose_untimed(graph: Graph, solver: Solver, refused: Set[str] = frozenset()) -> ChosenProducts:
    """The graph with kernels for those groups that unpack operands and that the model takes for much faster so (what a
    library multiplies lies in memory before, several times as large as what it is unpacked from), and for those of
    which the table of the target says that kernels were faster. Groups of tasks with `refused` keys stay as they
    are."""
    normal = normalise(graph)
    tasks = [t for t in tasks_of(normal, lambda g: g, solver.hints) if t.key not in refused]
    found = {t.key: decided for t in tasks if (decided := _untimed(t, solver)) is not None}
    return _with_kernels(normal, graph, tasks, found, solver) if found else ChosenProducts(graph)


def _untimed(task: ProductTask, solver: Solver) -> ChosenProduct | None:
    """What is known of a group without a clock: the model knows too little of those that unpack nothing."""
    if task.groups[0].unpacks:
        return _modelled(task, solver)
    return tabled_product(task, solver, product_table(solver.target.name))


def _modelled(task: ProductTask, solver: Solver) -> ChosenProduct | None:
    """What the model says of a group that unpacks operands."""
    proposed = proposals_of(task, solver)
    if not proposed:
        return None
    best, library = proposed[0], library_seconds(task.region, solver)
    if best.seconds > GPU_MATMUL.max_modelled_ratio * library:
        return None
    schedule = str(best.solution.schedule)
    return ChosenProduct(task.region, schedule, best.seconds, library, best.way, "the model")


def _with_kernels(
    normal: Graph, graph: Graph, tasks: Sequence[ProductTask], known: dict[str, ChosenProduct], solver: Solver,
    verdicts: Verdicts | None = None,
) -> ChosenProducts:  # fmt: skip
    """The graph with the numbers of kernels, of which the solver knows the schedules from now on. Of `verdicts` those
    are forgotten that do not hold."""
    numbering = _Numbering(normal)
    for task in tasks:
        decided = known.get(task.key)
        if decided is None or decided.schedule == LIBRARY:
            continue
        drop = (lambda: None) if verdicts is None else partial(verdicts.drop, task.key)
        if _tell(solver, task, decided, drop):
            for group in task.groups:
                numbering.take(group, task, decided.way)
    chosen = tuple(known[t.key] for t in tasks if t.key in known)
    return ChosenProducts(numbering.graph() if numbering.number else graph, chosen)


class _Numbering:
    """Gives the ops of groups the numbers of kernels."""

    def __init__(self, graph: Graph) -> None:
        self.original, self.makes = graph, graph.producer()
        self.number: dict[Op, int] = {}
        self.instead: dict[Op, tuple[Op, ...]] = {}
        self.layouts: dict[Value, Layout] = {}
        self.kernels = 1 + max((op.kernel for op in graph.ops), default=-1)
        self.fresh = graph.fresh_id()

    def take(self, group: ProductGroup, task: ProductTask, way: ProductWay) -> None:
        """A group becomes one kernel, or several."""
        region, makes = group.region, self.makes
        made = [v for v in region.inputs if v in makes and makes[v].expr is not None]
        # As they lay when the kernels that read and make them were timed.
        self.layouts |= {v: task.layouts[v] for v in (*made, *region.outputs) if v in task.layouts}
        found = kernels_of(Kernel(region.ops, region.outputs), task.layouts, way, self.fresh)
        if found is None:
            self._count(region.ops)
            return
        self.fresh += len(found.between)
        self.layouts |= found.between
        for ops in [*((op,) for op in found.prepare if is_copy(op)), *(k.ops for k in found.kernels)]:
            self._count(ops)
        fresh = tuple(op for op, _ in found.ops if op not in region.ops)
        if fresh:
            (total,) = (op for op in region.ops if not any(op is kept for kept, _ in found.ops))
            self.instead[total] = fresh

    def _count(self, ops: Sequence[Op]) -> None:
        self.number |= dict.fromkeys(ops, self.kernels)
        self.kernels += 1

    def graph(self) -> Graph:
        """The graph with all that was taken."""
        listed = [x for op in self.original.ops for x in self.instead.get(op, (op,))]
        ops = tuple(replace(op, kernel=self.number.get(op, op.kernel)) for op in listed)
        return replace(self.original, ops=ops, layouts=self.layouts | dict(self.original.layouts))


def _tell(solver: Solver, task: ProductTask, decided: ChosenProduct, drop: Callable[[], None]) -> bool:
    """Tell the solver which schedule was decided on; whether it is one. If it is not, or does not build, `drop` is
    called; what the model prefers instead was not measured beside the library, so that then the library is wanted."""
    found = task.kernels(decided.way)
    if found is None:
        return False
    kernel, layouts = found.kernels[0], {**task.layouts, **found.between}
    try:
        solution = solver.read_solution(kernel, layouts, decided.schedule, decided.seconds)
        solver.scheduler.check_capacity(solution.form, solution.schedule, solver.target)
    except (ValueError, IllegalSchedule) as wrong:
        warn_once(f"a schedule that was measured before is not taken for {told(task.region)}: {wrong}")
        drop()
        return False
    alone = Kernel(tuple(replace(op, kernel=0) for op in kernel.ops), kernel.outputs)

    def refuse(why: str) -> None:
        drop()
        said = f"a kernel of {told(task.region)} does not build, though it was measured as faster than the library"
        raise ProductRefused(f"{said}: {why}" if why else said, task.key)

    solver.prefer(alone, solution, refuse)
    return True


def _entry(task: ProductTask, decided: ChosenProduct) -> Entry:
    """What is kept of a decision."""
    return {
        "what": told(task.region), "schedule": decided.schedule, "parts": decided.way.parts,
        "operands": decided.way.operands,
        "seconds": decided.seconds, "library_seconds": decided.library_seconds,
    }  # fmt: skip


def _known(verdicts: Verdicts, task: ProductTask) -> ChosenProduct | None:
    """What was decided before, about equal groups on such a device."""
    match verdicts.get(task.key):
        case {
            "schedule": str(schedule), "parts": int(parts), "operands": str(operands),
            "seconds": int() | float() as seconds, "library_seconds": int() | float() as library,
        } if operands in PREPARATIONS and (operands == AS_THEY_LIE or parts == 1):  # fmt: skip
            return ChosenProduct(task.region, schedule, seconds, library, ProductWay(parts, operands))
        case _:
            return None


def _decided(
    tasks: Sequence[tuple[ProductTask, Sequence[Proposal]]], trial: ReplayTrial, seconds: float
) -> Iterator[tuple[ProductTask, ChosenProduct]]:
    """What the clock says of each task; nothing of those for which there was no time."""
    builds = int(seconds * usable_cores() * PRODUCTS.builds_per_core_second)
    found = [(t, p, library_way(t, trial.builder)) for t, p in tasks]
    fitting = [(t, p, theirs) for t, p, theirs in found if trial.fits([theirs])][:builds]
    counts = _share_builds([p[0].seconds * len(t.groups) for t, p, _ in fitting], builds)
    ours = [
        list(ways_of(t, pick_varied(p, n), trial.builder))
        for (t, p, _), n in zip(fitting, counts, strict=True)
    ]
    contests = [[theirs, *(way for _, way in mine)] for (*_, theirs), mine in zip(fitting, ours, strict=True)]
    STATS.timed += len(contests)
    for (task, *_), mine, times in zip(fitting, ours, trial(contests), strict=True):
        library, *rest = times
        if library is None:
            continue
        timed = [(t, p) for t, (p, _) in zip(rest, mine, strict=True) if t is not None]
        best, proposal = min(timed, key=lambda found: found[0], default=(math.inf, None))
        if proposal is None or best > PRODUCTS.max_preferred_ratio * library:
            yield task, ChosenProduct(task.region, LIBRARY, library, library)
        else:
            schedule = str(proposal.solution.schedule)
            yield task, ChosenProduct(task.region, schedule, best, library, proposal.way)


def _share_builds(seconds: Sequence[float], builds: int) -> list[int]:
    """How many schedules of each task are built: those that take longer have more."""
    least = min(PRODUCTS.min_timed, builds // max(1, len(seconds)))
    return [min(PRODUCTS.max_timed, max(least, int(builds * s / sum(seconds)))) for s in seconds]
