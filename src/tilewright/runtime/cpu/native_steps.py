"""Steps of a plan as `native/loop.cpp` runs them: kernels, products of ours, copies, and loops of these."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tilewright.plan.data import CallStep, Copy, Launches
from tilewright.runtime.own.conv_window import dense
from tilewright.runtime.own.native import linear_of
from tilewright.runtime.plan.bound import Workspace
from tilewright.runtime.plan.layouts import Layouts
from tilewright.runtime.plan.tensors import same_layout

from .kernels import NativeUnit

_LAUNCHES, _PRODUCT, _COPY, _LOOP, _BESIDE = range(5)


class NativeStep(ctypes.Structure):
    """One step; places are a slot among the bases and bytes behind it."""

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


class StepOperand(ctypes.Structure):
    """What each step of a loop reads or makes of a tensor."""

    _fields_ = (("slot", ctypes.c_int64), ("base", ctypes.c_void_p), ("step", ctypes.c_int64))


class CarriedState(ctypes.Structure):
    """A value that a loop carries."""

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


class Header(ctypes.Structure):
    """A loop, or the steps of a plan, which are one of a single step."""

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


class Wire(ctypes.Structure):
    """Where a loop inside is told an address: `to`, what lies in a slot of those outside, and bytes behind it."""

    _fields_ = (("to", ctypes.c_void_p), ("slot", ctypes.c_int64), ("offset", ctypes.c_int64))


def is_dense(layouts: Layouts, b: int) -> bool:
    """Whether buffer `b` is row-major without gaps."""
    return dense(layouts.shapes[b], layouts.strides[b])


class Tables:
    """The launches of some steps, on one thread or several."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._spread: list[tuple[NativeUnit, ctypes.Structure]] = []
        self._kept: list[object] = []
        self._threads = 0

    def beside(self, other: Tables) -> None:
        """Spread the launches of `other` with these."""
        self._spread += other._spread
        self._kept.append(other)

    def spread(self) -> int:
        """Run them on as many threads as the caller has now; how many these are, negative for pinned ones."""
        unit = self.workspace.part.unit
        threads = unit.threads() if isinstance(unit, NativeUnit) else torch.get_num_threads()
        if threads != self._threads:
            for owner, table in self._spread:
                owner.spread(table, abs(threads))
            self._threads = threads
        return threads

    def launches(self, step: Launches) -> NativeStep:
        """The stage of some launches. Raises LookupError where they are not native."""
        workspace, unit = self.workspace, self.workspace.part.unit
        if not isinstance(unit, NativeUnit):
            raise LookupError
        located, sizes = workspace.located(step), workspace.part.sizes
        ways: list[tuple[int, int]] = []
        for alone, held in ((workspace.left_alone(step), False), (workspace.left_alone_held(step), True)):
            table, function, brief = unit.table_of(located, workspace.bases, sizes, alone, held=held)
            self._kept.append(table)
            if not brief:
                self._spread.append((unit, table))
            ways.append((function, ctypes.addressof(table)))
        (function, task), (held_function, held_task) = ways
        return NativeStep(
            kind=_LAUNCHES, function=function, task=task, held_function=held_function, held_task=held_task,
            added=-1,
        )  # fmt: skip


def product_stage(workspace: Workspace, step: CallStep) -> NativeStep:
    """The stage of a product of ours. Raises LookupError where a call is none, or reads or makes tensors that lie in
    memory in another way."""
    linear, layouts = linear_of(step.call.function), workspace.part.layouts
    if linear is None or step.guarded or len(step.outputs) != 1:
        raise LookupError
    (made,), first = step.outputs, step.inputs[0]
    found = linear.prepared(layouts.shapes[first], layouts.strides[first], layouts.strides[made])
    for b in step.inputs[1:]:
        if not same_layout(layouts.shapes[made], layouts.strides[b], layouts.strides[made]):
            raise LookupError
    if found is None:
        raise LookupError
    x, x_offset = workspace.locate(first)
    out, out_offset = workspace.locate(made)
    added, added_offset = workspace.locate(step.inputs[1]) if len(step.inputs) > 1 else (-1, 0)
    return NativeStep(
        kind=_PRODUCT, function=linear.function, task=found.task, x=x, x_offset=x_offset, added=added,
        added_offset=added_offset, out=out, out_offset=out_offset, rows=found.rows, stride=found.stride,
    )  # fmt: skip


def copy_stage(workspace: Workspace, step: Copy) -> NativeStep:
    """The stage of a copy. Raises LookupError where it is not of one run of bytes."""
    layouts = workspace.part.layouts
    if not (is_dense(layouts, step.source) and is_dense(layouts, step.target)):
        raise LookupError
    x, at = workspace.locate(step.source)
    out, to = workspace.locate(step.target)
    size = layouts.bytes_of(workspace.part.plan, step.source)
    return NativeStep(kind=_COPY, added=-1, rows=size, x=x, x_offset=at, out=out, out_offset=to)


def loop_stage(loop: Header, steps: int, wires: Sequence[Wire]) -> tuple[NativeStep, object]:
    """The stage of so many steps of a loop whose addresses come by `wires`, and what must be kept with it."""
    table = (Wire * max(1, len(wires)))(*wires)
    stage = NativeStep(
        kind=_LOOP, task=ctypes.addressof(loop), held_task=ctypes.addressof(table), x=len(wires), added=-1,
        rows=steps,
    )  # fmt: skip
    return stage, table


def beside_stage(
    stages: Sequence[NativeStep], undivided: NativeStep | None = None
) -> tuple[NativeStep, object]:
    """Stages of which none reads what another makes, each for a thread of its own if there are so few threads; else one
    after the other, or `undivided`, which does the same. And what must be kept with it."""
    table = (NativeStep * len(stages))(*stages)
    other = (NativeStep * 1)(*([] if undivided is None else [undivided]))
    stage = NativeStep(
        kind=_BESIDE, task=ctypes.addressof(table), added=-1, rows=len(stages),
        held_task=None if undivided is None else ctypes.addressof(other),
    )  # fmt: skip
    return stage, (table, other)
