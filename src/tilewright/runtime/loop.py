"""Loops whose body is a plan of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.errors import UnsupportedError
from tilewright.ir.graph import Loop, Value
from tilewright.ir.host import size
from tilewright.runtime.executable import Argument, Executable
from tilewright.runtime.tensors import torch_dtype

MAX_STEPS = 1_000_000
"""A loop without a trip count that goes on beyond this is taken for one without end."""
FIRST = 16
"""Steps for which there is room at first where their number is not known; it doubles."""


class LoopRunner:
    """What the call of `loop` runs: its body, as `executable`, once a step. Safe to call from several threads."""

    def __init__(self, loop: Loop, executable: Executable) -> None:
        self.loop = loop
        self.executable = executable
        made = [v for v in loop.body.outputs if isinstance(v, Value)]
        self._parts = made[loop.conditional + loop.carried :]

    def __call__(
        self, steps: int | None, going: Tensor | None, carried: Sequence[Tensor], sliced: Sequence[Tensor],
        outer: Sequence[Tensor], numbers: Sequence[int],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The last carried values, then what was stacked. Raises UnsupportedError where the loop has no end."""
        state, parts, rest = ([x.contiguous() for x in group] for group in (carried, sliced, outer))
        most = 0 if going is not None and not bool(going) else steps
        if most is not None and most <= 0:
            return (*(x.clone() for x in state), *self._nothing(state, parts, (*rest, *numbers)))
        return self._stepwise(most, state, parts, (*rest, *numbers))

    def _stepwise(
        self, steps: int | None, state: list[Tensor], sliced: Sequence[Tensor], rest: Sequence[Argument]
    ) -> tuple[Tensor, ...]:
        """Step by step from Python: a body may hold any call."""
        loop = self.loop
        first = len(state) + loop.conditional
        device = next((x.device for x in (*state, *sliced, *rest) if isinstance(x, Tensor)), None)
        stacks: list[Tensor] = []
        done, goes = 0, True
        while goes and (steps is None or done < steps):
            if done >= MAX_STEPS and steps is None:
                raise UnsupportedError(
                    f"a loop does not end within {MAX_STEPS} steps", phase="run", op="loop"
                )
            place = steps - 1 - done if loop.backwards and steps is not None else done
            counter = torch.tensor(done, device=device)
            made = self.executable([counter, *state, *(x[place] for x in sliced), *rest])
            tensors = [x for x in made if isinstance(x, Tensor)]
            if not done:
                room = FIRST if steps is None else steps
                stacks = [x.new_empty((room, *x.shape)) for x in tensors[first:]]
            elif stacks and done == len(stacks[0]):
                stacks = [torch.cat((x, torch.empty_like(x))) for x in stacks]
            for stack, part in zip(stacks, tensors[first:], strict=True):
                stack[place].copy_(part)
            goes = not loop.conditional or bool(tensors[0])
            state = tensors[loop.conditional : first]
            done += 1
        return (*state, *(x if len(x) == done else x[:done].clone() for x in stacks))

    def _nothing(
        self, state: Sequence[Tensor], sliced: Sequence[Tensor], rest: Sequence[Argument]
    ) -> list[Tensor]:
        """The stacks of no steps."""
        counter = torch.tensor(0)
        shaped = [x.new_empty(x.shape[1:]) for x in sliced]
        sizes = self.executable.sizes_of([counter, *state, *shaped, *rest])
        device = next((x.device for x in (*state, *sliced, *rest) if isinstance(x, Tensor)), None)
        return [
            torch.empty((0, *(size(n, sizes) for n in v.shape)), dtype=torch_dtype(v.dtype), device=device)
            for v in self._parts
        ]
