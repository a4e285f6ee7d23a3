"""CUDA graphs of a plan: one for each set of exact sizes, with memory of its own and a lock.

An input that lies at the same address in two calls (a weight, as a rule) is read where it is; others are copied in.
Results are copied out. A plan that cannot be captured runs without, and `Graphs.report` says why.

What a forward pass saves for its backward pass stays in the graph's memory and is only lent: then the backward pass
finds it at the same place in each step. While any of it is still in use (two forward passes before the first backward
pass, say), a call runs without the graph.
"""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import threading
import weakref
from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilewright.capture.autograd.rng import has_no_chance, may_draw
from tilewright.errors import UnsupportedError
from tilewright.ir.graph import LibraryCall
from tilewright.plan.data import CallStep, Home, Plan
from tilewright.runtime.plan.arguments import Argument, told_of_writes
from tilewright.runtime.plan.known_sizes import Bound, Quick, Result, Shortest
from tilewright.runtime.plan.launch import raise_error
from tilewright.runtime.plan.tensors import maker_on
from tilewright.tuning.input_limits import CUDA_GRAPHS

from .driver import Device, current_stream
from .replay.exits import Exit, Lent, exits_of, leave, lent_by
from .replay.native import Fixed, Shared, native_replay, ports_of

UNCAPTURED = frozenset({"random", "data-dependent shape", "control flow", "linear algebra"})
"""Reasons of library calls that a graph cannot replay: new numbers, sizes on the host, waiting for the device."""


_copy: Callable[[list[Tensor], list[Tensor]], None] = getattr(torch, "_foreach_copy_")  # noqa: B009 (torch hides it)


class Plain(Protocol):
    """Runs without a graph."""

    plan: Plan

    def run_plainly(self, args: list[Argument], out: Sequence[Tensor] | None = None) -> list[Result]:
        """The results; the list of arguments is emptied."""
        ...


def refusal(plan: Plan) -> str:
    """Why `plan` cannot be captured; empty if it can, as far as it shows."""
    if len(plan.segments) > 1:
        return "sizes depend on data"
    steps = [s for segment in plan.segments for s in segment.steps]
    for s in steps:
        if (
            isinstance(s, CallStep)
            and s.call.reason in UNCAPTURED
            and not (s.call.reason == "random" and _is_seeded(s.call))
        ):
            why = getattr(s.call.function, "uncaptured", s.call.reason)
            if why:
                return f"{s.call.name} ({why})"
            continue
        if isinstance(s, CallStep) and s.call.is_collective:
            return f"{s.call.name} (other processes take part)"
        if isinstance(s, CallStep) and not s.call.pure and not _is_seeded(s.call):
            return f"{s.call.name} (has effects)"
    if any(b.home is Home.NUMBER for b in plan.buffers):
        return "a number is read back from the device"
    return ""


def draws_numbers(plan: Plan) -> bool:
    """Whether a call may draw random numbers from torch's generator (dropout, attention with it, a loop of such steps).
    torch then counts them at each replay."""
    calls = [s.call for segment in plan.segments for s in segment.steps if isinstance(s, CallStep)]
    return any(_is_seeded(c) and not has_no_chance(c.function, c.args, dict(c.kwargs)) for c in calls)


def _is_seeded(call: LibraryCall) -> bool:
    return may_draw(call.function) or getattr(call.function, "draws", False)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in as few calls as torch can."""
    if len(targets) == 1:
        targets[0].copy_(sources[0], non_blocking=True)
    elif targets:
        _copy(list(targets), list(sources))


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """A graph with what it reads and writes: own tensors for inputs that move, those that do not, what is copied out,
    how results leave."""

    graph: torch.cuda.CUDAGraph
    instance: int
    moving: tuple[int, ...]
    held: tuple[Tensor, ...]
    fixed: Fixed
    copied: list[Tensor]
    exits: list[Exit]
    lent: tuple[Lent, ...] = ()
    quick: Quick | None = None
    """Does all of a replay as one native call, where it only copies whole tensors in and out."""


class _Sizes:
    """What is known of one set of sizes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.addresses: tuple[int, ...] | None = None
        self.moved: set[int] = set()
        self.captured: _Captured | None = None
        self.captures = 0
        self.calls = 0
        self.misses = 0
        self.shared = Shared(self.lock, array("q", [-1]))


