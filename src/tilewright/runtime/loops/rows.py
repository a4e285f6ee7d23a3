"""Loops of which each thread does a part of the rows, from the first step to the last."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

from torch import Tensor

from tilewright.runtime.cpu.native_steps import Header, NativeStep, beside_stage, loop_stage
from tilewright.runtime.plan.launch import raise_error

from .native import NativeLoop, Place


class RowParts:
    """A loop, and the same on equal parts of its rows, for one caller at a time."""

    def __init__(self, undivided: NativeLoop, parts: Sequence[NativeLoop]) -> None:
        self.undivided, self.parts = undivided, tuple(parts)
        for part in self.parts:
            part.within(undivided)
        self.tables = undivided.tables
        for part in self.parts:
            self.tables.beside(part.tables)
        self.kept: list[object] = []

    def stage(
        self, steps: int, state: Sequence[Place], sliced: Sequence[Place], outer: Sequence[Place],
        made: Sequence[Place],
    ) -> NativeStep:  # fmt: skip
        """So many steps on operands and results that lie there: the parts side by side, or the whole. Raises
        LookupError where two results are one value."""
        undivided, table = loop_stage(
            self.undivided.header, steps, self.undivided.wires(state, sliced, outer, made)
        )
        self.kept.append(table)
        stages: list[NativeStep] = []
        for number, part in enumerate(self.parts):
            own = part.places
            places = [
                [(slot, at + number * part.bytes_of(b)) for b, (slot, at) in zip(bs, given, strict=True)]
                for bs, given in (
                    (own.carried, state),
                    (own.sliced, sliced),
                    ((*part.made, *part.stacks), made),
                )
            ]
            stage, table = loop_stage(part.header, steps, part.wires(places[0], places[1], outer, places[2]))
            stages.append(stage)
            self.kept.append(table)
        both, table = beside_stage(stages, undivided)
        self.kept.append(table)
        for loop in (self.undivided, *self.parts):
            loop.header.last = steps - 1 if loop.loop.backwards else -1
            loop.header.hold = 0
        return both


class RowLoop:
    """A loop of which each thread does a part of the rows, called by itself."""

    def __init__(self, loop: RowParts, run: Callable[..., int]) -> None:
        self.loop, self.run, self.undivided = loop, run, loop.undivided
        self.bound, self.goes = loop.undivided.bound, loop.undivided.goes
        undivided = self.undivided
        counts = (len(undivided.places.carried), len(undivided.places.sliced), len(undivided.places.outer))
        self.bases = array("Q", [0]) * (sum(counts) + len(undivided.made) + len(undivided.stacks))
        places: list[Place] = [(k, 0) for k in range(len(self.bases))]
        ends = [sum(counts[:k]) for k in range(4)]
        self.groups = [places[a:b] for a, b in zip(ends, (*ends[1:], len(places)), strict=True)]
        self.steps = -1

    def __call__(
        self, steps: int | None, most: int, state: Sequence[Tensor], sliced: Sequence[Tensor], outer: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], int]:  # fmt: skip
        """As `NativeLoop`."""
        undivided = self.undivided
        assert steps is not None
        stacks = {b: undivided.empty(b, steps) for b in undivided.stacks}
        ends = [undivided.empty(b) for b in undivided.made]
        if steps != self.steps:
            self.loop.kept.clear()
            self.table = (NativeStep * 1)(self.loop.stage(steps, *self.groups))
            self.header = Header(
                bases=self.bases.buffer_info()[0], stages=ctypes.addressof(self.table), count=1, last=-1
            )
            self.address = ctypes.addressof(self.header)
            self.steps = steps
        given = (*state, *sliced, *outer, *ends, *(stacks[b] for b in undivided.stacks))
        for k, t in enumerate(given):
            self.bases[k] = t.data_ptr()
        self.header.done, self.header.threads = 0, self.loop.tables.spread()
        self.header.hold = steps * undivided.step_ns > undivided.plan.alone_ns
        if code := self.run(self.address, 1):
            raise_error(code)
        return ends, [stacks[b] for b in undivided.kept], steps
