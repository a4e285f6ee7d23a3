"""The scheduler of machines whose threads share a grid point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.analysis.contraction import product_sides
from tilewright.analysis.size_hints import SizeHints
from tilewright.form.implied import drop_implied
from tilewright.form.lane_softmax import if_divisible
from tilewright.ir.form import Form
from tilewright.ir.schedule import Schedule
from tilewright.lower.legality import check_roles
from tilewright.rewrite.split.policy import SplitPolicy
from tilewright.schedule.product_table import MeasuredBlocks, blocks_of
from tilewright.schedule.scheduler import Comparison, Lowered, Sized, Solution
from tilewright.schedule.table import Tuning
from tilewright.target import Target
from tilewright.tuning.search_limits import CASCADE_PARTS
from tilewright.tuning.thresholds import GPU_BLOCKS, GPU_SPLITS

from .block_shape import misalignment
from .blocks import block_schedule, buckets, repeating_schedule, row_buckets
from .capacity import check_capacity
from .cost import block_seconds
from .matmul_cost import matmul_seconds, matmul_tiles
from .proposed.plain_products import proposals
from .proposed.product_loops import other_block_proposals, specialised_proposals
from .proposed.row_sums import row_sum_proposals
from .shared_memory import fit_shared_memory
from .windows import is_written_out, window_proposals, window_seconds


class BlockScheduler:
    """See `schedule.scheduler.Scheduler`."""

    begin_multiple = GPU_BLOCKS.begin_multiple
    follows_lists = True
    takes_skinny_products = True
    splits = SplitPolicy(GPU_SPLITS, CASCADE_PARTS.of_reductions, tries_all=True, together=True)

    def choose(self, form: Form, target: Target, tuning: Tuning, hints: SizeHints) -> Schedule:
        """Blocks whose lengths are powers of two."""
        return block_schedule(form, target, hints, None, tuning)

    def seconds(self, form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float:
        """By the model of `cost`."""
        return block_seconds(drop_implied(form), schedule, target, hints)

    def fitted(self, form: Form, schedule: Schedule, target: Target, lowered: Lowered) -> Schedule:
        """One that needs no more shared memory than there is."""
        return fit_shared_memory(form, schedule, target, lowered)

    def best(self, form: Form, by: Comparison) -> Solution:
        """Words of packed numbers as lines of their parts, results of narrow classes as one line, rows packed into one
        block, with a row for what a product lacks if that is faster. Lines are taken whatever the model says, which
        does not see the loads of a thread."""
        form = by.take("pack_rows", by.take("join_narrow", by.take("join_words", form)))
        padded, plain = by.take("with_unit_row", form), _merged(form, by)
        return plain if padded is form else min(plain, _merged(padded, by), key=lambda x: x.seconds)

    def proposals(
        self, found: Solution, by: Comparison, blocks: MeasuredBlocks | None = None
    ) -> Sequence[Solution]:
        """Of plain products of matrices, and of windows without matrices."""
        found_products = proposals(found, by, blocks)
        if found_products:
            return found_products
        windows = window_proposals(found, by)
        return [w for w in windows if blocks is None or blocks_of(w.schedule).are_like(blocks)]

    def specialised(self, found: Solution, by: Comparison) -> Sequence[Solution]:
        """Of loops over keys, on machines whose warp groups multiply."""
        return specialised_proposals(found, by)

    def other_blocks(self, found: Solution, by: Comparison) -> Sequence[Solution]:
        """Of loops with products that are no plain ones, and of sums of long rows."""
        return other_block_proposals(found, by) or row_sum_proposals(found, by)

    def repeating(self, form: Form, by: Comparison) -> Solution | None:
        """Of rows that no matrix unit multiplies."""
        made = repeating_schedule(form, by.target, by.hints, by.tuning)
        if made is None:
            return None
        form, schedule = by.completed_as_it_is(form, made.changed(form_steps=form.steps))
        check_roles(form, schedule)
        return Solution(schedule, form, self.seconds(form, schedule, by.target, by.hints), form)

    def check_capacity(self, form: Form, schedule: Schedule, target: Target) -> None:
        """Registers and shared memory of products of blocks."""
        check_capacity(form, schedule, target)

    def tile_seconds(self, form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float:
        """By the model of `windows` for windows that are written out, by that of `matmul_cost` for plain products of
        matrices, by that of `cost` for others."""
        if is_written_out(form):
            return window_seconds(form, schedule, target, hints)
        found = matmul_tiles(form, schedule)
        return (
            self.seconds(form, schedule, target, hints)
            if found is None
            else matmul_seconds(*found, target, hints)
        )

    def buckets(self, found: Solution, by: Comparison) -> Sequence[Sized]:
        """For few rows, for rows that registers hold, for rows that begin where no wide access may, and for rows of
        whole accesses."""
        target, hints, tuning = by.target, by.hints, by.tuning
        made = [
            (when, *by.completed(form, s)) for when, form, s in row_buckets(found.form, target, hints, tuning)
        ]
        rows = buckets(found.rows, target, hints, tuning)
        made += [(when, *by.completed_as_it_is(found.rows, s)) for when, s in rows]
        odd = misalignment(found.form, target, hints)
        if odd is not None:
            form, schedule = by.completed(
                found.form, block_schedule(found.form, target, hints, None, tuning, odd=True)
            )
            made += [(odd, form, schedule)] if schedule != found.schedule else []
        even = if_divisible(found.form, found.schedule, target)
        return made if even is None else [*made, even]


def _merged(form: Form, by: Comparison) -> Solution:
    """With passes merged where that is faster."""
    busy = any(product_sides(i) is not None for i in form.folds.values())
    if busy:  # else memory is waited for, not exponentials
        form = by.take("in_part_sums", by.take("write_out_mixtures", form))
        form = by.take("use_log2", form) if "log2" in by.target.quick else form
        form = by.take("use_quick_tanh", form) if "tanh" in by.target.quick else form
        form = by.take("any_as_int", by.take("unscale_maxima", form))
    plain = by.chosen(form)
    helped = by.take("with_companions", plain.form)
    if helped is plain.form or not plain.schedule.reductions.online:
        return plain
    merged = replace(by.chosen(helped), rows=plain.form)
    return merged if merged.seconds <= plain.seconds else plain
