"""Calls that are one native function: addresses of inputs, outputs made, kernels run, without a line of Python between.

The native side sees Python through its stable C interface, whose functions are handed to it by name: nothing is built
against Python's headers. It holds the interpreter's lock from the first to the last kernel, so that one table serves
all threads."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewright.runtime.plan.tensors import Make

MAX_TENSORS = 32
"""Inputs and outputs together."""


@dataclass(frozen=True, slots=True)
class Outside:
    """What a call takes and gives. Inputs: number of the argument, slot of its address, and its strides (None:
    contiguous). Outputs: number of the result, slot, shape, strides, dtype; `make` makes them, `fail` raises what an
    error number means."""

    inputs: Sequence[tuple[int, int, tuple[int, ...] | None]]
    outputs: Sequence[tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]]
    make: Make
    fail: Callable[[int], None]


class Python(ctypes.Structure):
    """What the native side uses of Python."""

    FUNCTIONS = (
        "PyCFunction_NewEx", "PyTuple_GetItem", "PyList_GetItem", "PyLong_AsUnsignedLongLong", "PyLong_FromLongLong",
        "PyObject_RichCompareBool", "PyObject_Vectorcall", "PyObject_VectorcallMethod", "PyList_New", "PyList_SetItem",
        "PyList_Size", "PyList_SetSlice", "Py_IncRef", "Py_DecRef",
    )  # fmt: skip
    OBJECTS = (sys.intern("is_contiguous"), sys.intern("stride"), sys.intern("data_ptr"), None)

    _fields_ = tuple((f"at{k}", ctypes.c_void_p) for k in range(len(FUNCTIONS) + len(OBJECTS)))


class _Input(ctypes.Structure):
    _fields_ = (("place", ctypes.c_int64), ("slot", ctypes.c_int64), ("strides", ctypes.c_void_p))


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
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("make", ctypes.c_void_p),
        ("fail", ctypes.c_void_p),
    )


NativeCall = Callable[[list[object]], list[object] | None]
"""Runs on the arguments, and empties their list; None, and nothing has happened, if one lies in memory otherwise."""


def attach(library: ctypes.CDLL) -> Callable[[object], NativeCall] | None:
    """What makes a callable of a tuple whose first item is the address of a call; None where interpreters have no lock,
    or no such interface."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    try:
        found = [
            ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in Python.FUNCTIONS
        ]
    except AttributeError:
        return None
    table = Python(*found, *map(id, Python.OBJECTS))
    library.tw_attach_python(ctypes.byref(table))
    maker = ctypes.cast(library.tw_native_call, ctypes.c_void_p).value
    assert maker is not None
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(maker)


def call_of(
    callable_of: Callable[[object], NativeCall],
    run: ctypes.Structure,
    bases: array[int],
    outside: Outside,
    owner: object,
) -> NativeCall | None:
    """The call that runs `run` on memory of `outside` and of `owner`; None if it has too many operands."""
    if len(outside.inputs) + len(outside.outputs) > MAX_TENSORS:
        return None
    place = id  # what is meant is the object itself, which `kept` holds
    inputs = (_Input * max(1, len(outside.inputs)))()
    for row, (k, slot, strides) in zip(inputs, outside.inputs, strict=False):
        row.place, row.slot, row.strides = k, slot, None if strides is None else place(strides)
    outputs = (_Output * max(1, len(outside.outputs)))()
    for row, (k, slot, shape, strides, dtype) in zip(outputs, outside.outputs, strict=False):
        row.place, row.slot = k, slot
        row.shape, row.strides, row.dtype = place(shape), place(strides), place(dtype)
    record = _CallRecord(
        ctypes.addressof(run), bases.buffer_info()[0], len(outside.inputs), len(outside.outputs),
        ctypes.addressof(inputs), ctypes.addressof(outputs), place(outside.make), place(outside.fail),
    )  # fmt: skip
    return callable_of((ctypes.addressof(record), record, inputs, outputs, run, bases, outside, owner))
