"""Lists of launches, on a driver that only writes down what it is asked: their tables, and when these are written."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cuda.launches import Launch, built_by, launches, number, printed, program

from tilewright.emit.triton.kernel import Argument, TritonSource
from tilewright.lower.variants import Variant
from tilewright.runtime.cuda import kernels
from tilewright.runtime.cuda.driver import Device
from tilewright.runtime.cuda.kernels import CudaUnit, VariantCompiler

TABLE = Argument("table", "table", "*i64", 0, True)
LIST = [(0, 0), (1, 0), (0, 64), (1, 64), (0, 128), (1, 128)]
"""The parameters of three rows."""


def listed(kernel: int, variant: Variant) -> TritonSource:
    """A kernel with a table in the place of pointers, if it is one of a list."""
    source = printed(kernel, variant)
    if not variant.listed:
        return source
    rest = tuple(a for a in source.arguments if a.kind != "pointer")
    return replace(source, entry=source.entry + "l", arguments=(TABLE, *rest))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[array[int]]:
    """Memory of the device, on the host."""
    made: list[array[int]] = []

    def memory(count: int, ordinal: int) -> tuple[int, object]:
        made.append(array("Q", [0] * (count // 8)))
        return made[-1].buffer_info()[0], made[-1]

    monkeypatch.setattr(kernels, "device_memory", memory)
    return made


@pytest.fixture
def unit(gpu: Device, tmp_path: Path) -> CudaUnit:
    compiler = VariantCompiler(listed, built_by(tmp_path))  # type: ignore[arg-type]
    ways = [(0, Variant(a, False, True)) for a in (True, False)]
    sources = [listed(k, v) for k, v in ways]
    known = dict(zip(ways, zip(sources, compiler.build(sources), strict=True), strict=True))
    return CudaUnit((program(),), ("m", "n"), compiler, gpu, known)


def seen(fake: ctypes.CDLL) -> Sequence[Launch]:
    return launches(fake)


def test_one_launch_for_all_rows(
    unit: CudaUnit, fake: ctypes.CDLL, tables: list[array[int]], gpu: Device
) -> None:
    bases = array("Q", [0x1000, 0x2000])
    run = unit.prepare([(0, LIST, 3)], bases, array("q", [5, 1600]))
    assert run() == 0
    (launch,) = seen(fake)
    assert launch.function == b"k0al" and list(launch.grid) == [6, 1, 1], "two blocks for each row"
    (table,) = tables
    assert launch.values[0] == table.buffer_info()[0] and launch.values[1] == 1600
    assert launch.values[2] == gpu.error_address
    assert list(table) == [0x1000, 0x2000, 0x1040, 0x2040, 0x1080, 0x2080]


def test_a_table_is_written_when_addresses_change(
    unit: CudaUnit, fake: ctypes.CDLL, tables: list[array[int]]
) -> None:
    bases = array("Q", [0x1000, 0x2000])
    run = unit.prepare([(0, LIST, 3)], bases, array("q", [5, 1600]))
    written = number(fake, "tables_written")
    for k, (base, times) in enumerate([(0x1000, 1), (0x1000, 1), (0x3000, 2), (0x3000, 2), (0x1000, 3)]):
        bases[0] = base
        assert run() == 0 and written.value == times, k
        assert tables[0][2] == base + 64
    bases[1] = 0x2008
    assert run() == 0 and seen(fake)[-1].function == b"k0l", "one address that is not aligned counts for all"


def test_a_bundle_finds_its_tables_written(
    unit: CudaUnit, fake: ctypes.CDLL, tables: list[array[int]]
) -> None:
    bases = array("Q", [0x1000, 0x2000])
    run = unit.prepare([(0, LIST, 3)] * 4, bases, array("q", [5, 1600]))
    for base in (0x1000, 0x1000, 0x1000, 0x5000, 0x5000):
        bases[0] = base
        assert run() == 0
    assert number(fake, "graphs_alive").value == 1 and number(fake, "nodes_set").value == 0
    assert all(t[0] == 0x5000 for t in tables) and number(fake, "tables_written").value == 8
    assert {x.values[0] for x in seen(fake)[-4:]} == {t.buffer_info()[0] for t in tables}


def test_what_is_captured_writes_its_tables_each_time(
    unit: CudaUnit, fake: ctypes.CDLL, tables: list[array[int]]
) -> None:
    run = unit.prepare([(0, LIST, 3)], array("Q", [0x1000, 0x2000]), array("q", [5, 1600]))
    captures, written = number(fake, "stream_captures"), number(fake, "tables_written")
    assert run() == 0 and written.value == 1
    captures.value = 1
    assert run() == 0 and run() == 0 and written.value == 3
    captures.value = 0
    assert run() == 0 and written.value == 4, "what was captured has not run yet"
    assert run() == 0 and written.value == 4


def test_long_tables_are_written_in_parts(
    unit: CudaUnit, fake: ctypes.CDLL, tables: list[array[int]]
) -> None:
    places = [(p, 16 * k) for k in range(700) for p in (0, 1)]
    assert unit.prepare([(0, places, 700)], array("Q", [64, 128]), array("q", [5, 16]))() == 0
    assert list(tables[0]) == [(64, 128)[p] + offset for p, offset in places]
    assert number(fake, "tables_written").value == 3


def test_a_grid_has_only_so_many_blocks(
    unit: CudaUnit, fake: ctypes.CDLL, tables: list[array[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MAX_GRID_BLOCKS", 5)
    run = unit.prepare([(0, LIST, 3)], array("Q", [0x1000, 0x2000]), array("q", [5, 1600]))
    assert run() == 0
    first, second = seen(fake)
    assert list(first.grid) == [4, 1, 1] and list(second.grid) == [2, 1, 1]
    assert len(tables) == 1 and second.values[0] == 0x1080, "the last row is a launch of its own"


def test_kernels_that_are_not_built_for_lists_are_launched_one_by_one(
    gpu: Device, fake: ctypes.CDLL, tables: list[array[int]], tmp_path: Path
) -> None:
    compiler = VariantCompiler(listed, built_by(tmp_path))  # type: ignore[arg-type]
    some = CudaUnit((program(),), ("m", "n"), compiler, gpu)
    assert some.prepare([(0, LIST, 3)], array("Q", [0x1000, 0x2000]), array("q", [5, 1600]))() == 0
    assert [list(x.values[:2]) for x in seen(fake)] == [[0x1000 + k, 0x2000 + k] for k in (0, 64, 128)]
    assert not tables


def test_rows_without_points_are_left_out(
    unit: CudaUnit, fake: ctypes.CDLL, tables: list[array[int]]
) -> None:
    assert unit.prepare([(0, LIST, 3)], array("Q", [0, 0]), array("q", [5, 0]))() == 0
    assert not seen(fake) and not tables
