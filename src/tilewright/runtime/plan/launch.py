"""Tables of launches for the native side: which kernel, over how many points, on which memory."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from tilewright.errors import IndexOutOfRange, TilewrightError
from tilewright.runtime.cpu.native_call import NativeCall, Outside

Places = Sequence[tuple[int, int]]
"""For each parameter the slot among the bases and a byte offset behind it."""

Launching = tuple[int, Places] | tuple[int, Places, int]
"""A kernel's number and its places; of a list, those of all its rows one after the other, and how many rows it has."""


def rows_of(launch: Launching) -> int:
    """How often a kernel runs at once, each time on places of its own."""
    return launch[2] if len(launch) == 3 else 1


class BuiltUnit(Protocol):
    """Built kernels."""

    def prepare(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        alone: Sequence[bool] = (),
    ) -> Callable[[], int]:
        """What runs `launches` one after the other, for one caller at a time, under exact sizes (int64, in the plan's
        order), on memory that starts where `bases` say when it runs. It returns an error number (0: none). Those that
        `alone` marks are left to the caller's thread."""
        ...

    def native_call(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        outside: Outside,
        owner: object,
    ) -> NativeCall | None:
        """A call that does nothing but run `launches`, as a function of its own that keeps `owner`, if that is
        possible."""
        ...


class Tasks(Protocol):
    """Kernels as native tasks."""

    def task(self, kernel: int) -> int:
        """Address of the task function."""
        ...

    def count(self, kernel: int, sizes: int) -> int:
        """Grid points under the sizes at address `sizes` (int64 each)."""
        ...

    def grain(self, kernel: int, sizes: int) -> int:
        """Points worth one hand-over."""
        ...


class DivisionByZero(TilewrightError, ZeroDivisionError, RuntimeError):
    """An integer divided by zero. Also the types that eager and Python raise."""


class LaunchRecord(ctypes.Structure):
    """One launch as the native side reads it: param p lies at bases[slots[p]] + offsets[p] (bytes). `count` points and
    `params` parameters are those of one of its rows."""

    _fields_ = (
        ("task", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("grain", ctypes.c_int64),
        ("params", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
    )


class LaunchTable:
    """Launch records of one run of kernels, with the memory that they point to."""

    __slots__ = ("_alive", "address", "brief", "count")

    def __init__(
        self,
        unit: Tasks,
        launches: Sequence[Launching],
        sizes: int,
        alone: Sequence[bool] = (),
        *,
        held: bool = False,
    ) -> None:
        """Launches over no points are left out; those that `alone` marks are one piece. `held`: threads watch for work,
        so that each point of the others is worth one."""
        made: list[tuple[int, int, int, int, Places]] = []
        self.brief = True
        """Whether no launch takes longer than it takes to let other Python threads run."""
        for place, launch in enumerate(launches):
            kernel, params, rows = launch[0], launch[1], rows_of(launch)
            undivided = place < len(alone) and alone[place]
            count = unit.count(kernel, sizes)
            if count > 0:
                grain = 1 if held else max(1, unit.grain(kernel, sizes))
                self.brief &= rows * count <= grain
                least = max(grain, rows * count) if undivided else grain
                made.append((unit.task(kernel), count, least, rows, params))
        slots = array("q", [slot for *_, params in made for slot, _ in params])
        offsets = array("q", [offset for *_, params in made for _, offset in params])
        records = (LaunchRecord * max(1, len(made)))()
        done = 0
        for record, (task, count, grain, rows, params) in zip(records, made, strict=False):
            record.task, record.count, record.grain, record.rows = task, count, grain, rows
            record.params = len(params) // rows
            record.slots = slots.buffer_info()[0] + 8 * done
            record.offsets = offsets.buffer_info()[0] + 8 * done
            done += len(params)
        self._alive = (slots, offsets, records)
        self.address = ctypes.addressof(records)
        self.count = len(made)


def raise_error(code: int) -> None:
    """Raise what error number `code` of a kernel means."""
    if code == 2:
        raise DivisionByZero(
            "ZeroDivisionError: an integer is divided by zero", phase="run", hint="an integer divisor holds 0"
        )
    raise IndexOutOfRange("index out of range in self", phase="run", hint="an index tensor holds a bad value")
