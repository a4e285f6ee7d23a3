"""The registry: which scheduler serves a machine."""

from __future__ import annotations

from tilewright.target import Target

from .cpu.scheduler import VectorScheduler
from .gpu.scheduler import BlockScheduler
from .scheduler import Scheduler


def scheduler_of(target: Target) -> Scheduler:
    """Blocks where many threads share a grid point, vectors where they work alone."""
    return BlockScheduler() if target.lanes > 1 else VectorScheduler()
