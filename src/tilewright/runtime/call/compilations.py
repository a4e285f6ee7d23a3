"""What this process has compiled, for whoever holds no compiled model to ask (`torch.compile` returns torch's own)."""

from __future__ import annotations

import threading
import weakref
from typing import Generic, Protocol, TypeVar, cast

T = TypeVar("T")


class Runner(Protocol):
    """What runs a graph; it carries the record of its compilation."""

    record: object


class Compilations(Generic[T]):
    """Records of graphs by runner, oldest first; a runner that is gone takes its record with it."""

    def __init__(self) -> None:
        self._runners: list[weakref.ref[Runner]] = []
        self._lock = threading.Lock()

    def add(self, runner: Runner, record: T) -> None:
        """`runner` was compiled, as `record` says (which must not refer to `runner`)."""
        runner.record = record
        with self._lock:
            self._runners = [r for r in self._runners if r() is not None]
            self._runners.append(weakref.ref(runner))

    def __call__(self) -> tuple[T, ...]:
        """The records of the runners that still exist."""
        with self._lock:
            alive = [r() for r in self._runners]
        return tuple(cast(T, r.record) for r in alive if r is not None)

    def clear(self) -> None:
        """Forget all records."""
        with self._lock:
            self._runners.clear()
