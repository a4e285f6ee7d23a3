"""What clocks decide, beside the store: a tuning file that says it before anything is timed, and a session that wants
to know all of it."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tilewright.errors import warn_once
from tilewright.options import Options

from .cache import digest
from .decisions import Decisions
from .tuning_file import Entry, TuningFile, Unusable, as_entry, entry_name, read


class TuningSession:
    """What is decided while somebody tunes for about `seconds`. `changed` is called after each entry, from whichever
    thread found it."""

    def __init__(
        self,
        seconds: float,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._end, self._changed = clock, clock() + seconds, changed
        self._lock = threading.Lock()
        self._found: dict[str, dict[str, Entry]] = {}
        self.unsettled: set[str] = set()
        """Names of entries that more time would make, or make better."""

    @property
    def left(self) -> float:
        """Seconds until the end, at least 0."""
        return max(0.0, self._end - self._clock())

    @property
    def found(self) -> TuningFile:
        """All entries so far; of devices that were compiled for and have none, too."""
        with self._lock:
            return TuningFile({device: dict(entries) for device, entries in self._found.items()})

    def meet(self, device: str) -> None:
        """Something is compiled for a device."""
        with self._lock:
            self._found.setdefault(device, {})

    def note(self, device: str, name: str, entry: Entry | None, *, final: bool = True) -> None:
        """An entry was decided; None: there is none, or none that holds."""
        with self._lock:
            entries = self._found.setdefault(device, {})
            if entry is not None:
                entries[name] = entry
            else:
                entries.pop(name, None)
            (self.unsettled.discard if final and entry is not None else self.unsettled.add)(name)
        if entry is not None:
            self._changed()


_sessions: list[TuningSession] = []


@contextmanager
def tuning(session: TuningSession) -> Generator[TuningSession]:
    """Within the block, what is decided on any thread goes to `session`, and to no other."""
    before = list(_sessions)
    _sessions[:] = [session]
    try:
        yield session
    finally:
        _sessions[:] = before


@dataclass(frozen=True, slots=True)
class Tuned:
    """What is known of one `device` from a tuning file; and who wants to know more."""

    device: str = ""
    entries: Mapping[str, Entry] = field(default_factory=dict[str, Entry])
    session: TuningSession | None = None
    identity: str = ""
    """Of the entries; empty without a file."""

    def __bool__(self) -> bool:
        return bool(self.entries) or self.session is not None

    def get(self, kind: str, key: str) -> Entry | None:
        """What the file says."""
        return self.entries.get(entry_name(kind, key))

    def note(self, kind: str, key: str, entry: Entry, *, final: bool = True) -> None:
        """An entry was decided, or recalled."""
        if self.session is not None:
            self.session.note(self.device, entry_name(kind, key), entry, final=final)

    def leave(self, kind: str, key: str) -> None:
        """There is no decision: no time was left for one, or it does not hold."""
        if self.session is not None:
            self.session.note(self.device, entry_name(kind, key), None)

    def seconds(self, most: float = math.inf) -> float:
        """For how long something may be timed, if it may for `most`."""
        return most if self.session is None else min(most, self.session.left)


def tuned_for(options: Options, device: str) -> Tuned:
    """What is known of a device. A file that cannot be used is warned of. Raises InputError for one that says what no
    tuning file says."""
    session = _sessions[-1] if _sessions else None
    if session is not None:
        session.meet(device)
    entries = _entries_of(options.tuning_file, device) if options.tuning_file is not None else {}
    identity = digest(repr(sorted(entries.items()))) if entries else ""
    return Tuned(device, entries, session, identity)


_read: dict[Path, tuple[object, TuningFile | Unusable]] = {}


def _entries_of(name: str, device: str) -> Mapping[str, Entry]:
    path = Path(name).expanduser()
    found = _parsed(path)
    if isinstance(found, Unusable):
        warn_once(f"tuning file {name} is ignored: {found.reason}")
        return {}
    if device not in found.devices:
        others = ", ".join(map(repr, found.devices)) or "no device"
        warn_once(f"tuning file {name} is ignored for {device!r}: it is of {others}")
    return found.devices.get(device, {})


def _parsed(path: Path) -> TuningFile | Unusable:
    """As `read`, once for each state of a file: every graph asks."""
    try:
        seen = os.stat(path)
        state = (seen.st_mtime_ns, seen.st_size, seen.st_ino)
    except OSError:
        return read(path)
    if path not in _read or _read[path][0] != state:
        _read.clear()
        _read[path] = (state, read(path))
    return _read[path][1]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Entries of one kind that rest on a task's text: from the file, then, where `stored` ones count, from the store
    of decisions that hold at the place `where`."""

    kind: str
    decisions: Decisions
    tuned: Tuned
    where: str
    stored: bool = True

    def get(self, task: str) -> Entry | None:
        """What is known of a task."""
        entry = self.tuned.get(self.kind, self.decisions.clock_key(task))
        if entry is None and self.stored:
            found = self.decisions.get(self._text(task))
            entry = as_entry(self.kind, found)
        if entry is not None:
            self.tuned.note(self.kind, self.decisions.clock_key(task), entry)
        return entry

    def put(self, task: str, entry: Entry) -> None:
        """A task was decided."""
        self.decisions.put(self._text(task), entry)
        self.tuned.note(self.kind, self.decisions.clock_key(task), entry)

    def drop(self, task: str) -> None:
        """What was decided about a task does not hold: the store forgets it. (A file stays as it is.)"""
        self.decisions.drop(self._text(task))
        self.leave(task)

    def leave(self, task: str) -> None:
        """There was no time to decide about a task."""
        self.tuned.leave(self.kind, self.decisions.clock_key(task))

    def _text(self, task: str) -> str:
        return f"{self.kind}\n{task}\n{self.where}"
