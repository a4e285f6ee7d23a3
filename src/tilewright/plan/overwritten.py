"""The law of writes in place, checked in a plan: kernels that store into memory which they load from keep the order of
loads and stores, whoever decided that they store there. (That nothing else reads what is gone is the law of memory.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis.writes.order import check_order
from tilewright.ir.expr import Expr
from tilewright.ir.program import TileProgram
from tilewright.ir.sizes import dims

from .data import Launch, Launches, Plan


def check_overwritten(plan: Plan, programs: Callable[[int], Sequence[TileProgram]]) -> None:
    """Raise VerifyError unless each kernel loads every element of a memory before it stores over it. `programs` gives
    those of a kernel by its number."""
    seen: set[tuple[int, tuple[int, int], Expr]] = set()
    for segment in plan.segments:
        for step in segment.steps:
            for launch in step.launches if isinstance(step, Launches) else ():
                for loaded, stored in _pairs(plan, launch):
                    shift = dims.sub(_place(plan, launch.params[stored]), _place(plan, launch.params[loaded]))
                    if (launch.kernel, (loaded, stored), shift) in seen:
                        continue
                    seen.add((launch.kernel, (loaded, stored), shift))
                    for program in programs(launch.kernel):
                        check_order(program, program.params[loaded].name, program.params[stored].name, shift)


def _pairs(plan: Plan, launch: Launch) -> list[tuple[int, int]]:
    """Parameters, by number, one loaded and one stored, in one memory."""
    roots = [_root(plan, b) for b in launch.params]
    first = len(roots) - launch.stores
    return [(k, n) for n in range(first, len(roots)) for k in range(first) if roots[k] == roots[n]]


def _root(plan: Plan, b: int) -> int:
    while plan.buffers[b].source >= 0:
        b = plan.buffers[b].source
    return b


def _place(plan: Plan, b: int) -> Expr:
    """Elements from the start of the memory to that of a buffer."""
    place = dims.ZERO
    while b >= 0:
        place, b = dims.add(place, plan.buffers[b].offset), plan.buffers[b].source
    return place
