"""Launches on the driver that only writes down what it is asked."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.support.cuda.triton_sources import scaled

from tilewright.emit.triton.kernel import TritonSource
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, symbol
from tilewright.ir.program import Buffer, GridAxis, TileProgram
from tilewright.ir.sizes import dims
from tilewright.lower.variants import Variant
from tilewright.runtime.cuda.build import BuiltKernel
from tilewright.runtime.cuda.job import KernelFacts

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
        ("early", ctypes.c_int),
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


def program(size: int | None = None) -> TileProgram:
    """A grid of blocks of 1024 elements over n, or over a static size."""
    n = N if size is None else dims.integer(size)
    blocks = dims.floordiv(dims.add(n, dims.integer(1023)), dims.integer(1024))
    return TileProgram((Buffer("a", f32, n), Buffer("b", f32, n)), (GridAxis(Axis("g", blocks), blocks),), ())


def built_by(
    tmp_path: Path, hidden: int = 2, shared: int = 100, early: bool = False, persistent: bool = False,
    releases_first: bool = False,
) -> object:  # fmt: skip
    """Builds nothing: the image says how many arguments there are, the name which variant it is. `early`: kernels wait
    for the one in front, and with `releases_first` let the one behind begin before that; `persistent`: blocks of
    aligned ones go through many grid points."""
    made: list[TritonSource] = []

    def build(sources: Sequence[TritonSource]) -> list[BuiltKernel]:
        found: list[BuiltKernel] = []
        for source in sources:
            folder = tmp_path / f"{tmp_path.name}{len(made)}"
            folder.mkdir()
            made.append(source)
            (folder / "kernel.bin").write_bytes(str(len(source.arguments) + hidden).encode() + b"\0")
            facts = KernelFacts(
                source.entry, shared, 32 * source.warps, hidden, 1, 0, "3.6", early=early,
                releases_first=releases_first, persistent=persistent and source.variant.aligned,
            )  # fmt: skip
            (folder / "facts.json").write_text(json.dumps(facts.to_json()))
            found.append(BuiltKernel(folder, facts))
        return found

    build.made = made  # type: ignore[attr-defined]
    return build
