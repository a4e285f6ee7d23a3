"""The law for a cover before its kernels are built, and for what was built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.ir.expr import Expr
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Cover, Kernel, Scheduled, Step
from tilewright.ir.program import TileProgram
from tilewright.ir.sizes import dims
from tilewright.ir.writes import DoneInPlace, StoredInInput

from .law import decide
from .order import keeps_order


def with_places(cover: Cover) -> Cover:
    """The cover in which kernels that may store over what they load know it, and those that store at places that data
    name."""
    stored = decide(cover).stored
    if not any(s.over or s.at for s in stored.values()):
        return cover
    return replace(cover, steps=tuple(_told(step, stored) for step in cover.steps))


def _told(step: Step, stored: Mapping[Value, StoredInInput]) -> Step:
    if not isinstance(step, Kernel):
        return step
    pairs = [
        (step.inputs.index(v), b)
        for b, made in enumerate(step.outputs)
        if (place := stored.get(made)) is not None
        for v in step.inputs
        if v in place.over
    ]
    lines = [
        (b, place.at)
        for b, made in enumerate(step.outputs)
        if (place := stored.get(made)) is not None and place.at is not None
    ]
    return replace(step, over=tuple(pairs), lines=tuple(lines)) if pairs or lines else step


def decide_built(cover: Cover, scheduled: Sequence[Scheduled]) -> DoneInPlace:
    """What of a cover is done in place, with programs that keep the order of loads and stores."""
    kernels = [step for step in cover.steps if isinstance(step, Kernel)]
    number = {kernel: n for n, kernel in enumerate(kernels)}
    strides = cover.layouts
    known: dict[tuple[int, str, str, Expr], bool] = {}

    def in_order(program: TileProgram, loaded: str, stored: str, shift: Expr) -> bool:
        key = id(program), loaded, stored, shift
        if key not in known:
            known[key] = keeps_order(program, loaded, stored, shift)
        return known[key]

    def keeps(kernel: Kernel, value: Value, stored: StoredInInput) -> bool:
        output = kernel.outputs.index(value)
        if stored.at is not None and (output, stored.at) not in kernel.lines:
            return False
        made = scheduled[number[kernel]]
        lies = strides.get(value) or cover.graph.layouts.get(value)
        steps = lies.strides if lies is not None else dims.dense_strides(value.shape)
        shift = _offset(stored.starts, steps)
        return all(
            in_order(
                program, program.params[kernel.inputs.index(v)].name,
                program.params[len(kernel.inputs) + kernel.outputs.index(value)].name, shift,
            )
            for program in made.programs
            for v in stored.over
        )  # fmt: skip

    return decide(cover, keeps)


def _offset(starts: Sequence[Expr], strides: Sequence[Expr]) -> Expr:
    return dims.add(dims.ZERO, *(dims.mul(a, b) for a, b in zip(starts, strides, strict=True)))
