"""The built library of code of our own, and what its routines read."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from tilewright.ir.graph import bind
from tilewright.options import Options
from tilewright.runtime.cpu.toolchain import built
from tilewright.runtime.store.cache import ContentStore

SOURCES = tuple(
    Path(__file__).parents[1] / "native" / name
    for name in (
        "strips.cpp",
        "product.cpp",
        "few_channels.cpp",
        "depthwise.cpp",
        "depthwise_chain.cpp",
        "winograd.cpp",
        "attention.cpp",
    )
)


class Task(ctypes.Structure):
    """A product as the native side reads it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "bias", "zeros")),
        *(
            (name, ctypes.c_int64)
            for name in ("columns", "inner", "taps", "height", "width", "out_height", "out_width")
        ),
        *((name, ctypes.c_int64) for name in ("kernel_width", "stride_y", "stride_x", "pad_y", "pad_x")),
        *((name, ctypes.c_int64) for name in ("dilate_y", "dilate_x", "activation")),
        *((name, ctypes.c_float) for name in ("low", "high", "scale", "shift")),
        ("affine", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("line", ctypes.c_int64),
        ("plain", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("then", ctypes.c_void_p),
    )


T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Gives what `make` makes when it is asked first, always the same, to all threads."""
    made: list[T] = []
    lock = threading.Lock()

    def get() -> T:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0]

    return get


@dataclass(frozen=True, slots=True)
class BoundProduct:
    """A product for one shape of x, as the native side runs it: the address of its task, the rows of the result, and
    how far apart those of x begin."""

    task: int
    rows: int
    stride: int


@dataclass(frozen=True, slots=True)
class Linear:
    """A product as the native side runs it: its function, and what it is given for x of a shape and strides and for a
    result of these strides (None: it does not take them so)."""

    function: int
    prepared: Callable[[Sequence[int], Sequence[int], Sequence[int]], BoundProduct | None]


LINEAR: WeakKeyDictionary[Callable[..., object], Linear] = WeakKeyDictionary()
"""What runs products of ours, by the function that a call binds."""


def linear_of(function: Callable[..., object]) -> Linear | None:
    """How the native side runs what a call calls, if it is a matrix product of ours."""
    try:
        return LINEAR.get(bind(function))
    except TypeError:  # what is no plain function may have no weak references
        return None


Packed = Callable[[], Tensor]
"""Gives a packed weight, always the same."""


def source() -> str:
    """The text of the native side."""
    return "".join(path.read_text(encoding="utf-8") for path in SOURCES)


_libraries: dict[tuple[object, ...], ctypes.CDLL] = {}
_lock = threading.Lock()


def load_library(flags: tuple[str, ...], store: ContentStore, options: Options) -> ctypes.CDLL:
    """The native side for a compiler and its flags: the same for the whole process. Raises what `build` raises."""
    key = (*flags, options.compiler, os.environ.get("CXX"))
    with _lock:
        if key not in _libraries:
            _libraries[key] = built([source()], flags, store, options)
        return _libraries[key]