class Graphs:
    """The CUDA graphs of one plan."""

    def __init__(self, plan: Plan, device: Device | None, saves: int | None = None) -> None:
        """`device` may be None for a plan without kernels. `saves` is the number of the first result that is saved for
        a backward pass, if this is a forward pass."""
        self._lends = range(0) if saves is None else range(saves, len(plan.outputs))
        self._trains = any(segment.makes for segment in plan.segments)
        self.refused = refusal(plan)
        self._device = device
        self._seeded = draws_numbers(plan)
        self._make = maker_on(plan.device)
        self._written = told_of_writes(plan)
        self._ordinal = torch.device(plan.device).index or 0
        self._sizes: weakref.WeakKeyDictionary[Bound, _Sizes] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None

    @property
    def report(self) -> str:
        """One line: how many sizes replay a graph, or why none does."""
        if self.refused:
            return f"no CUDA graph: {self.refused}"
        count = sum(s.captured is not None for s in list(self._sizes.values()))
        return f"CUDA graphs for {count} sets of sizes" if count else "no CUDA graph yet"

    def run(self, plain: Plain, bound: Bound, args: list[Argument]) -> list[Result] | None:
        """The results of a replay; None where the call must run without (`args` is then untouched)."""
        if self.refused:
            return None
        state = self._sizes.get(bound)
        if state is None:
            with self._lock:
                if len(self._sizes) >= CUDA_GRAPHS.max_plan_sizes:
                    return None
                state = self._sizes.setdefault(bound, _Sizes())
        found = state.captured
        made = found.quick(args) if found is not None and found.quick is not None else None
        if made is not None:
            state.misses = 0
            return made
        with state.lock:
            if not self._found(plain, state, args):
                return None
            assert state.captured is not None
            return self._replay(state, state.captured, args, plain.plan)

    def has(self, bound: Bound) -> bool:
        """Whether there is a graph of these sizes."""
        state = self._sizes.get(bound)
        return state is not None and state.captured is not None

    def quick(self, bound: Bound) -> Shortest | None:
        """What replays the graph of these sizes as one native call; None where nothing does."""
        state = self._sizes.get(bound)
        found = None if state is None else state.captured
        return None if found is None or found.quick is None else Shortest(found.quick, found.fixed.looked_at)

    def _found(self, plain: Plain, state: _Sizes, args: list[Argument]) -> bool:
        """Whether there is a graph for these arguments whose memory nobody uses; captured now if it is time for it."""
        found = state.captured
        if found is not None and found.fixed.stand(args):
            state.misses = 0
            return not any(lent.in_use() for lent in found.lent)
        if found is not None and self._trains:
            state.misses += 1
            if state.misses < CUDA_GRAPHS.max_training_misses:
                return False
            state.captured = state.addresses = None
        if not self._ready(state, args, plain.plan.host) or state.captures >= CUDA_GRAPHS.max_recaptures:
            return False
        self._capture(plain, state, args)
        return state.captured is not None

    def _ready(self, state: _Sizes, args: Sequence[Argument], hosts: Sequence[int]) -> bool:
        """Whether these sizes have been seen before; notes which inputs have moved since. What a backward pass gets
        lies elsewhere once the forward pass has its graph: of passes of training, the last two calls count."""
        if any(isinstance(a, Tensor) and not a.is_cuda and k not in hosts for k, a in enumerate(args)):
            return False  # a call put it into the host's memory, and another one looks for it there
        now = tuple(a.data_ptr() if isinstance(a, Tensor) and a.is_cuda else -1 for a in args)
        before, state.addresses = state.addresses, now
        if before is None:
            return False
        moved = {k for k, (a, b) in enumerate(zip(before, now, strict=True)) if a != b or b < 0}
        state.calls += 1
        if not self._trains:
            state.moved |= moved
            return True
        state.moved = moved
        return bool(self._lends) or state.calls > 1

    def _capture(self, plain: Plain, state: _Sizes, args: Sequence[Argument]) -> None:
        """Write down one run; where torch or the driver refuse, note why."""
        plan = plain.plan
        state.captured = None
        state.captures += 1
        inner: list[Argument] = list(args)
        tensors = {k: a for k, a in enumerate(args) if isinstance(a, Tensor)}
        moving = tuple(k for k in tensors if k in state.moved)
        with torch.cuda.device(plan.device):
            for k in moving:
                t = tensors[k]
                own = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=plan.device)
                own.copy_(t)
                inner[k] = own
            held = tuple(t for k in moving if isinstance(t := inner[k], Tensor))
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            try:
                try:
                    graph, exits, copied = self._written_down(plain, inner, self._stream)
                except torch.OutOfMemoryError:  # what torch kept for later calls has been given back by now
                    graph, exits, copied = self._written_down(plain, inner, self._stream)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, UnsupportedError) as error:
                self.refused = f"capture failed: {str(error).splitlines()[0]}"
                return
        fixed = Fixed({k: t for k, t in tensors.items() if k not in moving})
        instance = graph.raw_cuda_graph_exec()
        ports = ports_of(plan, moving, held, copied, exits)
        quick = None
        if ports is not None and self._device is not None and not self._seeded:
            rest = self._make, self._written
            quick = native_replay(self._device, graph, ports, fixed, state.shared, rest)
        state.captured = _Captured(graph, instance, moving, held, fixed, copied, exits, lent_by(exits), quick)

    def _written_down(
        self, plain: Plain, inner: Sequence[Argument], stream: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, list[Exit], list[Tensor]]:
        """One run as a graph, how results leave it, and which are copied. Raises what the run or the driver raises."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with _capturing(graph, stream):
                results = plain.run_plainly(list(inner))
            return graph, *exits_of(results, inner, self._lends)
        except (RuntimeError, UnsupportedError):
            recover(before)
            raise

    def _replay(self, state: _Sizes, found: _Captured, args: list[Argument], plan: Plan) -> list[Result]:
        code = self._device.failed() if self._device is not None else 0
        if code:
            raise_error(code)
        stream, last = current_stream(self._ordinal), state.shared.stream
        if stream != last[0]:
            if last[0] >= 0:
                torch.cuda.synchronize(plan.device)  # what it made may still be read on the other one
            last[0] = stream
        given = [t for k in found.moving if isinstance(t := args[k], Tensor)]

        def results() -> list[Tensor]:
            return [self._make(tuple(t.shape), t.stride(), t.dtype) for t in found.copied]

        with torch.no_grad():
            # What writes into its inputs may run once only: a call for whose results there was no memory is made again.
            made = None if self._written is None else results()
            copy_all(found.held, given)
            if self._device is not None and not self._seeded:
                self._device.replay(found.instance, stream)
            else:
                with torch.cuda.device(plan.device):
                    found.graph.replay()
            if self._written is not None:
                self._written(args)
            for k, t, own in zip(found.moving, given, found.held, strict=True):
                if k in plan.written:
                    t.copy_(own)
            made = results() if made is None else made
            copy_all(made, found.copied)
            left = [leave(e, args, made) for e in found.exits]
        args.clear()
        return left


@contextlib.contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Generator[None]:
    """What runs inside is written down. `torch.cuda.graph` would give all memory that torch keeps back to the driver
    first, and the next calls of other sizes would wait to get it again."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


def recover(stream: torch.cuda.Stream) -> None:
    """After a capture that broke off: torch then stays on the capture's stream, and its generator goes on counting for
    the graph until a capture ends well. That one gives memory back which torch keeps."""
    torch.cuda.set_stream(stream)
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=stream.device)
    torch.cuda.set_stream(stream)
