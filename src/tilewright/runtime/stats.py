"""Counters of the process: what was compiled, built and found again."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Stats:
    """Numbers since the start or the last reset.

    `graphs` compiled; `kernels` in built units; `units` handed to the C++ compiler, `cache_hits` of units found in the
    kernel cache; `plan_misses` size tables made for new sizes; `input_copies` of inputs whose strides were not those
    compiled for; `fallbacks` graphs that run as the captured program because a phase refused them; `triton` kernels
    that Triton compiled (those found in the kernel cache are in `cache_hits`); `given_up` functions that torch stopped
    compiling at its recompile limit or under a transform, so that they run eagerly; `writes_in_place` and
    `writes_copied` of compiled graphs into their inputs: by what makes the value, or by a copy behind all steps;
    `timed` choices that a clock was asked about, and that neither the kernel cache nor a tuning file knew.
    """

    graphs: int = 0
    kernels: int = 0
    units: int = 0
    cache_hits: int = 0
    plan_misses: int = 0
    input_copies: int = 0
    fallbacks: int = 0
    triton: int = 0
    given_up: int = 0
    writes_in_place: int = 0
    writes_copied: int = 0
    timed: int = 0

    def reset(self) -> None:
        """Set every counter to 0."""
        for f in fields(self):
            setattr(self, f.name, 0)

    def snapshot(self) -> Stats:
        """A copy that later events do not change."""
        return Stats(*(getattr(self, f.name) for f in fields(self)))


STATS = Stats()
"""The one instance that the package counts in."""
