"""What is told of something compiled: how it is asked, and how what is made of others answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Reports(Protocol):
    """Tells what became of what was compiled so far."""

    @property
    def kernels(self) -> tuple[object, ...]:
        """One entry per generated kernel."""
        ...

    @property
    def calls(self) -> tuple[object, ...]:
        """One entry per call that is not a generated kernel."""
        ...

    @property
    def cuda_graphs(self) -> tuple[str, ...]:
        """One line for each graph on a GPU under `cuda_graphs`."""
        ...

    @property
    def trace(self) -> object:
        """Every phase's name, time and result, of the graph compiled last."""
        ...

    @property
    def compilations(self) -> tuple[object, ...]:
        """How each graph was compiled."""
        ...


class ReportsOfParts:
    """Tells of its parts, in their order."""

    def reporting(self) -> Sequence[Reports]:
        """The parts."""
        raise NotImplementedError

    @property
    def kernels(self) -> tuple[object, ...]:
        """Of all parts."""
        return tuple(k for part in self.reporting() for k in part.kernels)

    @property
    def calls(self) -> tuple[object, ...]:
        """What runs besides kernels, of all parts."""
        return tuple(k for part in self.reporting() for k in part.calls)

    @property
    def cuda_graphs(self) -> tuple[str, ...]:
        """One line for each graph on a GPU under `cuda_graphs`."""
        return tuple(line for part in self.reporting() for line in part.cuda_graphs)

    @property
    def compilations(self) -> tuple[object, ...]:
        """Of all parts."""
        return tuple(made for part in self.reporting() for made in part.compilations)

    @property
    def trace(self) -> object:
        """Of the graph compiled last."""
        return next((part.trace for part in reversed(self.reporting()) if part.trace is not None), None)
