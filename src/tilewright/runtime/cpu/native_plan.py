"""Stretches of a plan whose calls are our own: one native call runs all steps, without Python between products, kernels
and loops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from tilewright.allocate import Block, pack
from tilewright.errors import BuildError
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Operand
from tilewright.ir.sizes.host import number
from tilewright.plan.data import CallStep, Copy, Home, Launches, Step, View
from tilewright.plan.lazy_allocation import root_of
from tilewright.runtime.loops.call import LoopRunner
from tilewright.runtime.own.native import linear_of
from tilewright.runtime.plan.bound import BoundSegment, Workspace
from tilewright.runtime.plan.call_results import Act, Tensors
from tilewright.runtime.plan.launch import raise_error
from tilewright.runtime.plan.tensors import torch_dtype
from tilewright.tuning.input_limits import KEPT_MEMORY

from .native_steps import (
    Header,
    NativeStep,
    Tables,
    beside_stage,
    copy_stage,
    is_dense,
    loop_stage,
    product_stage,
)


def join(workspace: Workspace, native: Callable[[], Callable[..., int]]) -> None:
    """Let the second run of `workspace` and all later ones be few native calls, by the function that `native`
    gives: one for each stretch of steps that allow it. The first one goes step by step: a call that raises is
    replaced then, and of sizes that do not come again nothing is joined."""
    part = workspace.part
    single = len(part.plan.segments) == 1 and not part.buffers.later and not part.segment.measures
    if part.checks is not None or part.plan.device != "cpu" or not single:
        return
    if sum(isinstance(step, CallStep) and _fits(step) for step in part.segment.steps) == 0:
        return
    plain = workspace.acts

    def first(tensors: Tensors) -> None:
        for act in plain:
            act(tensors)
        workspace.pending = finish

    def finish() -> None:
        try:
            workspace.acts = _joined(workspace, native)
        except BuildError:  # the function may have to be built, and the compiler may be gone
            workspace.acts = plain

    workspace.acts = (first,)


def _fits(step: CallStep) -> bool:
    """Whether a call is of a kind that has a stage; its layout may still forbid one."""
    return isinstance(step.call.function, LoopRunner) or linear_of(step.call.function) is not None


def _joined(workspace: Workspace, native: Callable[[], Callable[..., int]]) -> tuple[Act, ...]:
    """What a run does, with each stretch of steps of some calls as one act."""
    steps = workspace.part.segment.steps
    stretches: list[tuple[int, int, Joined | None]] = []
    at = 0
    while at < len(steps):
        group, end = Joined(workspace), at
        while end < len(steps) and group.takes(steps[end]):
            end += 1
        worth = group.loops or group.calls > 1 or end - at == len(steps)
        if group.calls and worth:
            stretches.append((at, end, group))
            at = end
        else:
            stretches.append((at, max(end, at + 1), None))
            at = max(end, at + 1)
    groups = [group for _, _, group in stretches if group is not None]
    if not groups:
        return workspace.acts_between(0, len(steps))
    run = native()
    memory = _Results(workspace, groups)
    for group in groups:
        group.finish(run, memory)
    acts: list[Act] = []
    for start, end, group in stretches:
        if group is None:
            acts += workspace.acts_between(start, end)
        else:
            acts += [group, *workspace.freeing_between(start, end)]
    return tuple(acts)


class _Results:
    """Memory for what the calls of some groups make: new in each call if it leaves the plan, or may be taken over
    by a call of others; else in one block that lasts, each place as long as it is read. What is made beside loops,
    which may run side by side, has memory of its own."""

    def __init__(self, workspace: Workspace, groups: Sequence[Joined]) -> None:
        part = workspace.part
        plan, layouts = part.plan, part.layouts
        joined = {id(step) for group in groups for step in group.steps}
        leaving = {root_of(plan.buffers, o) for o in plan.outputs if isinstance(o, int)}
        for step in part.segment.steps:
            if (
                isinstance(step, CallStep)
                and id(step) not in joined
                and (step.call.reuses != -1 or step.guarded)
            ):
                leaving |= {root_of(plan.buffers, b) for b in step.inputs}
        made = [
            (b, group)
            for group in groups
            for step in group.steps
            if isinstance(step, CallStep)
            for b in step.outputs
        ]
        lasting = [b for b, group in made if b not in leaving and not group.loops]
        most = KEPT_MEMORY.max_lasting_result_bytes
        looped = [
            b for b, group in made if b not in leaving and group.loops and layouts.bytes_of(plan, b) <= most
        ]
        blocks = [
            Block(layouts.bytes_of(plan, b), plan.buffers[b].start, plan.buffers[b].end) for b in lasting
        ]
        places, size = pack(blocks, KEPT_MEMORY.cpu_alignment_bytes)
        self.memory = torch.empty(max(1, size), dtype=torch.uint8)
        self.lasting = {
            b: self._view(at, block.size, *self.form(part, b))
            for b, at, block in zip(lasting, places, blocks, strict=True)
        } | {b: part.make(*self.form(part, b)) for b in looped}

    def _view(
        self, at: int, size: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        return self.memory[at : at + size].view(dtype).as_strided(shape, strides)

    @staticmethod
    def form(part: BoundSegment, b: int) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """Shape, strides and type of a buffer."""
        return part.layouts.shapes[b], part.layouts.strides[b], torch_dtype(part.plan.buffers[b].spec.dtype)


class Joined:
    """Some steps of a workspace as one act. Those that have no loop run on as many threads as each of them is
    worth; with loops, threads are held over all of them."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, part = workspace, workspace.part
        self.part, self.layouts = part, part.layouts
        self.tables = Tables(workspace)
        self.kept: list[object] = []
        self.nanoseconds = 0
        self.calls = self.loops = 0
        self.run: Callable[..., int] | None = None
        self.views: list[Act] = []
        self.lasting: list[tuple[int, Tensor]] = []
        self.makes: list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        """Results that are new tensors in each call."""
        self.rows: list[tuple[Step, NativeStep]] = []

    @property
    def steps(self) -> list[Step]:
        """The steps that were taken in and have a stage."""
        return [step for step, _ in self.rows]

    def takes(self, step: Step) -> bool:
        """Take in the next step, if it has a native form."""
        if isinstance(step, CallStep) and not (_fits(step) and all(map(self._is_own, step.outputs))):
            return False
        try:
            self.rows += [(step, stage) for stage in self._stages(step)]
        except LookupError:
            return False
        self.calls += isinstance(step, CallStep)
        self.loops += isinstance(step, CallStep) and isinstance(step.call.function, LoopRunner)
        return True

    def _is_own(self, b: int) -> bool:
        buffer = self.part.plan.buffers[b]
        return buffer.home is Home.LIBRARY and buffer.source < 0

    def finish(self, run: Callable[..., int], memory: _Results) -> None:
        """All steps were taken in: `run` is what runs them, with results in `memory`."""
        stages = self._side_by_side(self.rows)
        several = self.nanoseconds > self.part.plan.alone_ns
        self.hold = several and bool(self.loops)
        self.spreads = several
        self.run = self.run or run
        table = (NativeStep * max(1, len(stages)))(*stages)
        self.header = Header(
            bases=self.workspace.bases.buffer_info()[0], stages=ctypes.addressof(table), count=len(stages),
            last=-1, threads=1, hold=self.hold,
        )  # fmt: skip
        self.kept += [table, stages, memory]
        self.address = ctypes.addressof(self.header)
        self._results(memory)

    def _stages(self, step: Step) -> Sequence[NativeStep]:
        workspace = self.workspace
        match step:
            case Launches():
                self.nanoseconds += workspace.takes(step)
                return [self.tables.launches(step)]
            case Copy():
                return [copy_stage(workspace, step)]
            case View():
                self.views += workspace.viewing(step.buffer)
                return []
            case CallStep():
                self.nanoseconds += workspace.takes(step)
                return [
                    self._loop(step)
                    if isinstance(step.call.function, LoopRunner)
                    else product_stage(workspace, step)
                ]
            case _:
                raise LookupError

    def _side_by_side(self, rows: list[tuple[Step, NativeStep]]) -> list[NativeStep]:
        """The stages in an order in which loops that need nothing of each other (directions of a layer) are one.
        A loop moves behind calls alone, whose results have memory of their own."""
        root = lambda b: root_of(self.part.plan.buffers, b)  # noqa: E731
        loops = [
            k
            for k, (x, _) in enumerate(rows)
            if isinstance(x, CallStep) and isinstance(x.call.function, LoopRunner)
        ]
        for first, second in pairwise(loops):
            step = rows[first][0]
            made = {root(b) for b in step.outputs} if isinstance(step, CallStep) else set[int]()
            later = [x for x, _ in rows[first + 1 : second + 1]]
            if all(isinstance(x, CallStep) and not made & {root(b) for b in x.inputs} for x in later):
                both, table = beside_stage([rows[first][1], rows[second][1]])
                self.kept.append(table)
                between = [stage for _, stage in rows[first + 1 : second]]
                before, after = ([stage for _, stage in part] for part in (rows[:first], rows[second + 1 :]))
                return [*before, *between, both, *after]
        return [stage for _, stage in rows]

    def _loop(self, step: CallStep) -> NativeStep:
        """A loop of a known number of steps."""
        runner = cast(LoopRunner, step.call.function)
        count, gate, *groups, numbers = cast(
            tuple[object, object, object, object, object, list[object]], step.call.args
        )
        steps = number(count, self.layouts.sizes) if isinstance(count, Expr) else count
        if (
            gate is not None
            or not isinstance(steps, int)
            or steps <= 0
            or step.guarded
            or runner.native is None
        ):
            raise LookupError
        carried, sliced, outer = (
            [step.inputs[x.index] for x in cast(list[Operand], group)] for group in groups
        )
        if not all(is_dense(self.layouts, b) for b in (*step.inputs, *step.outputs)):
            raise LookupError
        values = [x if isinstance(x, int) else number(cast(Expr, x), self.layouts.sizes) for x in numbers]
        state, parts, rest = ([self._like(b) for b in group] for group in (carried, sliced, outer))
        loop = runner.made_for(state, parts, [*rest, *values])
        located = [
            [self.workspace.locate(b) for b in group] for group in (carried, sliced, outer, step.outputs)
        ]
        by_rows = runner.row_parts(loop, state, parts, [*rest, *values])
        if by_rows is not None:
            stage = by_rows.stage(steps, *located)
            self.kept.append(by_rows)
        else:
            stage, wires = loop_stage(loop.header, steps, loop.wires(*located))
            loop.header.last = steps - 1 if loop.loop.backwards else -1
            loop.header.hold = 0
            self.kept += [loop, wires]
        self.run = runner.native
        self.nanoseconds += steps * loop.step_ns
        self.tables.beside(loop.tables)
        return stage

    def _like(self, b: int) -> Tensor:
        return torch.empty(self.layouts.shapes[b], dtype=torch_dtype(self.part.plan.buffers[b].spec.dtype))

    def _results(self, memory: _Results) -> None:
        """Where calls put what they make; and which operands have addresses that each call brings: those of calls
        and of copies, as kernels may read neither."""
        workspace = self.workspace
        for step in self.steps:
            if isinstance(step, Copy):
                workspace.add_addressed(workspace.locate(b)[0] for b in (step.source, step.target))
            if not isinstance(step, CallStep):
                continue
            workspace.add_addressed(workspace.locate(b)[0] for b in step.inputs)
            for b in step.outputs:
                t = memory.lasting.get(b)
                if t is None:
                    self.makes.append((b, *memory.form(self.part, b)))
                else:
                    workspace.bases[b] = t.data_ptr()
                    self.lasting.append((b, t))

    def __call__(self, tensors: Tensors) -> None:
        """Run them."""
        bases, make = self.workspace.bases, self.part.make
        for b, shape, strides, dtype in self.makes:
            t = tensors[b] = make(shape, strides, dtype)
            bases[b] = t.data_ptr()
        for b, t in self.lasting:
            tensors[b] = t
        if self.spreads:
            self.header.threads = self.tables.spread()
        self.header.done = 0
        assert self.run is not None
        if code := self.run(self.address, 1):
            raise_error(code)
        for view in self.views:
            view(tensors)
