"""Loops on a GPU without Python between steps: a few steps are one CUDA graph, which is replayed as often as is needed.

A graph of all steps serves a known number of them, up to `CUDA_GRAPHS.max_full_graph_steps`; graphs of 1, 2, 4, ..
steps, up to `CUDA_GRAPHS.max_chunk_steps`, serve any other. They read slices from, and stack results in, memory of
their own, a chunk at a time, and carry values from one replay to the next there. What is the same in every step is read
where it lies if it lay there before, otherwise from a copy. Where data end the loop, steps behind its end change
nothing: their results are not taken, and the host asks once a chunk how many steps there were.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tilewright.errors import UnsupportedError
from tilewright.ir.graph import Loop
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import last_power_of_two
from tilewright.plan.data import CallStep, Plan
from tilewright.runtime.cuda.graph import copy_all, draws_numbers, refusal
from tilewright.runtime.cuda.kernels import CudaUnit
from tilewright.runtime.plan.arguments import Argument
from tilewright.tuning.input_limits import CUDA_GRAPHS

from .body import LoopBody, largest
from .step_recorder import StepRecorder

Step = Callable[[LoopBody, int, Sequence[Tensor], Sequence[Tensor | None]], list[Tensor]]
"""Runs a body in a chunk, given the number of its first step, what is carried into it, and where to write results."""

UNCHECKED = frozenset({"contraction", "convolution"})
"""Reasons of library calls that take any numbers."""


class DeviceRecorder(Protocol):
    """Writes down what a function does on a device."""

    checked: bool
    """Whether kernels that it records may find something wrong: an index out of range, a divisor of 0."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """What runs inside leaves the device's random numbers as they were."""
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What does the same again, on the same memory. Raises RuntimeError where the device cannot."""
        ...

    def ready(self, before: int) -> int | None:
        """The stream on which replays may run now; None while the caller captures. Waits for the stream `before`, which
        used their memory last (-1: none), if it is another. Raises what an earlier kernel found wrong."""
        ...


@dataclass(slots=True, eq=False)
class _Chunk:
    """So many steps as one replay, with the slices that it reads and what it stacks."""

    replay: Callable[[], None]
    counters: Tensor
    slices: list[Tensor]
    stacks: list[Tensor]
    first: int = -1
    """The step that `counters` begin with."""


@dataclass(slots=True, eq=False)
class _Sizes:
    """What is known of one set of sizes. `state` is what graphs read and leave there, `own` copies of what is the same
    in every step but `moving` between calls; `alive` and `done` say, where data end the loop, whether another step
    follows and how many there were."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    stream: int = -1
    """That used the memory of these graphs last."""
    addresses: tuple[int, ...] | None = None
    moving: set[int] = field(default_factory=set)
    captures: int = 0
    state: list[Tensor] = field(default_factory=list)
    own: dict[int, Tensor] = field(default_factory=dict)
    alive: Tensor | None = None
    done: Tensor | None = None
    chunks: dict[int, _Chunk] = field(default_factory=dict)


def recorder(unit: object, ordinal: int) -> DeviceRecorder:
    """What records steps that run the kernels of `unit` on device number `ordinal`."""
    if not isinstance(unit, CudaUnit):
        return StepRecorder(ordinal, None, checked=False)
    return StepRecorder(ordinal, unit.device, checked=any(n.checked for n in unit.needs))


def refusal_of(loop: Loop, plan: Plan, checked: bool) -> str:
    """Why steps of `loop`, whose body is `plan` with kernels that are `checked` or not, cannot be replayed; empty if
    they can.

    Where data end the loop, steps behind its end run for nothing: they must not find anything wrong."""
    why = refusal(plan)
    if why or not loop.conditional:
        return why
    if loop.backwards:
        return "it runs backwards until data end it"
    calls = (s.call for segment in plan.segments for s in segment.steps if isinstance(s, CallStep))
    if checked or any(call.reason not in UNCHECKED for call in calls):
        return "a step behind its end could find an index out of range"
    return ""


