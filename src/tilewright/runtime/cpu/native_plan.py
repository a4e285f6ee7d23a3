"""Plans whose calls are all our own: one native call runs every step, without Python between products, kernels and
loops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from tilewright.errors import BuildError
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Operand
from tilewright.ir.sizes.host import number
from tilewright.plan.data import Call, Copy, Home, Launches, Step, View
from tilewright.plan.lazy_allocation import root_of
from tilewright.runtime.loops.call import LoopRunner
from tilewright.runtime.own.product import linear_of
from tilewright.runtime.plan.bound import Workspace
from tilewright.runtime.plan.call_results import Act, Tensors
from tilewright.runtime.plan.launch import raise_error
from tilewright.runtime.plan.tensors import torch_dtype
from tilewright.tuning.input_limits import KEPT_MEMORY

from .native_steps import Header, Stage, Tables, beside_stage, copy_stage, is_dense, loop_stage, product_stage


def join(workspace: Workspace, native: Callable[[], Callable[..., int]]) -> None:
    """Let the second run of `workspace` and all later ones be one native call, by the function that `native` gives,
    where that is possible. The first one goes step by step: a call that raises is replaced then."""
    part = workspace.part
    single = len(part.plan.segments) == 1 and not part.later and not part.segment.measures
    if part.checks is not None or part.plan.device != "cpu" or not single:
        return
    if not any(isinstance(step, Call) for step in part.segment.steps):
        return
    plain = workspace.acts

    def first(tensors: Tensors) -> None:
        for act in plain:
            act(tensors)
        try:
            workspace.acts = (Joined(workspace, native),)
        except (LookupError, BuildError):  # the function may have to be built, and the compiler may be gone
            workspace.acts = plain

    if all(_fits(step) for step in part.segment.steps):
        workspace.acts = (first,)


def _fits(step: object) -> bool:
    """Whether a step is of a kind that has a stage; its layout may still forbid one."""
    return (
        not isinstance(step, Call)
        or isinstance(step.call.function, LoopRunner)
        or linear_of(step.call.function) is not None
    )


class Joined:
    """All steps of a workspace as one act. Raises LookupError where one of them has no native form, or where they have
    no loop and are work for more than one core: threads then take part step by step."""

    def __init__(self, workspace: Workspace, native: Callable[[], Callable[..., int]]) -> None:
        self.workspace, part = workspace, workspace.part
        self.part, self.layouts = part, part.layouts
        self.tables = Tables(workspace)
        self.kept: list[object] = []
        self.nanoseconds = 0
        self.run: Callable[..., int] | None = None
        self.views: list[Act] = []
        self.lasting: list[tuple[int, Tensor]] = []
        self.makes: list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        """Results that are new tensors in each call."""
        rows = [(step, stage) for step in part.segment.steps for stage in self._stages(step)]
        stages = self._side_by_side(rows)
        self.hold = self.nanoseconds > part.plan.alone_ns
        if self.run is None:
            if self.hold:
                raise LookupError
            self.run = native()
        table = (Stage * max(1, len(stages)))(*stages)
        self.header = Header(
            bases=workspace.bases.buffer_info()[0], stages=ctypes.addressof(table), count=len(stages),
            last=-1, threads=1, hold=self.hold,
        )  # fmt: skip
        self.kept += [table, stages]
        self.address = ctypes.addressof(self.header)
        self._results()

    def _stages(self, step: Step) -> Sequence[Stage]:
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
            case Call():
                self.nanoseconds += workspace.takes(step)
                return [
                    self._loop(step)
                    if isinstance(step.call.function, LoopRunner)
                    else product_stage(workspace, step)
                ]
            case _:
                raise LookupError

    def _side_by_side(self, rows: list[tuple[Step, Stage]]) -> list[Stage]:
        """The stages in an order in which loops that need nothing of each other (directions of a layer) are one.
        A loop moves behind calls alone, whose results have memory of their own."""
        root = lambda b: root_of(self.part.plan.buffers, b)  # noqa: E731
        loops = [
            k
            for k, (x, _) in enumerate(rows)
            if isinstance(x, Call) and isinstance(x.call.function, LoopRunner)
        ]
        for first, second in pairwise(loops):
            step = rows[first][0]
            made = {root(b) for b in step.outputs} if isinstance(step, Call) else set[int]()
            later = [x for x, _ in rows[first + 1 : second + 1]]
            if all(isinstance(x, Call) and not made & {root(b) for b in x.inputs} for x in later):
                both, table = beside_stage([rows[first][1], rows[second][1]])
                self.kept.append(table)
                between = [stage for _, stage in rows[first + 1 : second]]
                before, after = ([stage for _, stage in part] for part in (rows[:first], rows[second + 1 :]))
                return [*before, *between, both, *after]
        return [stage for _, stage in rows]

    def _loop(self, step: Call) -> Stage:
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

    def _results(self) -> None:
        """Memory for what calls make, new in each call if it leaves or is large; and which operands have addresses that
        each call brings: those of calls and of copies, as kernels may read neither."""
        plan, layouts, workspace = self.part.plan, self.layouts, self.workspace
        leaving = {root_of(plan.buffers, o) for o in plan.outputs if isinstance(o, int)}
        for step in self.part.segment.steps:
            if isinstance(step, Copy):
                workspace.add_addressed(workspace.locate(b)[0] for b in (step.source, step.target))
            if not isinstance(step, Call):
                continue
            workspace.add_addressed(workspace.locate(b)[0] for b in step.inputs)
            for b in step.outputs:
                if plan.buffers[b].home is not Home.LIBRARY or plan.buffers[b].source >= 0:
                    raise LookupError
                form = layouts.shapes[b], layouts.strides[b], torch_dtype(plan.buffers[b].spec.dtype)
                if b in leaving or layouts.bytes_of(plan, b) > KEPT_MEMORY.max_lasting_result_bytes:
                    self.makes.append((b, *form))
                else:
                    t = self.part.make(*form)
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
        if self.hold:
            self.header.threads = self.tables.spread()
        self.header.done = 0
        assert self.run is not None
        if code := self.run(self.address, 1):
            raise_error(code)
        for view in self.views:
            view(tensors)
