"""Launches on the driver that only writes down what it is asked."""

from __future__ import annotations

import ctypes
from dataclasses import replace

from tests.support.cuda.triton_sources import scaled

from tilewright.emit.triton.kernel import TritonSource
from tilewright.ir.expr import symbol
from tilewright.lower.variants import Variant

N = symbol("n")


class Launch(ctypes.Structure):
    """One launch as the fake driver wrote it down."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("values", ctypes.c_uint64 * 16),
        ("context", ctypes.c_void_p),
    )

    @property
    def function(self) -> bytes:
        """Its name, which stands first in what the address shows."""
        return ctypes.string_at(self.address)


def launches(fake: ctypes.CDLL) -> list[Launch]:
    count = ctypes.c_int.in_dll(fake, "log_count").value
    return list((Launch * 64).in_dll(fake, "log_launches"))[:count]


def printed(kernel: int, variant: Variant) -> TritonSource:
    source = scaled(variant, entry=f"k{kernel}" + "a" * variant.aligned + "w" * variant.wide)
    return replace(
        source, arguments=tuple(replace(a, index=1) if a.kind == "size" else a for a in source.arguments)
    )


def number(fake: ctypes.CDLL, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(fake, name)
