"""Loops that run without Python between steps: every step of the body is a kernel, a product of ours or a copy."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.ir.graph import Loop
from tilewright.options import Options
from tilewright.plan.data import CallStep, Copy, Home, Launches, Plan, View
from tilewright.runtime.cpu.native_steps import (
    CarriedState,
    Header,
    NativeStep,
    StepOperand,
    Tables,
    Wire,
    copy_stage,
    is_dense,
    product_stage,
)
from tilewright.runtime.cpu.pool import pool
from tilewright.runtime.cpu.toolchain import build_texts, load
from tilewright.runtime.own.native import linear_of
from tilewright.runtime.plan.bound import Workspace
from tilewright.runtime.plan.known_sizes import Bound
from tilewright.runtime.plan.launch import raise_error
from tilewright.runtime.plan.tensors import empty_strided, torch_dtype
from tilewright.runtime.store.cache import ContentStore
from tilewright.tuning.input_limits import LOOP_LIMITS

SOURCE = Path(__file__).parents[1] / "native" / "loop.cpp"
_functions: list[Callable[..., int]] = []
_lock = threading.Lock()


def loop_function(store: ContentStore, options: Options) -> Callable[..., int]:
    """The native `tw_loop_run`, built on first use. Raises what `build_texts` raises."""
    with _lock:
        if not _functions:
            library = load(build_texts([SOURCE.read_text(encoding="utf-8")], (), store, options))
            threads = pool(store, options)
            library.tw_attach.argtypes = [ctypes.c_void_p] * 4
            library.tw_attach(threads.hold, threads.held, threads.resizing, threads.parallel)
            run = library.tw_loop_run
            run.argtypes = [ctypes.c_void_p, ctypes.c_int64]
            run.restype = ctypes.c_int64
            _functions.append(run)
        return _functions[0]


@dataclass(frozen=True, slots=True)
class ChangingBuffers:
    """The buffers of a body's plan that change from step to step. `made[k]` is the buffer of body output k; outputs
    that are one value have one buffer."""

    counter: int
    carried: tuple[int, ...]
    sliced: tuple[int, ...]
    outer: tuple[int, ...]
    made: tuple[int, ...]


def native_places(loop: Loop, order: Sequence[int], plan: Plan) -> ChangingBuffers | None:
    """Where a body's plan has what changes; None if a step of it needs Python. `order[k]` is the number of the plan's
    output that is body output k."""
    outputs = [o for o in plan.outputs if isinstance(o, int)]
    if plan.device != "cpu" or len(plan.segments) != 1 or plan.written or len(outputs) != len(plan.outputs):
        return None
    homes = [plan.buffers[o] for o in outputs]
    if len(set(outputs)) != len(outputs) or any(
        b.home not in (Home.OUTPUT, Home.LIBRARY) or b.source >= 0 for b in homes
    ):
        return None
    (segment,) = plan.segments
    for step in segment.steps:
        match step:
            case Launches() | View() | Copy():
                pass
            case CallStep():
                if linear_of(step.call.function) is None or step.guarded or len(step.outputs) != 1:
                    return None
            case _:
                return None
    tensors = [b for b in plan.arguments if b >= 0]
    first, second = 1 + loop.carried, 1 + loop.carried + loop.sliced
    made = tuple(outputs[k] for k in order)
    state = made[loop.conditional : loop.conditional + loop.carried]
    if len(set(state)) < len(state):
        return None
    return ChangingBuffers(
        tensors[0], tuple(tensors[1:first]), tuple(tensors[first:second]), tuple(tensors[second:]), made
    )


class NativeLoop:
    """A loop under exact sizes, with memory of its own, for one caller at a time."""

    def __init__(self, loop: Loop, places: ChangingBuffers, bound: Bound, run: Callable[..., int]) -> None:
        """Raises LookupError where a buffer lies in another way than stages read it."""
        self.loop, self.places, self.run, self.bound = loop, places, run, bound
        self.part = bound.first
        plan, self.layouts = self.part.plan, self.part.layouts
        self.plan = plan
        self.workspace = Workspace(self.part)
        self.bases = self.workspace.bases
        self.tables = Tables(self.workspace)
        self.held: list[object] = []
        self.dense: dict[int, tuple[int, ...]] = {}
        """Strides of buffers that are made here."""
        state = places.made[loop.conditional : loop.conditional + loop.carried]
        self.stacks = tuple(dict.fromkeys(places.made[loop.conditional + loop.carried :]))
        """Buffers whose values are kept, each once."""
        varying = {*state, *self.stacks}
        self.counter = torch.zeros((), dtype=torch.int64)
        self.bases[places.counter] = self.counter.data_ptr()
        self.goes = torch.ones((), dtype=torch.bool)
        for k, b in enumerate(plan.buffers):
            if k not in varying and b.home in (Home.OUTPUT, Home.LIBRARY):
                self.bases[k] = self._hold(self.empty(k)).data_ptr()
        if loop.conditional:
            if places.made[0] in varying:
                raise LookupError
            self.bases[places.made[0]] = self.goes.data_ptr()
        stages = self._stages()
        self.count = len(stages)
        self.step_ns = sum(map(self.workspace.takes, self.part.segment.steps))
        """What a step takes one core."""
        self.stages = (NativeStep * max(1, self.count))(*stages)
        self._prepare()

    def _hold(self, t: Tensor) -> Tensor:
        self.held.append(t)
        return t

    def empty(self, b: int, count: int | None = None) -> Tensor:
        """Memory for buffer `b`, or for one such a step."""
        if b not in self.dense:
            if not is_dense(self.layouts, b):
                raise LookupError
            sizes = self.layouts.shapes[b]
            self.dense[b] = tuple(max(1, math.prod(sizes[d + 1 :])) for d in range(len(sizes)))
        shape, strides = self.layouts.shapes[b], self.dense[b]
        dtype = torch_dtype(self.plan.buffers[b].spec.dtype)
        if count is None:
            return empty_strided(shape, strides, dtype)
        return empty_strided((count, *shape), (max(1, math.prod(shape)), *strides), dtype)

    def bytes_of(self, b: int) -> int:
        """Bytes of buffer `b`."""
        return self.layouts.bytes_of(self.plan, b)

    def _stages(self) -> list[NativeStep]:
        stages: list[NativeStep] = []
        for step in self.part.segment.steps:
            match step:
                case Launches():
                    stages.append(self.tables.launches(step))
                case CallStep():
                    stages.append(product_stage(self.workspace, step))
                case Copy():
                    stages.append(copy_stage(self.workspace, step))
                case View():
                    pass
                case _:
                    raise LookupError
        return stages

    # --- running ---

    def _prepare(self) -> None:
        """What all runs share: where carried values take turns, and the tables that the native side reads."""
        loop, places = self.loop, self.places
        self.made = places.made[loop.conditional : loop.conditional + loop.carried]
        self.kept = places.made[loop.conditional + loop.carried :]
        self.rings = [None if b in self.stacks else (self.empty(b), self.empty(b)) for b in self.made]
        moving = (*places.sliced, *self.stacks)
        self.parts = (StepOperand * max(1, len(moving)))(
            *(StepOperand(slot=b, step=self.bytes_of(b)) for b in moving)
        )
        self.states = (CarriedState * max(1, loop.carried))()
        self.part_rows = list(self.parts)[: len(moving)]
        self.state_rows = list(self.states)[: loop.carried]
        for row, into, out, ring in zip(self.state_rows, places.carried, self.made, self.rings, strict=True):
            row.into, row.out, row.bytes = into, out, self.bytes_of(out)
            if ring is None:
                row.stacked = self.bytes_of(out)
            else:
                row.even, row.odd = ring[0].data_ptr(), ring[1].data_ptr()
        self.header = Header(
            bases=self.bases.buffer_info()[0], stages=ctypes.addressof(self.stages), count=self.count,
            parts=ctypes.addressof(self.parts), part_count=len(moving), states=ctypes.addressof(self.states),
            state_count=loop.carried, counter=self.counter.data_ptr(),
            goes=self.goes.data_ptr() if loop.conditional else None,
        )  # fmt: skip
        self.address = ctypes.addressof(self.header)

    def __call__(
        self, steps: int | None, most: int, state: Sequence[Tensor], sliced: Sequence[Tensor], outer: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], int]:  # fmt: skip
        """The last carried values, what was stacked and how many steps there were: `steps` (more than none), or as many
        as the condition allows, at most `most`."""
        header, backwards = self.header, self.loop.backwards and steps is not None
        room = LOOP_LIMITS.first_step_room if steps is None else steps
        stacks = {b: self.empty(b, room) for b in self.stacks}
        for b, t in zip(self.places.outer, outer, strict=True):
            self.bases[b] = t.data_ptr()
        ends = [self.empty(b) for b in self.made]
        for part, t in zip(self.part_rows, sliced, strict=False):
            part.base = t.data_ptr()
        for row, t, end in zip(self.state_rows, state, ends, strict=True):
            row.first, row.last = t.data_ptr(), end.data_ptr()
        header.done, header.last, header.threads = (
            0,
            steps - 1 if backwards and steps else -1,
            self.tables.spread(),
        )
        header.hold = room * self.step_ns > self.plan.alone_ns
        while True:
            self._point(stacks, len(sliced))
            if code := self.run(self.address, min(room, most)):
                raise_error(code)
            if header.done < room or steps is not None or header.done >= most or not bool(self.goes):
                break
            room *= 2
            stacks = {b: torch.cat((x, torch.empty_like(x))) for b, x in stacks.items()}
        done = int(header.done)
        if done != room:
            stacks = {b: x[:done].clone() for b, x in stacks.items()}
        return ends, [stacks[b] for b in self.kept], done

    def wires(
        self, state: Sequence[Place], sliced: Sequence[Place], outer: Sequence[Place], made: Sequence[Place]
    ) -> list[Wire]:
        """How a plan tells the loop where its operands lie, and its results: the last carried values, then what is
        stacked, each value once. Raises LookupError where there are places for more."""
        if len(made) != len(self.made) + len(self.stacks) or self.loop.conditional:
            raise LookupError
        ends, stacks = made[: len(self.made)], dict(zip(self.stacks, made[len(self.made) :], strict=True))
        wires = [
            (ctypes.addressof(row) + StepOperand.base.offset, place)
            for row, place in zip(self.part_rows, (*sliced, *(stacks[b] for b in self.stacks)), strict=True)
        ]
        for row, first, last in zip(self.state_rows, state, ends, strict=True):
            at = ctypes.addressof(row)
            wires += [(at + CarriedState.first.offset, first), (at + CarriedState.last.offset, last)]
            if row.stacked:
                wires.append((at + CarriedState.even.offset, stacks[row.out]))
        at = self.bases.buffer_info()[0]
        wires += [(at + 8 * b, place) for b, place in zip(self.places.outer, outer, strict=True)]
        return [Wire(to=to, slot=slot, offset=offset) for to, (slot, offset) in wires]

    def within(self, undivided: NativeLoop) -> None:
        """Read and make some of the rows of what `undivided` does."""
        strides = [undivided.bytes_of(b) for b in (*undivided.places.sliced, *undivided.stacks)]
        places = (*self.places.sliced, *self.stacks)
        step_of = dict(zip(places, strides, strict=True))
        for row in self.part_rows:
            row.step = step_of[row.slot]
        for row in self.state_rows:
            if row.stacked:
                row.stacked = step_of[row.out]

    def _point(self, stacks: dict[int, Tensor], first: int) -> None:
        """Say where values are kept."""
        for k, x in enumerate(stacks.values()):
            self.part_rows[first + k].base = x.data_ptr()
        for row, out, ring in zip(self.state_rows, self.made, self.rings, strict=True):
            if ring is None:
                row.even = stacks[out].data_ptr()


Place = tuple[int, int]
"""A slot among the bases, and bytes behind it."""
