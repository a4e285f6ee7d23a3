"""The scheduler of machines with vectors, whose threads work alone."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import IllegalSchedule
from tilewright.ir.form import Form, reached_folds
from tilewright.ir.schedule import Schedule
from tilewright.rewrite.split.policy import SplitPolicy
from tilewright.schedule.product_table import MeasuredBlocks
from tilewright.schedule.scheduler import Comparison, Lowered, Sized, Solution
from tilewright.schedule.table import Tuning
from tilewright.target import Target
from tilewright.tuning.search_limits import CASCADE_PARTS
from tilewright.tuning.thresholds import CPU_SPLITS

from .cost import vector_seconds
from .matmul import matmul_schedule
from .vectors import vector_schedule


class VectorScheduler:
    """See `schedule.scheduler.Scheduler`."""

    begin_multiple = 1
    follows_lists = False
    takes_skinny_products = False
    splits = SplitPolicy(CPU_SPLITS, CASCADE_PARTS.for_few_cores, tries_all=False, together=False)

    def choose(self, form: Form, target: Target, tuning: Tuning, hints: SizeHints) -> Schedule:
        """Register tiles of a product, or else vectors. Raises IllegalSchedule where a fold would read a running one
        in each step: a pass of its own, over what lies in memory, is several times as fast here."""
        read = {
            d for i in form.folds.values() for d in reached_folds(form, i) if form.items[d].scan in i.reduce
        }
        if read:
            raise IllegalSchedule(
                "every step of a reduction that runs is needed elsewhere", source=form.items[min(read)].source,
                law="a running reduction is read in its own pass",
            )  # fmt: skip
        return matmul_schedule(form, target, hints) or vector_schedule(form, target, hints)

    def seconds(self, form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float:
        """By the model of `cost`."""
        return vector_seconds(form, schedule, target, hints)

    def fitted(self, form: Form, schedule: Schedule, target: Target, lowered: Lowered) -> Schedule:
        """The schedule: what is larger than a cache is only slower."""
        return schedule

    def best(self, form: Form, by: Comparison) -> Solution:
        """Rows in parts, as vectors take them."""
        return by.chosen(by.take("in_row_parts", form))

    def proposals(
        self, found: Solution, by: Comparison, blocks: MeasuredBlocks | None = None
    ) -> Sequence[Solution]:
        """None: products are routines of our own, or the library's."""
        return ()

    def specialised(self, found: Solution, by: Comparison) -> Sequence[Solution]:
        """None: threads share no grid point."""
        return ()

    def other_blocks(self, found: Solution, by: Comparison) -> Sequence[Solution]:
        """None: covers of regions are timed as they are."""
        return ()

    def repeating(self, form: Form, by: Comparison) -> Solution | None:
        """None: what a grid point hands to the next costs no launch."""
        return None

    def check_capacity(self, form: Form, schedule: Schedule, target: Target) -> None:
        """Any schedule: what is larger than a cache is only slower."""

    def tile_seconds(self, form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float:
        """As `seconds`."""
        return vector_seconds(form, schedule, target, hints)

    def buckets(self, found: Solution, by: Comparison) -> Sequence[Sized]:
        """None: loops take any size."""
        return ()
