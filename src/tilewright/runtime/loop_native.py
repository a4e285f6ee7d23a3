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
from tilewright.plan.data import Call, Copy, Home, Launches, Plan, View
from tilewright.runtime.bound import Workspace
from tilewright.runtime.cache import Store
from tilewright.runtime.device import build_texts, load
from tilewright.runtime.executable import Bound
from tilewright.runtime.launch import raise_error
from tilewright.runtime.pool import pool
from tilewright.runtime.product import Linear, linear_of
from tilewright.runtime.tensors import empty_strided, torch_dtype
from tilewright.runtime.unit import NativeUnit

SOURCE = Path(__file__).parent / "native" / "loop.cpp"
_LAUNCHES, _PRODUCT, _COPY = range(3)


class _Stage(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("function", ctypes.c_void_p),
        ("task", ctypes.c_void_p),
        ("held_function", ctypes.c_void_p),
        ("held_task", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("x", "x_offset", "added", "added_offset", "out", "out_offset", "rows", "stride")
        ),
    )


class _Part(ctypes.Structure):
    _fields_ = (("slot", ctypes.c_int64), ("base", ctypes.c_void_p), ("step", ctypes.c_int64))


class _State(ctypes.Structure):
    _fields_ = (
        ("into", ctypes.c_int64),
        ("out", ctypes.c_int64),
        ("first", ctypes.c_void_p),
        ("even", ctypes.c_void_p),
        ("odd", ctypes.c_void_p),
        ("stacked", ctypes.c_int64),
        ("last", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
    )


class _Loop(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bases", "stages", "parts", "states")),
        *((name, ctypes.c_int64) for name in ("count", "part_count", "state_count")),
        ("counter", ctypes.c_void_p),
        ("goes", ctypes.c_void_p),
        ("last", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("done", ctypes.c_int64),
        ("hold", ctypes.c_int64),
    )


_functions: list[Callable[..., int]] = []
_lock = threading.Lock()


def loop_function(store: Store, options: Options) -> Callable[..., int]:
    """The native `tw_loop_run`, built on first use. Raises what `build_texts` raises."""
    with _lock:
        if not _functions:
            library = load(build_texts([SOURCE.read_text(encoding="utf-8")], (), store, options))
            threads = pool(store, options)
            library.tw_attach.argtypes = [ctypes.c_void_p] * 3
            library.tw_attach(threads.hold, threads.held, threads.resizing)
            run = library.tw_loop_run
            run.argtypes = [ctypes.c_void_p, ctypes.c_int64]
            run.restype = ctypes.c_int64
            _functions.append(run)
        return _functions[0]


@dataclass(frozen=True, slots=True)
class Places:
    """The buffers of a body's plan that change from step to step. `made[k]` is the buffer of body output k; outputs
    that are one value have one buffer."""

    counter: int
    carried: tuple[int, ...]
    sliced: tuple[int, ...]
    outer: tuple[int, ...]
    made: tuple[int, ...]


def native_places(loop: Loop, order: Sequence[int], plan: Plan) -> Places | None:
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
            case Call():
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
    return Places(
        tensors[0], tuple(tensors[1:first]), tuple(tensors[first:second]), tuple(tensors[second:]), made
    )


class NativeLoop:
    """A loop under exact sizes, with memory of its own, for one caller at a time."""

    def __init__(self, loop: Loop, places: Places, bound: Bound, run: Callable[..., int]) -> None:
        """Raises LookupError where a buffer lies in another way than stages read it."""
        self.loop, self.places, self.run, self.bound = loop, places, run, bound
        self.part = bound.first
        plan, self.layouts = self.part.plan, self.part.layouts
        self.plan = plan
        self.workspace = Workspace(self.part, bound.constants)
        self.bases = self.workspace.bases
        self.tables: list[tuple[ctypes.Structure, bool]] = []
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
        self.stages = (_Stage * max(1, self.count))(*stages)
        self._prepare()

    def _hold(self, t: Tensor) -> Tensor:
        self.held.append(t)
        return t

    def empty(self, b: int, count: int | None = None) -> Tensor:
        """Memory for buffer `b`, or for one such a step."""
        if b not in self.dense:
            if not self.is_dense(b):
                raise LookupError
            kept = self.layouts.shapes[b]
            self.dense[b] = tuple(max(1, math.prod(kept[d + 1 :])) for d in range(len(kept)))
        shape, strides = self.layouts.shapes[b], self.dense[b]
        dtype = torch_dtype(self.plan.buffers[b].spec.dtype)
        if count is None:
            return empty_strided(shape, strides, dtype)
        return empty_strided((count, *shape), (max(1, math.prod(shape)), *strides), dtype)

    def is_dense(self, b: int) -> bool:
        """Whether buffer `b` is row-major without gaps."""
        step = 1
        for n, stride in zip(
            reversed(self.layouts.shapes[b]), reversed(self.layouts.strides[b]), strict=True
        ):
            if n != 1 and stride != step:
                return False
            step *= n
        return True

    def bytes_of(self, b: int) -> int:
        """Bytes of buffer `b`."""
        return self.layouts.bytes_of(self.plan, b)

    def _stages(self) -> list[_Stage]:
        stages: list[_Stage] = []
        for step in self.part.segment.steps:
            match step:
                case Launches():
                    stages.append(self._launches(step))
                case Call():
                    stages.append(self._product(step))
                case Copy():
                    if not (self.is_dense(step.source) and self.is_dense(step.target)):
                        raise LookupError
                    x, at = self.workspace.locate(step.source)
                    out, to = self.workspace.locate(step.target)
                    size = self.bytes_of(step.source)
                    places = {"x": x, "x_offset": at, "out": out, "out_offset": to}
                    stages.append(_Stage(kind=_COPY, added=-1, rows=size, **places))
                case View():
                    pass
                case _:
                    raise LookupError
        return stages

    def _launches(self, step: Launches) -> _Stage:
        unit = self.part.unit
        if not isinstance(unit, NativeUnit):
            raise LookupError
        located, sizes = self.workspace.located(step), self.part.sizes
        table, function, brief = unit.table_of(located, self.bases, sizes, self.workspace.left_alone(step))
        self.tables.append((table, brief))
        held, held_function, brief = unit.table_of(
            located, self.bases, sizes, self.workspace.left_alone_held(step), held=True
        )
        self.tables.append((held, brief))
        return _Stage(
            kind=_LAUNCHES, function=function, task=ctypes.addressof(table), held_function=held_function,
            held_task=ctypes.addressof(held), added=-1,
        )  # fmt: skip

    def _product(self, step: Call) -> _Stage:
        linear: Linear | None = linear_of(step.call.function)
        if linear is None or not all(map(self.is_dense, (*step.inputs, *step.outputs))):
            raise LookupError
        rows = 1
        for n in self.layouts.shapes[step.inputs[0]]:
            rows *= n
        x, x_offset = self.workspace.locate(step.inputs[0])
        out, out_offset = self.workspace.locate(step.outputs[0])
        added, added_offset = self.workspace.locate(step.inputs[1]) if len(step.inputs) > 1 else (-1, 0)
        return _Stage(
            kind=_PRODUCT, function=linear.function, task=linear.task(), x=x, x_offset=x_offset, added=added,
            added_offset=added_offset, out=out, out_offset=out_offset, rows=rows // linear.length, stride=linear.length,
        )  # fmt: skip

    # --- running ---

    def _prepare(self) -> None:
        """What all runs share: where carried values take turns, and the tables that the native side reads."""
        loop, places = self.loop, self.places
        self.made = places.made[loop.conditional : loop.conditional + loop.carried]
        self.kept = places.made[loop.conditional + loop.carried :]
        self.rings = [None if b in self.stacks else (self.empty(b), self.empty(b)) for b in self.made]
        moving = (*places.sliced, *self.stacks)
        self.parts = (_Part * max(1, len(moving)))(*(_Part(slot=b, step=self.bytes_of(b)) for b in moving))
        self.states = (_State * max(1, loop.carried))()
        self.part_rows = list(self.parts)[: len(moving)]
        self.state_rows = list(self.states)[: loop.carried]
        for row, into, out, ring in zip(self.state_rows, places.carried, self.made, self.rings, strict=True):
            row.into, row.out, row.bytes = into, out, self.bytes_of(out)
            if ring is None:
                row.stacked = self.bytes_of(out)
            else:
                row.even, row.odd = ring[0].data_ptr(), ring[1].data_ptr()
        self.header = _Loop(
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
        room = FIRST if steps is None else steps
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
            self._threads(),
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

    def _threads(self) -> int:
        threads = torch.get_num_threads()
        for table, brief in self.tables:
            if not brief:
                assert isinstance(self.part.unit, NativeUnit)
                self.part.unit.spread(table, threads)
        return threads

    def _point(self, stacks: dict[int, Tensor], first: int) -> None:
        """Say where values are kept."""
        for k, x in enumerate(stacks.values()):
            self.part_rows[first + k].base = x.data_ptr()
        for row, out, ring in zip(self.state_rows, self.made, self.rings, strict=True):
            if ring is None:
                row.even = stacks[out].data_ptr()


FIRST = 16
"""Steps for which there is room at first where their number is not known; it doubles."""
