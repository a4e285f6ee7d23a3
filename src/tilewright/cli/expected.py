"""How much longer something will take: by how long its phases took the last time, and how far a counted one is.

The last times lie beside the cache of kernels, in one small file. What cannot be read or written is as if nothing was
known: an estimate is never the cause of a failure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

from tilewright.artifact.file.disk import regular, replacing
from tilewright.errors import TilewrightError
from tilewright.options import Options
from tilewright.progress import Event
from tilewright.runtime.store.cache import default_root
from tilewright.tuning.text_limits import TEXTS

FILE = "expected.json"
BESIDE = ""
"""The name of the time that no phase has."""


class Expected:
    """What is left of one thing that goes on, from its start on. It has the name `text`."""

    def __init__(
        self, text: str, path: Path | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._text, self._path, self._clock = text, path, clock
        self._all = _read(path)
        self.known: Mapping[str, float] = self._all.get(text, {})
        """Seconds of each phase, the last time."""
        self._start = clock()
        self._spent: dict[str, float] = {}
        self._open: list[str] = []
        self._since = self._start
        self._done, self._total = 0, 0

    def hear(self, event: Event) -> None:
        """Something has happened."""
        if event.total:
            self._done, self._total = event.done, event.total
        elif event.seconds is None:
            self._open.append(event.phase)
            if len(self._open) == 1:
                self._since, self._done, self._total = self._clock(), 0, 0
        elif event.phase in self._open:
            del self._open[self._open.index(event.phase) :]
            if not self._open:  # the outermost; what runs inside is part of it
                self._spent[event.phase] = self._spent.get(event.phase, 0.0) + event.seconds

    @property
    def left(self) -> float | None:
        """Seconds from now to the end; None where nothing tells."""
        spent, now = dict(self._spent), self._clock()
        current = self._open[0] if self._open else None
        counted = None
        if current is not None:
            spent[current] = spent.get(current, 0.0) + now - self._since
            if self._done:
                counted = (now - self._since) / self._done * (self._total - self._done)
        if not self.known:
            return counted
        spent[BESIDE] = max(0.0, now - self._start - sum(spent.values()))
        rest = {name: max(0.0, seconds - spent.get(name, 0.0)) for name, seconds in self.known.items()}
        if current is not None and counted is not None:
            rest[current] = counted
        return sum(rest.values())

    def keep(self) -> None:
        """It is over: keep how long its phases took, if it was worth an estimate."""
        took = self._clock() - self._start
        if self._path is None or took < TEXTS.least_expected_seconds:
            return
        times = {**self._spent, BESIDE: max(0.0, took - sum(self._spent.values()))}
        rows = [(name, known) for name, known in self._all.items() if name != self._text]
        kept = dict([*rows, (self._text, times)][-TEXTS.max_expected :])
        with suppress(OSError), replacing(self._path) as file:
            file.write(json.dumps(kept).encode())


def place() -> Path | None:
    """Where the last times lie; None where nothing is kept."""
    try:
        root = default_root(Options.make())
    except TilewrightError:  # a wrong option is told by whoever needs it
        return None
    return root.parent / FILE if root is not None and root.parent.is_dir() else None


def _read(path: Path | None) -> dict[str, dict[str, float]]:
    """What the file says, as far as it is what `keep` writes."""
    if path is None:
        return {}
    try:
        with regular(path, follow=True) as file:
            told: object = json.loads(file.read(TEXTS.max_expected_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    found: dict[str, dict[str, float]] = {}
    for name, times in cast("Mapping[str, object]", told).items() if isinstance(told, dict) else ():
        if isinstance(times, dict):
            pairs = cast("Mapping[str, object]", times).items()
            found[name] = {
                phase: float(n) for phase, n in pairs if isinstance(n, int | float) and 0 <= n < 1e6
            }
    return found


def about(seconds: float | None) -> str:
    """Words for what is left; none where nothing tells, or where it is over any moment."""
    if seconds is None or seconds < 1:
        return ""
    return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"
