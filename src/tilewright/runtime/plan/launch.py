"""Tables of launches for the native side: which kernel, over how many points, on which memory."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from tilewright.errors import IndexOutOfRange, TilewrightError
from tilewright.runtime.cpu.native_call import NativeCall, Outside

Launching = tuple[int, Sequence[tuple[int, int]]]
"""A kernel's number, and for each of its parameters the slot among the bases and a byte offset behind it."""


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
    """One launch as the native side reads it: param p lies at bases[slots[p]] + offsets[p] (bytes)."""

    _fields_ = (
        ("task", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("grain", ctypes.c_int64),
        ("params", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
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
        rows: list[tuple[int, int, int, Sequence[tuple[int, int]]]] = []
        self.brief = True
        """Whether no launch takes longer than it takes to let other Python threads run."""
        for place, (kernel, params) in enumerate(launches):
            undivided = place < len(alone) and alone[place]
            count = unit.count(kernel, sizes)
            if count > 0:
                grain = 1 if held else max(1, unit.grain(kernel, sizes))
                self.brief &= count <= grain
                rows.append((unit.task(kernel), count, max(grain, count) if undivided else grain, params))
        slots = array("q", [slot for *_, params in rows for slot, _ in params])
        offsets = array("q", [offset for *_, params in rows for _, offset in params])
        records = (LaunchRecord * max(1, len(rows)))()
        done = 0
        for record, (task, count, grain, params) in zip(records, rows, strict=False):
            record.task, record.count, record.grain, record.params = task, count, grain, len(params)
            record.slots = slots.buffer_info()[0] + 8 * done
            record.offsets = offsets.buffer_info()[0] + 8 * done
            done += len(params)
        self._alive = (slots, offsets, records)
        self.address = ctypes.addressof(records)
        self.count = len(rows)


def raise_error(code: int) -> None:
    """Raise what error number `code` of a kernel means."""
    if code == 2:
        raise DivisionByZero(
            "ZeroDivisionError: an integer is divided by zero", phase="run", hint="an integer divisor holds 0"
        )
    raise IndexOutOfRange("index out of range in self", phase="run", hint="an index tensor holds a bad value")
