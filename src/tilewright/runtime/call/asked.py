"""Since when torch traces for a compilation: it calls us only when it is done, so whoever asks it writes down when."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol


class Phases(Protocol):
    """Who records the phases of one graph."""

    def add(self, name: str, seconds: float) -> None:
        """A phase that made nothing."""
        ...


class _Asked(threading.local):
    """On this thread: since when time belongs to the next graph, and who recorded the graph before."""

    since: float | None = None
    last: Phases | None = None
    read: float = 0.0
    """Seconds in which the program was read, which belong to the next graph."""


_ASKED = _Asked()


@contextmanager
def asking(*, runs: bool) -> Generator[None]:
    """Inside, torch is asked for graphs to compile: what passes before each is its phase `trace`; and what passes after
    the last one its phase `install`, unless it also `runs` then."""
    if _ASKED.since is not None:
        yield
        return
    _ASKED.since = time.perf_counter()
    try:
        yield
    finally:
        if _ASKED.last is not None and not runs:
            _ASKED.last.add("install", time.perf_counter() - _ASKED.since)
        _ASKED.since = _ASKED.last = None
        _ASKED.read = 0.0


@contextmanager
def reading() -> Generator[None]:
    """Inside, a program is read: phase `read` of the next graph."""
    start = time.perf_counter()
    yield
    if _ASKED.since is not None:
        _ASKED.read += time.perf_counter() - start


@contextmanager
def tracing_ends(record: Phases) -> Generator[None]:
    """Inside, a graph that torch has traced is compiled."""
    if _ASKED.since is not None:
        if _ASKED.read:
            record.add("read", _ASKED.read)
        record.add("trace", time.perf_counter() - _ASKED.since - _ASKED.read)
        _ASKED.read = 0.0
    try:
        yield
    finally:
        if _ASKED.since is not None:
            _ASKED.since, _ASKED.last = time.perf_counter(), record
