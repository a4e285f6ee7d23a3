"""Builds `vec_probe.cpp` for one compiler, instruction set and number of lanes, and calls its functions on arrays."""

from __future__ import annotations

import ctypes
import functools
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilewright.options import Options
from tilewright.runtime.cpu import toolchain
from tilewright.runtime.store.cache import ContentStore
from tilewright.target import preset

Array = npt.NDArray[np.generic]
NAMES = {
    "float": "f4",
    "double": "f8",
    "i8": "i1",
    "i16": "i2",
    "i32": "i4",
    "i64": "i8",
    "u8": "u1",
    "bool": "?",
}
INTEGERS = ("i8", "i16", "i32", "i64", "u8")
FLOATS = ("float", "double")
ISAS = ("x86-64", "x86-64-v3", "x86-64-v4")
_STORE = ContentStore(None)


def clang() -> str | None:
    """A Clang on this machine, whatever its name."""
    names = ["clang++", *(f"clang++-{n}" for n in range(22, 13, -1))]
    return next((name for name in names if shutil.which(name)), None)


def runs_here(isa: str) -> bool:
    """Whether this processor executes the instruction set."""
    here = toolchain.host_target().name
    return isa == here or (isa in ISAS and here in ISAS and ISAS.index(isa) <= ISAS.index(here))


class Probe:
    """The loaded functions."""

    def __init__(self, library: ctypes.CDLL, lanes: int, fuses: bool) -> None:
        self.library = library
        self.lanes = lanes
        self.fuses = fuses
        """Whether a * b + c is one instruction."""

    def call(self, name: str, *args: Array | int) -> None:
        """Call with arrays as addresses and numbers as int64."""
        function = getattr(self.library, name)
        function.restype = None
        function(*(ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_void_p(a.ctypes.data) for a in args))

    def unary(self, name: str, a: Array, out: str | None = None) -> Array:
        """The result of `name` on `a`, with dtype `out`."""
        b = np.empty(a.shape, out or a.dtype)
        self.call(name, np.ascontiguousarray(a), b, a.size)
        return b

    def binary(self, name: str, a: Array, b: Array, out: str | None = None) -> Array:
        """The result of `name` on `a` and `b`, with dtype `out`."""
        c = np.empty(a.shape, out or a.dtype)
        self.call(name, np.ascontiguousarray(a), np.ascontiguousarray(b), c, a.size)
        return c


@functools.cache
def probe(compiler: str | None, isa: str, lanes: int) -> Probe:
    """The probe built with `compiler` (None: the default one)."""
    text = f"#define LANES {lanes}\n" + (Path(__file__).parent / "vec_probe.cpp").read_text(encoding="utf-8")
    path = toolchain.build_texts([text], preset(isa).compiler_flags, _STORE, Options(compiler=compiler))
    return Probe(toolchain.load(path), lanes, isa != "x86-64")
