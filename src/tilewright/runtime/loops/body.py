"""What runs a step of a loop, or a few at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.executable import Executable


@dataclass(frozen=True, slots=True, eq=False)
class LoopBody:
    """So many `steps` as one run of an executable, whose result number `order[k]` is result k: a bool that says whether
    another step follows (where data end the loop), the carried values, then what each step stacks."""

    order: tuple[int, ...]
    executable: Executable
    steps: int = 1

    def __call__(
        self, counter: Tensor, state: Sequence[Tensor], slices: Sequence[Sequence[Tensor]], outer: Sequence[Argument],
        into: Sequence[Tensor | None] = (),
    ) -> list[Tensor]:  # fmt: skip
        """The results, where `counter` and `state` are those of the first step and `slices` those of each. Result k is
        written to `into[k]` where that is a tensor, which must lie apart from all operands."""
        args: list[Argument] = [counter, *state, *(x for parts in slices for x in parts), *outer]
        if not into:
            made = self.executable(args)
            return [cast(Tensor, made[k]) for k in self.order]  # a loop gives nothing else
        wanted: dict[int, Tensor] = {}
        for k, x in zip(self.order, into, strict=False):
            if x is not None:
                wanted.setdefault(k, x)
        count = len(self.executable.plan.outputs)
        made = self.executable(args, [wanted.get(k) for k in range(count)] if wanted else None)
        results = [cast(Tensor, made[k]) for k in self.order]
        for k, x in enumerate(into):
            if x is not None and x is not results[k]:
                x.copy_(results[k])
                results[k] = x
        return results


def largest(bodies: Sequence[LoopBody], steps: int) -> LoopBody:
    """Of bodies for more and more steps, the first of which does one, that for the most of at most so many."""
    return next(b for b in reversed(bodies) if b.steps <= steps)
