"""The law for a cover before its kernels are built, and for what was built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.size_hints import NO_HINTS, SizeHints
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Cover, Kernel, Scheduled, Step
from tilewright.ir.program import TileProgram
from tilewright.ir.sizes import dims
from tilewright.ir.writes import DoneInPlace, StoredInInput

from .law import decide
from .order import keeps_order
from .successors import Successors, find_successors


def with_places(cover: Cover, hints: SizeHints = NO_HINTS) -> Cover:
    """The cover in which kernels that may store over what they load know it, and those that store at places that data
    name."""
    decided = decide(cover)
    stored = decided.stored
    successors = find_successors(cover, stored, decided.calls, hints)
    if not successors and not any(s.over or s.at for s in stored.values()):
        return cover
    return replace(cover, steps=tuple(_told(step, stored, successors) for step in cover.steps))


def _told(step: Step, stored: Mapping[Value, StoredInInput], successors: Successors) -> Step:
    if not isinstance(step, Kernel):
        return step
    pairs = [
        (step.inputs.index(v), b)
        for b, made in enumerate(step.outputs)
        for v in step.inputs
        if successors.get(made) is v or ((place := stored.get(made)) is not None and v in place.over)
    ]
    lines = [
        (b, place.at)
        for b, made in enumerate(step.outputs)
        if (place := stored.get(made)) is not None and place.at is not None
    ]
    return replace(step, over=tuple(pairs), lines=tuple(lines)) if pairs or lines else step


def decide_built(cover: Cover, scheduled: Sequence[Scheduled]) -> DoneInPlace:
    """What of a cover is done in place, with programs that keep the order of loads and stores, of kernels that know
    what they may store over (`with_places`)."""
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

    def follows(kernel: Kernel, made: Value, old: Value) -> bool:
        first, loaded = len(kernel.inputs), kernel.inputs.index(old)
        output = kernel.outputs.index(made)
        return (loaded, output) in kernel.over and all(
            in_order(program, program.params[loaded].name, program.params[first + output].name, dims.ZERO)
            for program in scheduled[number[kernel]].programs
        )

    decided = decide(cover, keeps)
    successors = find_successors(cover, decided.stored, decided.calls, NO_HINTS)
    makers = {v: kernel for kernel in kernels for v in kernel.outputs}
    kept = {made: old for made, old in successors.items() if follows(makers[made], made, old)}
    return replace(decided, successors=kept)


def _offset(starts: Sequence[Expr], strides: Sequence[Expr]) -> Expr:
    return dims.add(dims.ZERO, *(dims.mul(a, b) for a, b in zip(starts, strides, strict=True)))
