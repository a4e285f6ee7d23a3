"""Calls that are one native function: addresses of inputs, outputs made, kernels run, without a line of Python between.

It holds the interpreter's lock from the first to the last kernel, so that one table serves all threads."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.runtime.objects.attach import attach as attach_objects
from tilewright.runtime.objects.known_call import Output, output_rows
from tilewright.runtime.objects.reading import LayoutTable, maker
from tilewright.runtime.plan.tensors import Make


@dataclass(frozen=True, slots=True)
class Outside:
    """What a call takes and gives. Outputs: number of the result, slot, shape, strides, dtype; `make` makes them,
    `fail` raises what an error number means."""

    inputs: LayoutTable
    outputs: Sequence[Output]
    make: Make
    fail: Callable[[int], None]


class _CallRecord(ctypes.Structure):
    _fields_ = (
        ("run", ctypes.c_void_p),
        ("bases", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", LayoutTable),
        ("output", ctypes.c_void_p),
        ("make", ctypes.c_void_p),
        ("fail", ctypes.c_void_p),
    )


NativeCall = Callable[[list[object]], list[object] | None]
"""Runs on the arguments, and empties their list; None, and nothing has happened, if one lies in memory otherwise."""


def attach(library: ctypes.CDLL) -> Callable[[object], NativeCall] | None:
    """What makes a callable of a tuple whose first item is the address of a call; None where the native side cannot
    read tensors."""
    if not attach_objects(library):
        return None
    return maker(library.tw_native_call)


def call_of(
    callable_of: Callable[[object], NativeCall],
    run: ctypes.Structure,
    bases: array[int],
    outside: Outside,
    owner: object,
) -> NativeCall:
    """The call that runs `run` on memory of `outside` and of `owner`."""
    place = id  # what is meant is the object itself, which `kept` holds
    inputs = outside.inputs
    outputs = output_rows(outside.outputs)
    record = _CallRecord(
        ctypes.addressof(run), bases.buffer_info()[0], len(outside.outputs), inputs, ctypes.addressof(outputs),
        place(outside.make), place(outside.fail),
    )  # fmt: skip
    return callable_of((ctypes.addressof(record), record, inputs, outputs, run, bases, outside, owner))
