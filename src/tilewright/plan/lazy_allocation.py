"""Memory that a plan takes when it is first written and gives back when it was last read.

One arena for all that lies between kernels is the cheapest to have, but it is there from the first step to the last. A
forward pass ends with what it saved, and a backward pass begins with it and gives it back step by step: there, large
buffers are tensors of their own, made in front of the step that first writes them, and nothing large is kept between
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import MEMORY

from .data import Buffer, CallStep, Copy, Home, Launches, PlanSegment, Step, View


def is_worth_it(segments: Sequence[PlanSegment], buffers: Sequence[Buffer], hints: SizeHints) -> bool:
    """Whether anything waits between kernels, so that memory comes and goes, or an arena would be large."""
    waits = any(isinstance(step, CallStep) for segment in segments for step in segment.steps)
    return waits or any(_is_large(b, hints) for b in buffers)


def with_own_memory(buffers: Sequence[Buffer], hints: SizeHints) -> tuple[Buffer, ...]:
    """The buffers, large ones of the arena as tensors of their own."""
    return tuple(replace(b, home=Home.OUTPUT) if _is_large(b, hints) else b for b in buffers)


def with_makes(segments: Sequence[PlanSegment], buffers: Sequence[Buffer]) -> tuple[PlanSegment, ...]:
    """Segments that say in front of which step each tensor of their own is made."""
    made: set[int] = set()
    out: list[PlanSegment] = []
    for segment in segments:
        makes: list[tuple[int, ...]] = []
        for step in segment.steps:
            roots = {root_of(buffers, b) for b in touched(step)}
            now = sorted(b for b in roots - made if buffers[b].home is Home.OUTPUT)
            made |= set(now)
            makes.append(tuple(now))
        out.append(replace(segment, makes=tuple(makes)))
    return tuple(out)


def touched(step: Step) -> tuple[int, ...]:
    """The buffers that a step reads or writes."""
    match step:
        case Launches():
            return tuple(p for launch in step.launches for p in launch.params)
        case CallStep():
            return (*step.inputs, *step.outputs)
        case View():
            return (step.buffer,)
        case Copy():
            return (step.target, step.source)


def root_of(buffers: Sequence[Buffer], b: int) -> int:
    """The buffer whose memory buffer `b` is."""
    while buffers[b].source >= 0:
        b = buffers[b].source
    return b


def _is_large(b: Buffer, hints: SizeHints) -> bool:
    return (
        b.home is Home.ARENA
        and hints.estimate(dims.prod(b.spec.shape)) * b.spec.dtype.bytes >= MEMORY.min_lazy_buffer_bytes
    )
