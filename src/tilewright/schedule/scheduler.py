"""What a kind of processor makes of a form: a scheduler of each kind, behind one protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Expr
from tilewright.ir.form import Form
from tilewright.ir.program import TileProgram
from tilewright.ir.schedule import Role, Schedule
from tilewright.rewrite.split.policy import SplitPolicy
from tilewright.target import Target

from .product_table import MeasuredBlocks
from .table import Tuning

Lowered = Callable[[Form, Schedule], TileProgram]
Sized = tuple[Expr, Form, Schedule]
"""A schedule for some sizes: the condition under which it serves, and the form that it is of."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The form and the schedule that are chosen for a kernel, and their modelled seconds."""

    schedule: Schedule
    form: Form
    seconds: float
    rows: Form
    """The form without folds that only serve to merge passes: what rows are given that need no merging."""


class Comparison(Protocol):
    """What a scheduler compares forms with: one machine, one view of sizes."""

    target: Target
    hints: SizeHints
    tuning: Tuning

    def take(self, step: str, form: Form) -> Form:
        """The form behind a step (`form.steps`); the same if the step changes nothing."""
        ...

    def chosen(self, form: Form) -> Solution:
        """The schedule of a form, as `Scheduler.choose` has it. Raises IllegalSchedule."""
        ...

    def completed(self, form: Form, schedule: Schedule) -> tuple[Form, Schedule]:
        """With what the options and the machine add to a schedule, and the form that it is of then."""
        ...

    def completed_as_it_is(self, form: Form, schedule: Schedule) -> tuple[Form, Schedule]:
        """The same without a change of the form."""
        ...


class Scheduler(Protocol):
    """Chooses schedules for one kind of processor."""

    begin_multiple: int
    """Kernels cost the same that differ in where they begin by a multiple of so many elements."""
    follows_lists: bool
    """Whether loops by lists of tiles may pay: a jump over a tile is dear."""
    takes_skinny_products: bool
    """Whether a product of few rows with a long operand may pay as a kernel: memory is waited for, whoever reads it."""
    splits: SplitPolicy
    """When reductions are taken in parts."""

    def choose(self, form: Form, target: Target, tuning: Tuning, hints: SizeHints) -> Schedule:
        """The schedule of a form. Raises IllegalSchedule."""
        ...

    def seconds(self, form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float:
        """Modelled seconds."""
        ...

    def fitted(self, form: Form, schedule: Schedule, target: Target, lowered: Lowered) -> Schedule:
        """The schedule, or one whose program needs no more than the machine has."""
        ...

    def best(self, form: Form, by: Comparison) -> Solution:
        """The fastest of the forms that a kernel may take. Raises IllegalSchedule."""
        ...

    def proposals(
        self, found: Solution, by: Comparison, blocks: MeasuredBlocks | None = None
    ) -> Sequence[Solution]:
        """Other schedules of the form, the fastest by the model first, for a clock to decide; where some `blocks` are
        asked for, only those of products that have them, or them with other stages."""
        ...

    def specialised(self, found: Solution, by: Comparison) -> Sequence[Solution]:
        """The schedule for warps that have different work, in several ways, for a clock to decide."""
        ...

    def other_blocks(self, found: Solution, by: Comparison) -> Sequence[Solution]:
        """The form in other blocks than those of the schedule, the fastest by the model first, for a clock to decide,
        where the model knows little."""
        ...

    def repeating(self, form: Form, by: Comparison) -> Solution | None:
        """A schedule in which every grid point folds anew what all have in common, for a clock to decide; None where
        that is not so, or much."""
        ...

    def check_capacity(self, form: Form, schedule: Schedule, target: Target) -> None:
        """Raise IllegalSchedule, with level, need and capacity, if a level cannot hold what a tile needs of it."""
        ...

    def tile_seconds(self, form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float:
        """Modelled seconds of any schedule, as `proposals` has them: by what its tiles move between levels, where there
        is such a model."""
        ...

    def buckets(self, found: Solution, by: Comparison) -> Sequence[Sized]:
        """Further schedules for sizes that are not known; the first that serves is the best."""
        ...


def grid_points(schedule: Schedule, hints: SizeHints) -> int:
    """Blocks of a launch at typical sizes."""
    plans = [c for c in schedule.tiling.classes if c.role is Role.GRID]
    return math.prod(-(-max(1, hints.estimate(c.axis.extent)) // c.tile) for c in plans)
