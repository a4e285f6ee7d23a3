"""The executable on a GPU. Kernels and library calls go to the current stream of the plan's device, and a call returns
before they have ended.

Memory between kernels is kept per stream: what one call on a stream has used, the next call on that stream may use
again, as it runs later; calls on other streams and calls that are captured into a graph of the caller's get their own
from torch's allocator. Results always come from torch's allocator.
"""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tilewright.errors import OutOfMemory
from tilewright.ir.sizes.host import Number
from tilewright.plan.data import Binding, Plan
from tilewright.runtime.plan.arguments import Argument, check_surroundings
from tilewright.runtime.plan.bound import BuiltPlan, Workspace
from tilewright.runtime.plan.executable import CHECKED, TRUSTED, Executable, Guards
from tilewright.runtime.plan.known_sizes import Bound, Result, Shortest
from tilewright.runtime.plan.launch import BuiltUnit, raise_error
from tilewright.runtime.plan.verified import Checks
from tilewright.tuning.input_limits import KEPT_MEMORY

from .driver import Device, capturing_on, current_stream, opened
from .graph import Graphs


class DeviceOutOfMemory(OutOfMemory, torch.OutOfMemoryError):
    """The same, and what torch raises where its allocator has nothing left."""


class CudaBound(Bound):
    """As `Bound`, with workspaces per stream."""

    keep_bytes = KEPT_MEMORY.max_gpu_workspace_bytes

    def __init__(
        self, built: BuiltPlan, sizes: dict[str, Number], ordinal: int, before: Bound | None = None
    ) -> None:
        self.ordinal = ordinal
        self.capturing = capturing_on(ordinal)
        self.by_stream: dict[int, list[Workspace]] = {}
        super().__init__(built, sizes, before=before)
        _BOUNDS.add(self)

    @property
    def needed(self) -> int:
        """Bytes of results and intermediates, as far as their sizes are known before the call."""
        part = self.first
        return part.arena_bytes + sum(part.layouts.bytes_of(self.plan, b) for b in part.made)

    def pool(self) -> list[Workspace]:
        """Those whose memory nothing uses that the current stream does not wait for; none is kept of what runs while
        the caller captures."""
        if self.capturing():
            return []
        stream = current_stream(self.ordinal)
        arenas = self.by_stream.get(stream)
        if arenas is None:
            if len(self.by_stream) >= KEPT_MEMORY.max_streams:
                self.by_stream.clear()
            arenas = self.by_stream.setdefault(stream, [])
        return arenas

    def shared(self) -> None:
        """Each call asks for the pool of its stream."""

    def retain(self, keep: bool) -> None:
        """Whether to keep workspaces from now on."""
        super().retain(keep)
        if not keep:
            self.by_stream.clear()


class CudaExecutable(Executable):
    """Runs a plan on a GPU. With `graphs`, calls of a size that was seen before replay a CUDA graph where one can be
    captured (`graphs.report` says whether)."""

    def __init__(
        self,
        plan: Plan,
        constants: Sequence[Tensor] = (),
        unit: BuiltUnit | None = None,
        *,
        guards: Guards = CHECKED,
        graphs: Graphs | None = None,
        checks: Checks | None = None,
    ) -> None:
        self.ordinal = torch.device(plan.device).index or 0
        self._capturing = capturing_on(self.ordinal)
        if checks is not None:  # what is looked at is copied to the host, which nothing does that is captured
            checks = replace(checks, blind=self._capturing)
        super().__init__(plan, constants, unit, guards=guards, checks=checks)
        self.graphs = graphs
        self._plain = graphs is None and not plan.host

    def bound(self, sizes: dict[str, Number]) -> Bound:
        """The plan for exact sizes."""
        return CudaBound(self.built, sizes, self.ordinal, self._recent)

    def rebound(self, bindings: Sequence[Binding]) -> Executable:
        """The same for callers that are trusted, with sizes found in another way."""
        plan = replace(self.plan, bindings=tuple(bindings))
        return CudaExecutable(
            plan, self.constants, self.unit, guards=TRUSTED, graphs=self.graphs, checks=self.checks
        )

    def entry(self) -> Callable[[list[Argument]], list[Result]]:
        """Itself."""
        return self

    def shortest(self, args: Sequence[Argument]) -> Shortest | None:
        """The replay for the sizes of `args`, where that is one native call; None while there may be one later."""
        if self.graphs is None or self.graphs.refused:
            return Shortest(self)
        bound = self._bind(args)
        return (self.graphs.quick(bound) or Shortest(self)) if self.graphs.has(bound) else None

    def __call__(self, args: list[Argument], out: Sequence[Tensor | None] | None = None) -> list[Result]:
        """Run on `args`. Raises OutOfMemory after memory that we and torch keep was given back; what a kernel found
        wrong in an earlier call is raised here."""
        try:
            if self._plain:
                return super().__call__(args, out)
            return self._call(args, out)
        except torch.OutOfMemoryError as error:
            said = _first_line(error)
        if args:  # nothing has run yet
            release()
            try:
                return self._call(args, out)
            except torch.OutOfMemoryError as error:
                said = _first_line(error)
        bound = self._recent
        needed = bound.needed if isinstance(bound, CudaBound) else 0
        args.clear()
        raise DeviceOutOfMemory(self.plan.device, needed, free_bytes(self.ordinal), said)

    def _call(self, args: list[Argument], out: Sequence[Tensor | None] | None) -> list[Result]:
        if self.graphs is not None and out is None and not self._capturing():
            check_surroundings(args)
            bound = self._bind(args)
            replayed = self.graphs.run(self, bound, args)
            if replayed is not None:
                return replayed
        return self.run_plainly(args, out)

    def run_plainly(self, args: list[Argument], out: Sequence[Tensor | None] | None = None) -> list[Result]:
        """Run without a graph."""
        for k in self.plan.host:
            t = args[k]
            if (
                isinstance(t, Tensor) and t.is_cpu
            ):  # of no dims; a copy from the host could not be captured, a fill can
                args[k] = torch.full((), t.item(), dtype=t.dtype, device=self.plan.device)
        return super().__call__(args, out)


def _first_line(error: BaseException) -> str:
    return str(error).split(". ")[0].split("\n")[0]


def free_bytes(ordinal: int) -> int:
    """Bytes that torch could still hand out on a device: the driver's, and those it keeps unused."""
    free, _ = torch.cuda.mem_get_info(ordinal)
    return free + torch.cuda.memory_reserved(ordinal) - torch.cuda.memory_allocated(ordinal)


_BOUNDS: weakref.WeakSet[CudaBound] = weakref.WeakSet()
"""Those that may keep workspaces."""


def release() -> None:
    """Give back all memory that is kept between calls, ours and torch's."""
    for bound in list(_BOUNDS):
        bound.by_stream.clear()
    gc.collect()
    torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for all GPUs that compiled graphs have used. Raises what their kernels found wrong, such as
    IndexOutOfRange."""
    codes = [_waited(device) for device in opened()]
    for code in codes:
        if code:
            raise_error(code)


def _waited(device: Device) -> int:
    torch.cuda.synchronize(device.ordinal)
    return device.failed()
