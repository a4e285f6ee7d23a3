"""Loops whose body is a plan of its own: what their calls run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewright.errors import UnsupportedError, WrongResult
from tilewright.ir.graph import Loop, Value
from tilewright.ir.sizes.host import size
from tilewright.runtime.cuda.graph import draws_numbers
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.known_sizes import Bound
from tilewright.runtime.plan.tensors import torch_dtype
from tilewright.tuning.input_limits import LOOP_LIMITS

from .body import LoopBody, largest
from .cuda_graph import DeviceRecorder, GraphLoop, refusal_of
from .native import NativeLoop, native_places
from .rows import RowLoop, RowParts


class LoopRunner:
    """What the call of `loop` runs. Safe to call from several threads.

    `bodies`: what does a single step, and perhaps what does a few at once. `native` runs bodies that need no Python;
    `recorder` writes down steps on a GPU that are then replayed. `meaning` is the same loop in plain torch, if that is
    held against it; then each step is looked at, too. `rows` is the same on a part of the rows: how many parts there
    are, the rows of one, and what runs it."""

    def __init__(
        self,
        loop: Loop,
        bodies: Sequence[LoopBody],
        native: Callable[..., int] | None = None,
        recorder: DeviceRecorder | None = None,
        meaning: Callable[..., object] | None = None,
        rows: tuple[int, int, LoopRunner] | None = None,
    ) -> None:
        self.loop = loop
        self.bodies = tuple(bodies)
        single = self.bodies[0]
        self.executable = single.executable
        self.native = native
        self.meaning = meaning
        self.rows = rows
        self.places = None if native is None else native_places(loop, single.order, self.executable.plan)
        self.graphs = None
        if recorder is not None:
            refused = [refusal_of(loop, b.executable.plan, recorder.checked) for b in self.bodies]
            bodies = [b for b, why in zip(self.bodies, refused, strict=True) if not why]
            self.graphs = GraphLoop(loop, bodies, recorder, refused[0])
        made = [v for v in loop.body.outputs if isinstance(v, Value)]
        self._parts = made[loop.conditional + loop.carried :]
        self._lock = threading.Lock()
        self._free: tuple[Bound | None, object, list[NativeLoop | RowLoop]] = (None, None, [])
        """The sizes seen last, the shapes that they come from, and native loops for them that nobody runs."""

    def __call__(
        self, steps: int | None, going: Tensor | None, carried: Sequence[Tensor], sliced: Sequence[Tensor],
        outer: Sequence[Tensor], numbers: Sequence[int],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The last carried values, then what was stacked. Raises UnsupportedError where the loop has no end."""
        state, rest = ([x.contiguous() for x in group] for group in (carried, outer))
        parts = list(sliced) if self.graphs is not None else [x.contiguous() for x in sliced]
        most = 0 if going is not None and not bool(going) else steps
        if most is not None and most <= 0:
            return (*(x.clone() for x in state), *self._nothing(state, parts, (*rest, *numbers)))
        checks = self.executable.checks
        looked = checks if checks is not None and checks.values else None
        stepwise = None if looked is None else self._stepwise(most, state, parts, (*rest, *numbers))
        runs = None if self.places is None else self._taken(state, parts, (*rest, *numbers))
        if runs is None:
            return stepwise or self._without_native(most, state, parts, (*rest, *numbers))
        made = self._natively(runs, most, state, parts, rest)
        if looked is not None and stepwise is not None:
            for k, (ours, wanted) in enumerate(zip(made, stepwise, strict=True)):
                what = f"result {k} of a loop without Python between its steps"
                looked.check(ours, wanted, wanted, what, "loop", "")
        return made

    def _natively(
        self, runs: NativeLoop | RowLoop, most: int | None, state: Sequence[Tensor], parts: Sequence[Tensor],
        rest: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Without Python between steps."""
        ends, stacks, done = runs(most, LOOP_LIMITS.max_steps if most is None else most, state, parts, rest)
        if most is None and done >= LOOP_LIMITS.max_steps and bool(runs.goes):
            raise _endless()
        with self._lock:
            if self._free[0] is runs.bound:
                self._free[2].append(runs)
        return _apart((*ends, *stacks))

    def _taken(
        self, state: Sequence[Tensor], sliced: Sequence[Tensor], rest: Sequence[Argument]
    ) -> NativeLoop | RowLoop | None:
        """A native loop for these sizes that nobody else runs; None where they make one impossible."""
        key = (
            [x.shape for x in state],
            [x.shape[1:] for x in sliced],
            [x.shape if isinstance(x, Tensor) else x for x in rest],
        )
        with self._lock:
            if self._free[1] == key and self._free[2]:
                return self._free[2].pop()
        assert self.places is not None and self.native is not None
        bound = self.executable.bound_for(self._sample(state, sliced, rest))
        with self._lock:
            if self._free[0] is not bound:
                self._free = (bound, key, [])
        try:
            undivided = NativeLoop(self.loop, self.places, bound, self.native)
        except LookupError:
            self.places = None
            return None
        parts = self.row_parts(undivided, state, sliced, rest)
        return undivided if parts is None else RowLoop(parts, self.native)

    @property
    def draws(self) -> bool:
        """Whether its steps may draw random numbers from torch's generator."""
        return draws_numbers(self.executable.plan)

    @property
    def uncaptured(self) -> str:
        """Why a graph of a whole plan cannot hold this loop; empty if it can."""
        if self.loop.conditional or self.loop.gated:
            return "data end it"
        return "no device" if self.graphs is None else self.graphs.refused

    def _without_native(
        self, steps: int | None, state: list[Tensor], sliced: Sequence[Tensor], rest: Sequence[Argument]
    ) -> tuple[Tensor, ...]:
        """On a GPU some steps at a time as a graph; where that cannot be, step by step."""
        made = (
            None
            if self.graphs is None
            else self.graphs(LOOP_LIMITS.max_steps if steps is None else steps, state, sliced, rest)
        )
        if made is None:
            return self._stepwise(steps, state, sliced, rest)
        carried, stacks, goes = made
        if steps is None and goes:
            raise _endless()
        return _apart((*carried, *stacks))

    def made_for(
        self, state: Sequence[Tensor], sliced: Sequence[Tensor], rest: Sequence[Argument]
    ) -> NativeLoop:
        """A native loop for operands like these that is the caller's own. Raises LookupError where there is none."""
        if self.places is None or self.native is None:
            raise LookupError
        bound = self.executable.bound_for(self._sample(state, sliced, rest))
        return NativeLoop(self.loop, self.places, bound, self.native)

    def row_parts(
        self,
        undivided: NativeLoop,
        state: Sequence[Tensor],
        sliced: Sequence[Tensor],
        rest: Sequence[Argument],
    ) -> RowParts | None:
        """The `undivided` loop with the same on parts of the rows beside it; None where there is no such thing."""
        if self.rows is None:
            return None
        count, each, runner = self.rows
        heads = [x[:each] for x in state], [x[:, :each] for x in sliced]
        try:
            return RowParts(undivided, [runner.made_for(*heads, rest) for _ in range(count)])
        except LookupError:
            self.rows = None
            return None

    def _stepwise(
        self, steps: int | None, state: list[Tensor], sliced: Sequence[Tensor], rest: Sequence[Argument]
    ) -> tuple[Tensor, ...]:
        """Step by step from Python: a body may hold any call."""
        loop = self.loop
        first = len(state) + loop.conditional
        device = _device(state, sliced, rest)
        stacks = self._rooms(LOOP_LIMITS.first_step_room if steps is None else steps, state, sliced, rest)
        done, goes = 0, True
        while goes and (steps is None or done < steps):
            if done >= LOOP_LIMITS.max_steps and steps is None:
                raise _endless()
            if stacks and done == stacks[0].shape[0]:
                stacks = [torch.cat((x, torch.empty_like(x))) for x in stacks]
            body = self.bodies[0] if steps is None else largest(self.bodies, steps - done)
            places = range(done, done + body.steps)
            if loop.backwards and steps is not None:
                places = [steps - 1 - k for k in places]
            counter = torch.full((), done, device=device)  # a copy from the host could not be captured
            slots = [stack[p] for p in places for stack in stacks]
            # On a CPU the plan's short way, which takes no places, and a copy cost half as much.
            into = [] if self.graphs is None else [*[None] * first, *slots]
            try:
                tensors = body(counter, state, [[x[p] for x in sliced] for p in places], rest, into)
            except WrongResult as error:
                error.message = f"in step {done} of a loop, {error.message}"
                raise
            for slot, part in zip(slots, tensors[first:], strict=True):
                if part is not slot:
                    slot.copy_(part)
            goes = not loop.conditional or bool(tensors[0])
            state = tensors[loop.conditional : first]
            done += body.steps
        shared = {x.untyped_storage().data_ptr() for x in stacks}
        state = [x.clone() if x.untyped_storage().data_ptr() in shared else x for x in state]
        return _apart((*state, *(x if x.shape[0] == done else x[:done].clone() for x in stacks)))

    def _sample(
        self, state: Sequence[Tensor], sliced: Sequence[Tensor], rest: Sequence[Argument]
    ) -> list[Argument]:
        """What one step gets, with any elements."""
        counter = torch.zeros((), dtype=torch.int64, device=_device(state, sliced, rest))
        return [counter, *state, *(x[0] if x.shape[0] else x.new_empty(x.shape[1:]) for x in sliced), *rest]

    def _nothing(
        self, state: Sequence[Tensor], sliced: Sequence[Tensor], rest: Sequence[Argument]
    ) -> list[Tensor]:
        """The stacks of no steps."""
        return self._rooms(0, state, sliced, rest)

    def _rooms(
        self, steps: int, state: Sequence[Tensor], sliced: Sequence[Tensor], rest: Sequence[Argument]
    ) -> list[Tensor]:
        """Memory for what so many steps stack. Where there are none, the body need not accept the sizes."""
        sizes = self.executable.sizes_of(self._sample(state, sliced, rest))
        device = _device(state, sliced, rest)
        return [
            torch.empty(
                (steps, *(size(n, sizes) for n in v.shape)), dtype=torch_dtype(v.dtype), device=device
            )
            for v in self._parts
        ]


def _apart(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results, each with memory of its own: a body may return one value at several places."""
    if len(set(map(id, results))) == len(results):
        return results
    seen: set[int] = set()
    out: list[Tensor] = []
    for x in results:
        out.append(x.clone() if id(x) in seen else x)
        seen.add(id(x))
    return tuple(out)


def _device(*groups: Sequence[Argument]) -> torch.device | None:
    return next((x.device for group in groups for x in group if isinstance(x, Tensor)), None)


def _endless() -> UnsupportedError:
    return UnsupportedError(
        f"a loop does not end within {LOOP_LIMITS.max_steps} steps", phase="run", op="loop"
    )
