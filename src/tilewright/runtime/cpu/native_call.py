"""Calls that are one native function: addresses of inputs, outputs made, kernels run, without a line of Python between.

It holds the interpreter's lock from the first to the last kernel, so that one table serves all threads."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewright.runtime.plan import reading
from tilewright.runtime.plan.reading import LayoutTable
from tilewright.runtime.plan.tensors import Make


@dataclass(frozen=True, slots=True)
class Outside:
    """What a call takes and gives. Outputs: number of the result, slot, shape, strides, dtype; `make` makes them,
    `fail` raises what an error number means."""

    inputs: LayoutTable
    outputs: Sequence[tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]]
    make: Make
    fail: Callable[[int], None]


class _Output(ctypes.Structure):
    _fields_ = (
        ("place", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("dtype", ctypes.c_void_p),
    )


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
    if not reading.attach(library):
        return None
    maker = ctypes.cast(library.tw_native_call, ctypes.c_void_p).value
    assert maker is not None
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(maker)


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
    outputs = (_Output * max(1, len(outside.outputs)))()
    for row, (k, slot, shape, strides, dtype) in zip(outputs, outside.outputs, strict=False):
        row.place, row.slot = k, slot
        row.shape, row.strides, row.dtype = place(shape), place(strides), place(dtype)
    record = _CallRecord(
        ctypes.addressof(run), bases.buffer_info()[0], len(outside.outputs), inputs, ctypes.addressof(outputs),
        place(outside.make), place(outside.fail),
    )  # fmt: skip
    return callable_of((ctypes.addressof(record), record, inputs, outputs, run, bases, outside, owner))
