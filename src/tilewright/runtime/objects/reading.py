"""Where the inputs of a call lie, read by one native function: no Python between a hundred weights.

The native side (`native/tensors.cpp`) knows Python and torch through their stable C interfaces, whose functions are
handed to it by name: nothing is built against headers. What it reads is what `Tensor.data_ptr` and `Tensor.stride` say,
anew in each call. It reads plain tensors and parameters alone, and says of anything else that it does not lie as
wanted: Python then looks itself."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.capture.aliasing.apart import PROVERS, Prover

SOURCE = Path(__file__).parents[1] / "native" / "tensors.cpp"
"""Stands in front of the text of a library that reads tensors."""

Reader = Callable[[Sequence[object], int], bool]
"""(list of arguments, address of a row of addresses, or 0) -> whether all inputs lie as wanted; their addresses then
stand in the row, or, without one, are those wanted."""


class Lies(NamedTuple):
    """How an input must lie: the number of the argument, the slot of its address, its shape and its strides (elements);
    those of sizes 0 and 1 do not matter. `address`: where, for readers that compare. `like`: a tensor whose sizes, type
    and device it must have too."""

    place: int
    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int = 0
    like: Tensor | None = None


class Python(ctypes.Structure):
    """What the native side uses of Python."""

    FUNCTIONS = (
        "PyCFunction_NewEx", "PyTuple_GetItem", "PyList_GetItem", "PyLong_AsUnsignedLongLong", "PyLong_FromLongLong",
        "PyObject_Vectorcall", "PyList_New", "PyList_SetItem", "PyList_Size", "PyList_SetSlice", "Py_IncRef",
        "Py_DecRef", "PyDict_Size", "PyDict_GetItem", "PyDict_Next", "PyObject_GenericGetDict", "PyErr_Clear",
        "PyFunction_GetCode", "PyFunction_GetDefaults", "PyFunction_GetKwDefaults", "PyTuple_Size", "PyObject_GetAttr",
        "PyList_AsTuple", "PyEval_SaveThread", "PyEval_RestoreThread",
        "PyErr_Fetch", "PyErr_Restore", "PyErr_ExceptionMatches",
    )  # fmt: skip
    OBJECTS = (None, True, False)

    _fields_ = tuple((f"at{k}", ctypes.c_void_p) for k in range(len(FUNCTIONS) + len(OBJECTS)))


class Torch(ctypes.Structure):
    """What the native side uses of torch."""

    FUNCTIONS = (
        "aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_strides", "aoti_torch_get_sizes",
        "aoti_torch_get_dtype", "aoti_torch_get_device_type", "aoti_torch_get_device_index",
    )  # fmt: skip
    FACTS = FUNCTIONS[-3:]
    TYPES = (Tensor, torch.nn.Parameter)

    _fields_ = (
        *((f"at{k}", ctypes.c_void_p) for k in range(len(FUNCTIONS))),
        ("handle", ctypes.c_int64),
        ("type", ctypes.c_int64),
        *((f"type{k}", ctypes.c_void_p) for k in range(len(TYPES))),
    )


class _Input(ctypes.Structure):
    _fields_ = (
        ("place", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("strides", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("facts", ctypes.c_int32 * len(Torch.FACTS)),
    )


class LayoutTable(ctypes.Structure):
    """How inputs must lie, as the native side reads it."""

    rows: ctypes.Array[_Input]
    held: list[tuple[array[int], ...]]
    """What it points to: a row of each of the `inputs`, and their strides and sizes."""
    inputs: tuple[Lies, ...]

    _fields_ = (("count", ctypes.c_int64), ("input", ctypes.c_void_p))


def table_of(
    inputs: Sequence[Lies], before: LayoutTable | None = None, changed: Sequence[int] = ()
) -> LayoutTable:
    """The inputs as the native side reads them. Of as many others, `before`, all rows are taken but the `changed`."""
    if before is None:
        rows = (_Input * max(1, len(inputs)))()
        held: list[tuple[array[int], ...]] = [()] * len(inputs)
        changed = range(len(inputs))
    else:
        rows = type(before.rows).from_buffer_copy(before.rows)
        held = before.held[:]
    flat: list[int] = []
    for k in changed:
        shape, strides = inputs[k].shape, inputs[k].strides
        flat += (
            [s if n > 1 else -1 for n, s in zip(shape, strides, strict=True)]
            if 0 not in shape
            else [-1] * len(shape)
        )
    elements = array("q", flat)
    at = elements.buffer_info()[0]
    for k in changed:
        i, row = inputs[k], rows[k]
        row.strides = at
        at += elements.itemsize * len(i.shape)
        if before is not None and i.like is None:  # a row of the same argument
            held[k] = (elements,)
            continue
        sizes = array("q", i.shape if i.like is not None else ())
        held[k] = elements, sizes
        row.place, row.slot, row.rank, row.wanted, row.sizes = i.place, i.slot, len(i.shape), i.address, None
        if i.like is not None:
            row.sizes, row.facts = sizes.buffer_info()[0] or row.strides, facts_of(i.like)
    table = LayoutTable(len(inputs), ctypes.addressof(rows))
    table.rows, table.held = rows, held
    # Nothing here keeps a tensor: who lends memory counts those who hold it.
    table.inputs = tuple([i if i.like is None else i._replace(like=None) for i in inputs])
    return table


Maker = Callable[[object], Any]
"""Makes a callable of a tuple whose first item is the address of what it looks at."""

_makers: list[Maker] = []
COMPARERS: list[Maker] = []
"""What makes the function that looks at dicts, if there is one (see `runtime/call/around/held.py`)."""


def attach(library: ctypes.CDLL) -> bool:
    """Let `library`, whose text begins with `SOURCE`, see Python and torch. False where interpreters have no lock, or
    one of the two is not as expected: nothing of it that reads tensors may then be called."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    try:
        found = [
            ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in Python.FUNCTIONS
        ]
        tensors = _torch()
    except (AttributeError, LookupError, OSError):
        return False
    library.tw_attach_python(ctypes.byref(Python(*found, *map(id, Python.OBJECTS))), ctypes.byref(tensors))
    if not _reads_well(maker(library.tw_reader)):
        return False
    _makers[:] = [maker(library.tw_reader)]
    COMPARERS[:] = [maker(library.tw_comparer)]
    make = maker(library.tw_prover)
    PROVERS[:] = [lambda tensors: _prover(make, tensors)]
    return True