class GraphLoop:
    """The graphs of one loop. Safe to call from several threads, which take turns for the same sizes."""

    def __init__(
        self, loop: Loop, bodies: Sequence[LoopBody], recorder: DeviceRecorder, refused: str = ""
    ) -> None:
        """`bodies`: what does a single step, and perhaps what does a few at once (a power of two, as the lengths of
        graphs are). `refused`: why no graph can be made; empty if one can, as far as is known."""
        self.loop = loop
        self.bodies = tuple(bodies)
        known = None if loop.conditional or loop.steps is None else dims.static(loop.steps)
        self.full_graph_steps = (
            known if known is not None and known <= CUDA_GRAPHS.max_full_graph_steps else 0
        )
        """How many steps are one graph; 0 where graphs serve any number of steps."""
        self.recorder = recorder
        self.refused = refused
        self.draws = any(draws_numbers(body.executable.plan) for body in self.bodies)
        """Whether a step may draw random numbers."""
        self._sizes: OrderedDict[object, _Sizes] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(
        self, most: int, state: Sequence[Tensor], sliced: Sequence[Tensor], outer: Sequence[Argument]
    ) -> tuple[list[Tensor], list[Tensor], bool] | None:
        """Carried values, what was stacked, and whether another step would follow the last one, of at most `most`
        steps (just so many, unless data end the loop). None where this call must run step by step."""
        if self.refused:
            return None
        found = self._found(state, sliced, outer)
        with found.lock:
            stream = self.recorder.ready(found.stream)
            if stream is None or not self._ready(found, outer):
                return None
            found.stream = stream
            return self._run(found, most, state, sliced, outer)

    def _found(self, state: Sequence[Tensor], sliced: Sequence[Tensor], outer: Sequence[Argument]) -> _Sizes:
        key = (
            *((x.shape, x.dtype) for x in state),
            *((x.shape[1:], x.dtype) for x in sliced),
            *((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in outer),
        )
        with self._lock:
            found = self._sizes.setdefault(key, _Sizes())
            self._sizes.move_to_end(key)
            while len(self._sizes) > CUDA_GRAPHS.max_loop_sizes:
                self._sizes.popitem(last=False)
            return found

    def _ready(self, found: _Sizes, outer: Sequence[Argument]) -> bool:
        """Whether graphs may be used: from the second call on, and while what they read in place stays where it is."""
        now = tuple(x.data_ptr() if isinstance(x, Tensor) else 0 for x in outer)
        before, found.addresses = found.addresses, now
        if before is None:
            return False
        moved = {k for k, (a, b) in enumerate(zip(before, now, strict=True)) if a != b} - found.moving
        if moved:
            found.moving |= moved
            found.chunks.clear()
            found.captures += 1
        return found.captures <= CUDA_GRAPHS.max_recaptures

    def _run(
        self, found: _Sizes, most: int, state: Sequence[Tensor], sliced: Sequence[Tensor],
        outer: Sequence[Argument],
    ) -> tuple[list[Tensor], list[Tensor], bool] | None:  # fmt: skip
        with torch.no_grad():
            self._fill(found, state, outer)
            inner = [found.own.get(k, x) for k, x in enumerate(outer)]
            stacks = _Stacks(self.loop, most)
            room = CUDA_GRAPHS.max_chunk_bytes // max(1, _step_bytes(state, sliced))
            done, goes, length = 0, True, 1 if self.loop.conditional else CUDA_GRAPHS.max_chunk_steps
            while goes and done < most:
                length = last_power_of_two(min(length, most - done, room))
                if most == self.full_graph_steps <= room:
                    length = most
                chunk = self._chunk(found, length, sliced, inner, done)
                if chunk is None:
                    return None
                chunk.replay()
                made: int = length
                if found.done is not None and found.alive is not None:
                    made, goes = int(found.done) - done, bool(found.alive)
                stacks.take(chunk.stacks, done, made)
                done += made
                length = min(2 * length, CUDA_GRAPHS.max_chunk_steps) if self.loop.conditional else length
            return [x.clone() for x in found.state], stacks.joined(), goes

    def _fill(self, found: _Sizes, state: Sequence[Tensor], outer: Sequence[Argument]) -> None:
        """Put what a call brings where graphs read it."""
        if not found.state:
            found.state = [torch.empty_like(x) for x in state]
            if self.loop.conditional:
                device = _device(*state, *outer)
                found.alive = torch.ones((), dtype=torch.bool, device=device)
                found.done = torch.zeros((), dtype=torch.int64, device=device)
        if found.alive is not None and found.done is not None:
            found.alive.fill_(True)
            found.done.zero_()
        moved = {k: x for k in found.moving if isinstance(x := outer[k], Tensor)}
        for k, x in moved.items():
            found.own.setdefault(k, torch.empty_like(x))
        copy_all([*found.state, *(found.own[k] for k in moved)], [*state, *moved.values()])

    def _chunk(
        self, found: _Sizes, length: int, sliced: Sequence[Tensor], outer: Sequence[Argument], done: int
    ) -> _Chunk | None:
        """A graph of `length` steps, with the slices and counters behind the first `done` ones; None where the device
        refuses it."""
        chunk, known = found.chunks.get(length), length in found.chunks
        if chunk is None:
            counters = torch.empty(length, dtype=torch.int64, device=_device(*found.state, *sliced, *outer))
            slices = [x.new_empty((length, *x.shape[1:])) for x in sliced]
            chunk = _Chunk(lambda: None, counters, slices, [])
        if chunk.first != done:
            chunk.first = done
            torch.arange(done, done + length, out=chunk.counters)
        ends = (x.shape[0] - done if self.loop.backwards else done + length for x in sliced)
        copy_all(chunk.slices, [x[end - length : end] for x, end in zip(sliced, ends, strict=True)])
        if not known and not self._record(found, chunk, outer, length):
            return None
        return chunk

    def _record(self, found: _Sizes, chunk: _Chunk, outer: Sequence[Argument], length: int) -> bool:
        """Write down the steps of a chunk; False where the device refuses."""

        def step(
            body: LoopBody, number: int, state: Sequence[Tensor], into: Sequence[Tensor | None]
        ) -> list[Tensor]:
            slices = [[x[p] for x in chunk.slices] for p in self._places(body, number, length)]
            return body(chunk.counters[number], state, slices, outer, into)

        def run() -> None:
            self._steps(found, chunk, length, step)

        # Other threads may draw meanwhile: what draws nothing leaves the generator alone.
        with self.recorder.rehearsal() if self.draws else nullcontext():
            for body, number in dict(self._parts(length)).items():  # each body once, wherever it stands
                made = step(body, number, found.state, ())  # what is built at its first call is built here
                first = self.loop.conditional + self.loop.carried
                stacked, device = made[first : first + self.loop.stacked], chunk.counters.device
                # A number that a call leaves to the host is one of the device's in a graph.
                chunk.stacks = [x.new_empty((length, *x.shape), device=device) for x in stacked]
        try:
            chunk.replay = self.recorder.record(run)
        except (RuntimeError, UnsupportedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.refused = f"capture failed: {str(error).splitlines()[0]}"
            return False
        found.chunks[length] = chunk
        return True

    def _parts(self, length: int) -> list[tuple[LoopBody, int]]:
        """What runs so many steps, each with the number of its first step."""
        parts: list[tuple[LoopBody, int]] = []
        number = 0
        while number < length:
            body = largest(self.bodies, length - number)
            parts.append((body, number))
            number += body.steps
        return parts

    def _places(self, body: LoopBody, number: int, length: int) -> list[int]:
        """Where the slices of steps from `number` on lie in a chunk."""
        steps = range(number, number + body.steps)
        return [length - 1 - k if self.loop.backwards else k for k in steps]

    def _steps(self, found: _Sizes, chunk: _Chunk, length: int, step: Step) -> None:
        """What a graph does."""
        loop, state = self.loop, list(found.state)
        alive, done = found.alive, found.done
        first = loop.conditional + loop.carried
        owned = {x.untyped_storage().data_ptr() for x in found.state}
        for body, number in self._parts(length):
            into: list[Tensor | None] = [None] * first
            into += [stack[p] for p in self._places(body, number, length) for stack in chunk.stacks]
            ends = number + body.steps == length and alive is None
            # The last step writes the state of the next replay, unless it still reads that of this one.
            if ends and owned.isdisjoint(x.untyped_storage().data_ptr() for x in state):
                into[:first] = found.state
            made = step(body, number, state, into)
            carried = made[loop.conditional : first]
            if alive is None or done is None:
                state = carried
            else:
                state = [torch.where(alive, new, old) for new, old in zip(carried, state, strict=True)]
                done = done + alive
                alive = alive & made[0]
        state = [
            x.clone() if x is not own and x.untyped_storage().data_ptr() in owned else x
            for own, x in zip(found.state, state, strict=True)
        ]
        for own, x in zip(found.state, state, strict=True):
            if x is not own:
                own.copy_(x)
        if found.alive is not None and found.done is not None and alive is not None and done is not None:
            found.alive.copy_(alive)
            found.done.copy_(done)


class _Stacks:
    """What the steps of one call stack, chunk by chunk: copied once where it is known how many steps there are."""

    def __init__(self, loop: Loop, most: int) -> None:
        self.backwards = loop.backwards
        self.steps = None if loop.conditional else most
        self.pieces: list[list[Tensor]] = []

    def take(self, stacks: Sequence[Tensor], done: int, made: int) -> None:
        """The results of `made` steps behind `done` others."""
        if self.steps is None:
            first = stacks[0].shape[0] - made if self.backwards and stacks else 0
            self.pieces.append([x[first : first + made].clone() for x in stacks])
            return
        if not self.pieces:
            self.pieces.append([x.new_empty((self.steps, *x.shape[1:])) for x in stacks])
        first = self.steps - done - made if self.backwards else done
        copy_all([stack[first : first + made] for stack in self.pieces[0]], stacks)

    def joined(self) -> list[Tensor]:
        """All of it."""
        pieces = self.pieces[::-1] if self.backwards else self.pieces
        return [x[0] if len(x) == 1 else torch.cat(x) for x in zip(*pieces, strict=True)]


def _step_bytes(state: Sequence[Tensor], sliced: Sequence[Tensor]) -> int:
    """Bytes of a step's slices, and of what it stacks taken as large as the state."""
    return sum(x.nbytes for x in state) + sum(x.nbytes // x.shape[0] for x in sliced if x.shape[0])


def _device(*values: Argument) -> torch.device | None:
    return next((x.device for x in values if isinstance(x, Tensor)), None)
