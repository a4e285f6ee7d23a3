"""What a report reads of something compiled: kernels, calls and phases of each graph, as far as it looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from tilewright.target import Target


class Phase(Protocol):
    """One phase of a trace."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def result(self) -> object: ...


class WorkRecord(Protocol):
    """One kernel or call: bytes, operations and modelled seconds at the sizes that its graph was traced with."""

    @property
    def name(self) -> str: ...
    @property
    def ops(self) -> Sequence[str]: ...
    @property
    def bytes_moved(self) -> int | None: ...
    @property
    def flops(self) -> int | None: ...
    @property
    def exps(self) -> int | None: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def reason(self) -> str: ...


class Named(Protocol):
    """One of a closed list, with its words."""

    @property
    def value(self) -> str: ...


class KernelRecord(WorkRecord, Protocol):
    """One generated kernel, and why it ends where it does."""

    @property
    def bytes_lower_bound(self) -> int | None: ...
    @property
    def schedule(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def boundary(self) -> Named: ...


class CallRecord(WorkRecord, Protocol):
    """One call that no kernel was generated for: whose code it is, why, and what it makes."""

    @property
    def how(self) -> str: ...
    @property
    def results(self) -> Sequence[str]: ...
    @property
    def refused(self) -> Sequence[str]: ...


class Trace(Protocol):
    """What a compilation did."""

    @property
    def phases(self) -> Sequence[Phase]: ...


class GraphWork(Protocol):
    """How one graph was compiled, and for which machine (None: nothing was generated)."""

    @property
    def kind(self) -> str: ...
    @property
    def coverage(self) -> object: ...
    @property
    def machine(self) -> Target | None: ...
    @property
    def kernels(self) -> Sequence[KernelRecord]: ...
    @property
    def calls(self) -> Sequence[CallRecord]: ...
    @property
    def trace(self) -> Trace: ...


class Compiled(Protocol):
    """What `tilewright.compile` returns, as far as the command line looks."""

    @property
    def coverage(self) -> object: ...
    @property
    def compilations(self) -> Sequence[GraphWork]: ...
    @property
    def signature(self) -> object: ...
    def __call__(self, *inputs: Tensor) -> object: ...


def result_of(graph: GraphWork, name: str) -> object:
    """The last result of a phase; None where it did not run."""
    return next((p.result for p in reversed(graph.trace.phases) if p.name == name), None)
