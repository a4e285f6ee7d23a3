"""Built kernels of one plan, loaded: their size functions, their addresses, and the native launcher."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

from tilewright.options import Options
from tilewright.runtime.objects.attach import text_before
from tilewright.runtime.plan.launch import Launching, LaunchList, LaunchRows
from tilewright.runtime.store.cache import ContentStore
from tilewright.tuning.runtime_thresholds import CPU_WORK

from .native_call import NativeCall, Outside, attach, call_of
from .pool import pool
from .toolchain import built, load

SOURCE = Path(__file__).parents[1] / "native" / "launch.cpp"


class _Row(ctypes.Structure):
    """One entry of a unit's table."""

    _fields_ = (("task", ctypes.c_void_p), ("count", ctypes.c_void_p), ("grain", ctypes.c_void_p))


class _Run(ctypes.Structure):
    """One run as the native side reads it."""

    kept: tuple[object, ...]
    """What it points to."""

    _fields_ = (
        ("records", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("bases", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


_SIZER = ctypes.PYFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_char_p, ctypes.c_int64,
)  # fmt: skip
"""Of `tw_size`, called without letting other Python threads run meanwhile."""
_HELD = ctypes.PYFUNCTYPE(ctypes.c_int64)
"""A function that is called without letting other Python threads run meanwhile. Its argument, a pointer that is kept,
has no declared type: converting it would take as long as the call."""


@dataclass(frozen=True, slots=True)
class Launchers:
    """The native `tw_launch`, `tw_launch_here` and `tw_size`, and what makes native calls (see `attach`)."""

    launch: Callable[..., int]
    here: Callable[..., int]
    size: Callable[..., int]
    native_call: Callable[[object], NativeCall] | None


def launcher_text() -> str:
    """The text of the library of launchers."""
    return text_before(SOURCE.read_text(encoding="utf-8"))


_launchers: list[Launchers] = []
_lock = threading.Lock()


def launchers(store: ContentStore, options: Options) -> Launchers:
    """Those of this process, built with the thread pool on first use. Raises what `build` raises."""
    with _lock:
        if not _launchers:
            found = pool(store, options)
            library = built([launcher_text()], (), store, options)
            library.tw_attach.argtypes = [ctypes.c_void_p] * 3
            library.tw_attach(found.parallel, found.scratch, found.resizing)
            launch = library.tw_launch
            launch.argtypes = [ctypes.c_void_p]
            launch.restype = ctypes.c_int64
            here = ctypes.cast(library.tw_launch_here, ctypes.c_void_p).value
            size = ctypes.cast(library.tw_size, ctypes.c_void_p).value
            assert here is not None and size is not None
            _launchers.append(Launchers(launch, _HELD(here), _SIZER(size), attach(library)))
        return _launchers[0]


class NativeUnit:
    """Kernels of a shared object. `threads` None follows torch's thread count at each launch."""

    def __init__(self, path: Path, store: ContentStore, options: Options) -> None:
        self.path = path
        self._library = load(path)
        self.kernels = int(ctypes.c_int64.in_dll(self._library, "tw_kernel_count").value)
        rows = (_Row * max(1, self.kernels)).in_dll(self._library, "tw_kernels")
        self._tasks = [int(row.task or 0) for row in rows[: self.kernels]]
        self._rows = ctypes.addressof(rows)
        self._launchers = launchers(store, options)
        self._fixed = options.threads
        self._sign = -1 if options.pin_threads else 1

    def prepare(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        alone: Sequence[bool] = (),
    ) -> Callable[[], int]:
        """What runs `launches`; it returns the number of a failed check, 0 for none. For one caller at a time. Those
        that `alone` marks are left to the caller's thread."""
        table, brief = self._table(launches, bases, sizes, alone)
        if brief:
            return partial(self._launchers.here, ctypes.byref(table))
        address, launch, sign = ctypes.addressof(table), self._launchers.launch, self._sign
        if self._fixed:
            return lambda table=table: launch(address)
        threads = torch.get_num_threads
        last = 1

        def run(table: _Run = table) -> int:
            nonlocal last
            now = threads()
            if now != last:
                table.threads, last = sign * now, now
            return launch(address)

        return run

    def native_call(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        outside: Outside,
        owner: object,
    ) -> NativeCall | None:
        """A call that does nothing but run `launches`, as a function of its own that keeps `owner`; None where one is
        worth a second thread."""
        table, brief = self._table(launches, bases, sizes)
        make = self._launchers.native_call if brief else None
        return None if make is None else call_of(make, table, bases, outside, owner)

    def table_of(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        alone: Sequence[bool] = (),
        *,
        held: bool = False,
    ) -> tuple[ctypes.Structure, int, bool]:
        """The launches as the native side reads them, the address of what runs them, and whether that is the caller
        alone (else see `spread`). `held`: for a caller that holds a team."""
        table, brief = self._table(launches, bases, sizes, alone, held=held)
        function = self._launchers.here if brief else self._launchers.launch
        address = ctypes.cast(cast(int, function), ctypes.c_void_p).value
        assert address is not None
        return table, address, brief

    def threads(self) -> int:
        """How many threads launches use now, negative for pinned ones."""
        return self._sign * (self._fixed or torch.get_num_threads())

    def spread(self, table: ctypes.Structure, threads: int) -> None:
        """Run a table on that many threads from now on, unless their number is fixed."""
        assert isinstance(table, _Run)
        if not self._fixed:
            table.threads = self._sign * threads

    def _table(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        alone: Sequence[bool] = (),
        *,
        held: bool = False,
    ) -> tuple[_Run, bool]:
        """The launches as the native side reads them, and whether they may run on the caller without letting other
        Python threads run meanwhile."""
        rows = launches.native if isinstance(launches, LaunchList) else None
        if rows is None:
            rows = LaunchRows(launches, self._tasks)
            if isinstance(launches, LaunchList):
                launches.native = rows
        records = type(rows.records).from_buffer_copy(rows.records)
        at, place = ctypes.addressof(records), sizes.buffer_info()[0]
        kernels, count = rows.kernels.buffer_info()
        marked = bytes(alone).ljust(count, b"\0") if alone else None
        left = self._launchers.size(at, kernels, count, self._rows, place, marked, held)
        brief, left = left < 0, left if left >= 0 else -left - 1
        table = _Run(at, left, bases.buffer_info()[0], place, self._sign * (self._fixed or 1))
        table.kept = (records, rows, bases, sizes)
        return table, brief and left <= CPU_WORK.max_uninterrupted_launches and self._sign > 0
