"""What goes on, told to whoever asked: phases as they begin and end, and how far a counted one is.

One listener at a time and none by default, so that nothing is told where nobody looks. It may be called from any
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """A phase has begun (`seconds` None), has made `done` of `total` things, or is over after `seconds`."""

    phase: str
    seconds: float | None = None
    done: int = 0
    total: int = 0


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


@contextmanager
def told_to(listener: Listener) -> Generator[None]:
    """Within the block `listener` is told, and no other."""
    before = list(_listeners)
    _listeners[:] = [listener]
    try:
        yield
    finally:
        _listeners[:] = before


@contextmanager
def phase(name: str) -> Generator[None]:
    """Within the block phase `name` runs."""
    start = time.perf_counter()
    tell(Event(name))
    yield
    tell(Event(name, time.perf_counter() - start))


def count(name: str, done: int, total: int) -> None:
    """`done` of `total` things of phase `name` are made."""
    tell(Event(name, None, done, total))


def tell(event: Event) -> None:
    """Tell the listener, if there is one."""
    for listener in _listeners:
        listener(event)
