"""Graphs that call a library, for tests of merging."""

from __future__ import annotations

from tilewright.ir.builder import Builder
from tilewright.ir.graph import LibraryCall, Operand, Value
from tilewright.ir.sizes import dims


def called(b: Builder, x: Value) -> Value:
    """What a library makes of a value, of its own shape."""
    call = LibraryCall("library", abs, (Operand(0),), strides=(dims.dense_strides(x.shape),))
    return b.library(call, (x,), [(x.shape, x.dtype)])[0]
