"""Bodies of `Loop`, `Scan` and the recurrent layers as one op of torch's, where a trace of ours keeps loops whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from tilewright.capture.loops.op import keeps_loops, loop_op
from tilewright.capture.onnx.values.run import Host, Value, as_tensor, is_static, is_symbolic
from tilewright.errors import ModelError, UnsupportedError
from tilewright.tuning.thresholds import LOOPS

Run = Callable[..., Sequence[Value]]
"""A body on (counter, carried values, slices, what is the same in every step): a condition or None, the next carried
values, and what is collected."""


def becomes_one_op(steps: object) -> bool:
    """Whether a loop of that many steps (None: unknown) should become one op now."""
    return keeps_loops() and not (is_static(steps) and cast(int, steps) <= LOOPS.max_known_unrolled_steps)


@dataclass(frozen=True)
class OnnxSteps:
    """At most `most` steps (None: any number), the first of which runs if `going` says so, and how many values are
    `collected` in each. Those that run `backwards` begin at the last slice."""

    most: int | None
    collected: int
    going: Tensor | None = None
    backwards: bool = False


@dataclass(frozen=True)
class Operands:
    """What a loop reads: the first values of what is carried, what it takes a slice of in each step, and what is the
    same in all of them."""

    carried: Sequence[Tensor]
    slices: Sequence[Tensor]
    outer: Sequence[Value]


def looped(run: Run, steps: OnnxSteps, operands: Operands, device: torch.device) -> tuple[Tensor, ...] | None:
    """The loop as one op; None where it cannot be one: carried values change their shape, or the body's shapes depend
    on the step."""
    carried, slices, outer = operands.carried, operands.slices, operands.outer
    given: list[object] = []
    places: list[list[int] | int | None] = []
    for value in outer:
        symbolic = isinstance(value, Host) and any(map(is_symbolic, value.values))
        if isinstance(value, Tensor):
            places.append(len(given))
            given.append(value)
        elif isinstance(value, Host) and symbolic:
            if not all(isinstance(n, int | torch.SymInt) for n in value.values):
                return None
            places.append(list(range(len(given), len(given) + len(value.values))))
            given += value.values
        else:
            places.append(None)

    def restored(numbers: Sequence[object]) -> list[Value]:
        found: list[Value] = []
        for value, place in zip(outer, places, strict=True):
            if isinstance(place, list) and isinstance(value, Host):
                found.append(Host(tuple(cast(int, numbers[k]) for k in place), value.shape, value.dtype))
            else:
                found.append(cast(Tensor, numbers[place]) if isinstance(place, int) else value)
        return found

    state, parts = len(carried), len(carried) + len(slices)

    def body(counter: Tensor, *given: object) -> list[Tensor]:
        goes, *results = run(counter, given[:state], given[state:parts], restored(given[parts:]))
        made = [as_tensor(r, device) for r in results]
        flag = _flag(goes, device, needed=steps.going is not None)
        return [*flag, *(cast(Tensor, r).contiguous() for r in made)]

    try:
        return loop_op(
            body, steps.most, steps.going, steps.collected, steps.backwards, carried, slices, given
        )
    except (UnsupportedError, ModelError, GuardOnDataDependentSymNode):
        return None


def _flag(goes: Value, device: torch.device, *, needed: bool) -> list[Tensor]:
    """What a body says of another step, unless there always is one."""
    if isinstance(goes, Tensor):
        return [goes.reshape(())]
    if isinstance(goes, Host) and not (isinstance(goes.item(), bool) and goes.item()):
        raise UnsupportedError("a loop that may end after its first step", phase="capture", op="Loop")
    return [torch.ones((), dtype=torch.bool, device=device)] if needed else []
