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


class LaunchList(list[Launching]):
    """Launches of a step. What the native side needs of them under any sizes is made once."""

    native: LaunchRows | None = None


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


class LaunchRows:
    """Launches as the native side reads them, before sizes say how many points they have."""

    def __init__(self, launches: Sequence[Launching], tasks: Sequence[int]) -> None:
        """`tasks[k]`: the address of kernel k."""
        places = [params for _, params, *_ in launches]
        self._slots = array("q", [slot for params in places for slot, _ in params])
        self._offsets = array("q", [offset for params in places for _, offset in params])
        self.records = (LaunchRecord * max(1, len(launches)))()
        self.kernels = array("q", [launch[0] for launch in launches])
        done = 0
        for record, launch in zip(self.records, launches, strict=False):
            kernel, params, rows = launch[0], launch[1], rows_of(launch)
            record.task, record.rows, record.params = tasks[kernel], rows, len(params) // rows
            record.slots = self._slots.buffer_info()[0] + 8 * done
            record.offsets = self._offsets.buffer_info()[0] + 8 * done
            done += len(params)


def raise_error(code: int) -> None:
    """Raise what error number `code` of a kernel means."""
    if code == 2:
        raise DivisionByZero(
            "ZeroDivisionError: an integer is divided by zero", phase="run", hint="an integer divisor holds 0"
        )
    raise IndexOutOfRange("index out of range in self", phase="run", hint="an index tensor holds a bad value")
