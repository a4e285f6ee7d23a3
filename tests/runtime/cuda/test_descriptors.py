"""Tensor descriptors of launches: what the driver is told, when they are made again, and who does without."""

from __future__ import annotations

import ctypes
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cuda.launches import N, launches, number, printed

from tilewright.emit.triton.kernel import Argument, TritonSource
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis
from tilewright.ir.program import Buffer, Descriptor, GridAxis, TileProgram
from tilewright.ir.sizes import dims
from tilewright.lower.variants import Variant
from tilewright.runtime.cuda.build import BuiltKernel
from tilewright.runtime.cuda.driver import Device, DriverError
from tilewright.runtime.cuda.job import Box, KernelFacts
from tilewright.runtime.cuda.kernels import CudaUnit, VariantCompiler

BOX = Box(7, 3, (1, 32, 32))
FLAWED = 13010


class Encoded(ctypes.Structure):
    """One descriptor as the fake driver wrote it down."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("swizzle", ctypes.c_int),
        ("promotion", ctypes.c_int),
        ("fill", ctypes.c_int),
        ("rank", ctypes.c_uint),
        ("place", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("extents", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 5),
        ("box", ctypes.c_uint32 * 5),
    )


def encoded(fake: ctypes.CDLL) -> list[Encoded]:
    return list((Encoded * 64).in_dll(fake, "log_maps"))[: number(fake, "maps_made").value]


def program() -> TileProgram:
    """A grid of two points over a tensor of n - 16 pages of 20 rows of 64."""
    grid = (GridAxis(Axis("g", dims.integer(2)), dims.integer(2)),)
    return TileProgram((Buffer("a", f32, dims.mul(N, dims.integer(1280))), Buffer("b", f32, N)), grid, ())


def described(kernel: int, variant: Variant) -> TritonSource:
    """Both pointers of a kernel; the aligned variant also has the first as pages, 32 bytes behind its base."""
    source = printed(kernel, variant)
    pages = Descriptor(
        dims.integer(8),
        (dims.sub(N, dims.integer(16)), dims.integer(20), dims.integer(64)),
        (dims.integer(1280), dims.integer(64), dims.ONE),
        (1, 32, 64),
    )
    if not variant.aligned:
        return source
    last = Argument("descriptor", "d0", "tensordesc<fp32[1,32,64]>", 0, False, pages)
    return replace(source, arguments=(*source.arguments, last))


@pytest.fixture
def unit(gpu: Device, tmp_path: Path) -> CudaUnit:
    def build(sources: Sequence[TritonSource]) -> list[BuiltKernel]:
        found: list[BuiltKernel] = []
        for source in sources:
            folder = tmp_path / f"{tmp_path.name}{source.entry}"
            folder.mkdir()
            boxes = tuple(BOX for a in source.arguments if a.descriptor is not None)
            arguments = len(source.arguments) + 6 * len(boxes) + 2
            (folder / "kernel.bin").write_bytes(str(arguments).encode() + b"\0")
            facts = KernelFacts(source.entry, 100, 128, 2, 1, 0, "3.6", boxes)
            (folder / "facts.json").write_text(json.dumps(facts.to_json()))
            found.append(BuiltKernel(folder, facts))
        return found

    return CudaUnit((program(),), ("m", "n"), VariantCompiler(described, build), gpu)


def prepared(unit: CudaUnit, n: int, bases: array[int], count: int = 1) -> Callable[[], int]:
    return unit.prepare([(0, [(0, 64), (1, 0)])] * count, bases, array("q", [0, n]))


def test_what_the_driver_is_told(unit: CudaUnit, gpu: Device, fake: ctypes.CDLL) -> None:
    assert prepared(unit, 48, array("Q", [0x1000, 0x2000]))() == 0
    (seen,), (map_,) = launches(fake), encoded(fake)
    assert (map_.type, map_.swizzle, map_.promotion, map_.fill, map_.rank) == (7, 3, 2, 0, 3)
    assert map_.base == 0x1000 + 64 + 32 and map_.place % 64 == 0
    assert list(map_.extents)[:3] == [64, 20, 32] and list(map_.strides)[:2] == [256, 5120]
    assert list(map_.box)[:3] == [32, 32, 1], "the box of one copy, not the block"
    assert seen.function == b"k0a"
    whole = [0x1040, 0x2000, 48, gpu.error_address, map_.base, 32, 20, 64, 1280, 64, 1, 0, 0]
    assert list(seen.values)[: len(whole)] == whole


def test_descriptors_are_made_again_where_their_pointer_moved(unit: CudaUnit, fake: ctypes.CDLL) -> None:
    bases = array("Q", [0x1000, 0x2000])
    run = prepared(unit, 48, bases)
    for a, b, count in ((0x1000, 0x2000, 1), (0x1000, 0x3000, 1), (0x5000, 0x3000, 2), (0x5000, 0x3000, 2)):
        bases[0], bases[1] = a, b
        assert run() == 0 and len(encoded(fake)) == count
        assert launches(fake)[-1].values[4] == a + 96


def test_bundles_carry_the_right_descriptors(unit: CudaUnit, fake: ctypes.CDLL) -> None:
    bases = array("Q", [0x1000, 0x2000])
    run = prepared(unit, 48, bases, 4)
    for turn, base in enumerate((0x1000, 0x1000, 0x1000, 0x7000, 0x7000)):
        bases[0] = base
        assert run() == 0
        assert {x.values[4] for x in launches(fake)[4 * turn :]} == {base + 96}
    assert number(fake, "graphs_alive").value == 1 and number(fake, "nodes_set").value == 4
    assert len(encoded(fake)) == 8


@pytest.mark.parametrize(("n", "base"), [(48, 0x1004), (49, 0x1000), (16, 0x1000)])
def test_calls_without_descriptors(unit: CudaUnit, fake: ctypes.CDLL, n: int, base: int) -> None:
    """Addresses and sizes that are not aligned, and empty tensors, of which there are none."""
    assert prepared(unit, n, array("Q", [base, 0x2000]))() == 0
    (seen,) = launches(fake)
    assert seen.function == b"k0" and not encoded(fake) and list(seen.values)[4:6] == [0, 0]


def test_a_driver_that_refuses(unit: CudaUnit, fake: ctypes.CDLL) -> None:
    run = prepared(unit, 48, array("Q", [0x1000, 0x2000]))
    number(fake, "fail_map").value = 700
    with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        run()
    assert not launches(fake)
    number(fake, "fail_map").value = 0
    assert run() == 0 and len(encoded(fake)) == 1


@pytest.mark.parametrize(
    ("version", "n", "kept"), [(FLAWED, 32, False), (FLAWED, 48, True), (FLAWED + 10, 32, True)]
)
def test_small_tensors_and_older_drivers(
    gpu: Device, unit: CudaUnit, fake: ctypes.CDLL, version: int, n: int, kept: bool
) -> None:  # fmt: skip
    """A bit that drivers of CUDA 13.1 and before set must not be set below 128 KiB."""
    number(fake, "driver_version").value = version
    assert gpu.driver.native.tw_cuda_open(fake._name.encode(), ctypes.byref(ctypes.c_char_p())) == 0
    run = prepared(unit, n, array("Q", [0x1000, 0x2000]))
    assert run() == 0
    (made,) = encoded(fake)
    words = (ctypes.c_uint64 * 2).from_address(made.place)
    assert list(words) == [made.base, 1 << 21 if kept else 0]