def _prover(make: Maker, tensors: Sequence[tuple[int, int, bool]]) -> Prover:
    rows = array("q", [int(number) for row in tensors for number in row] or [0])
    table = array("q", [len(tensors), rows.buffer_info()[0]])
    found: Prover = make((table.buffer_info()[0], table, rows))
    return found


def maker(function: Callable[..., object]) -> Maker:
    """What makes a callable of Python's by a native function."""
    address = ctypes.cast(function, ctypes.c_void_p).value  # pyright: ignore[reportArgumentType]
    assert address is not None
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(address)


ANYWHERE = (1 << 64) - 1
"""An address that does not matter."""


def alike(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """Whether tensors still have the sizes, strides, types and devices that they have now, and are kept as they are
    now (`keys_of`)."""
    now, kept = list(map(_shown, tensors)), list(map(keys_of, tensors))
    plain = all(type(t) in Torch.TYPES and t.layout is torch.strided for t in tensors)
    lies = (
        [Lies(k, 0, tuple(t.shape), t.stride(), ANYWHERE, t) for k, t in enumerate(tensors)] if plain else []
    )
    read, held = reader(lies) if plain else None, list(tensors)

    def still() -> bool:
        same = (read is not None and read(held, 0)) or list(map(_shown, held)) == now
        return same and list(map(keys_of, held)) == kept

    return still


def _shown(t: Tensor) -> tuple[object, ...]:
    strides = t.stride() if t.layout is torch.strided else None
    return t.shape, strides, t.dtype, t.device, t.layout


def keys_of(t: Tensor) -> int:
    """In which ways torch keeps a tensor, a bit each: in memory as it is, negated, in another library's form, as zeros
    without memory, with gradients and so on."""
    keys: int = torch._C._dispatch_keys(t).raw_repr()
    return keys


def reader(inputs: Sequence[Lies]) -> Reader | None:
    """What reads these inputs; None where no native side is there."""
    return table_reader(table_of(inputs)) if _makers else None


def table_reader(table: LayoutTable) -> Reader | None:
    """The same of a table."""
    return _makers[0]((ctypes.addressof(table), table)) if _makers else None


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def facts_of(t: Tensor) -> ctypes.Array[ctypes.c_int32]:
    """Numbers of a tensor's type and device, as torch's interface tells them."""
    found, library = (ctypes.c_int32 * len(Torch.FACTS))(), _library()
    handle = ctypes.c_void_p(id(t) + _offset(t, t._cdata))
    for k, name in enumerate(Torch.FACTS):
        getattr(library, name)(handle, ctypes.byref(found, k * ctypes.sizeof(ctypes.c_int32)))
    return found


def sizes_address(t: Tensor) -> int:
    """Where the sizes of a tensor stand."""
    at = ctypes.c_void_p()
    _library().aoti_torch_get_sizes(ctypes.c_void_p(id(t) + _offset(t, t._cdata)), ctypes.byref(at))
    return at.value or 0


def _torch() -> Torch:
    """Raises OSError, AttributeError or LookupError where torch is not as expected."""
    library = _library()
    functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in Torch.FUNCTIONS]
    t = torch.empty(1)
    return Torch(*functions, _offset(t, t._cdata), _offset(t, id(type(t))), *map(id, Torch.TYPES))


def _offset(of: object, word: int) -> int:
    """Bytes from the start of an object to a word that it holds. Raises LookupError if it holds none such."""
    size = ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_uint64 * (object.__sizeof__(of) // size)).from_address(id(of))
    return list(words).index(word) * size if word in words else _missing()


def _missing() -> int:
    raise LookupError("an object does not hold what is looked for")


def _reads_well(maker: Maker) -> bool:
    """Whether addresses and strides are read as torch says them, of tensors of several kinds."""
    base = torch.empty(4, 6, 8)
    made: list[Tensor] = [
        base, base[1:, ::2].transpose(0, 2), torch.nn.Parameter(base[2]), torch.empty(3, dtype=torch.int64),
        torch.empty(()), torch.empty(0, 3), torch.nn.Parameter(base[0]).detach(),
    ]  # fmt: skip
    for t in made:
        row = array("Q", [0, 0])
        as_said = table_of([Lies(0, 1, tuple(t.shape), t.stride())])
        otherwise = table_of([Lies(0, 0, (2,) * t.dim() or (2,), tuple(s + 1 for s in t.stride()) or (1,))])
        if not maker((ctypes.addressof(as_said), as_said))([t], row.buffer_info()[0]):
            return False
        if row[1] != t.data_ptr() or maker((ctypes.addressof(otherwise), otherwise))(
            [t], row.buffer_info()[0]
        ):
            return False
    return True
