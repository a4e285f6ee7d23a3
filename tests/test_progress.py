"""What goes on is told to the one who asked, and to nobody else."""

from __future__ import annotations

import torch

import tilewright
from tilewright import progress
from tilewright.progress import Event


def test_phases_are_told_as_they_begin_and_end() -> None:
    seen: list[Event] = []
    with progress.told_to(seen.append):
        tilewright.compile(lambda x: x.sin() + 1, (torch.ones(4),))
    begun = [e.phase for e in seen if e.seconds is None and not e.total]
    ended = [e.phase for e in seen if e.seconds is not None]
    assert begun == ended and ["partition", "schedule", "build"] == [
        p for p in begun if p in ("partition", "schedule", "build")
    ]


def test_one_listens_at_a_time_and_none_afterwards() -> None:
    outer: list[Event] = []
    inner: list[Event] = []
    with progress.told_to(outer.append):
        with progress.told_to(inner.append):
            progress.count("build", 2, 5)
        progress.count("load", 0, 1)
    progress.count("nobody", 0, 1)
    assert inner == [Event("build", None, 2, 5)] and outer == [Event("load", None, 0, 1)]
