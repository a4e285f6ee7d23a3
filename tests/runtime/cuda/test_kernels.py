"""Launch records, variants and contexts, on a driver that only writes down what it is asked."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.cuda.launches import N, built_by, launches, number, printed, program
from tests.support.cuda.triton_sources import product, scaled
from tests.support.triton.corpus import BY_NAME, entry

from tilewright.emit.triton.kernel import TritonSource
from tilewright.errors import BuildError, UnsupportedError, VerifyError
from tilewright.ir.expr import call, symbol
from tilewright.ir.program import TileProgram
from tilewright.ir.sizes import dims
from tilewright.lower.variants import Variant, aligning
from tilewright.options import Options
from tilewright.runtime.cuda import kernels
from tilewright.runtime.cuda.driver import Device, Driver, DriverError, DriverOutOfMemory
from tilewright.runtime.cuda.kernels import CudaUnit, VariantCompiler, needed, usual
from tilewright.runtime.store.cache import ContentStore, default_root

STREAM = 0x5EED


def unit(gpu: Device, tmp_path: Path, *programs: TileProgram, **rest: int) -> CudaUnit:
    return CudaUnit(
        programs or (program(),), ("m", "n"), VariantCompiler(printed, built_by(tmp_path, **rest)), gpu
    )  # type: ignore[arg-type]


def test_arguments_of_a_launch(gpu: Device, fake: ctypes.CDLL, tmp_path: Path) -> None:
    run = unit(gpu, tmp_path).prepare(
        [(0, [(2, 8), (0, 0)])], array("Q", [0x1000, 0, 0x2000]), array("q", [5, 1500])
    )
    assert run() == 0
    (seen,) = launches(fake)
    assert seen.function == b"k0" and list(seen.grid) == [2, 1, 1] and list(seen.block) == [128, 1, 1]
    assert seen.shared == 100 and seen.stream == STREAM + 1
    assert list(seen.values)[:6] == [0x2008, 0x1000, 1500, gpu.error_address, 0, 0]


@pytest.mark.parametrize(("address", "blocks"), [(0x1000, 3), (0x1004, 7)])
def test_no_more_blocks_than_run_at_once(
    gpu: Device, fake: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: int, blocks: int
) -> None:
    """Of kernels whose blocks go through many grid points: one variant may be one, and another not."""
    monkeypatch.setattr("tilewright.runtime.cuda.driver.multiprocessors", lambda ordinal: 3)
    places, bases = [[(0, 0), (1, 0)]] * 4, array("Q", [address, 0x2000])
    for sizes, wanted in (([0, 7 * 1024], blocks), ([0, 2 * 1024], 2)):
        (tmp_path / str(sizes[1])).mkdir()
        run = unit(gpu, tmp_path / str(sizes[1]), persistent=True).prepare(
            [(0, p) for p in places], bases, array("q", sizes)
        )
        for _ in range(4):  # the last ones as one bundle
            assert run() == 0
            assert {x.grid[0] for x in launches(fake)[-4:]} == {wanted}


def test_addresses_are_read_when_it_runs(gpu: Device, fake: ctypes.CDLL, tmp_path: Path) -> None:
    bases = array("Q", [0x1000, 0x2000])
    run = unit(gpu, tmp_path).prepare([(0, [(0, 0), (1, 0)])] * 2, bases, array("q", [5, 7]))
    for first in (0x1000, 0x3000):
        bases[0] = first
        assert run() == 0
    assert [list(x.values)[:2] for x in launches(fake)] == [[0x1000, 0x2000]] * 2 + [[0x3000, 0x2000]] * 2


@pytest.mark.parametrize(
    ("n", "base", "offset", "name"),
    [
        (1600, 0x1000, 32, b"k0a"),
        (1600, 0x1000, 8, b"k0"),
        (1600, 0x1004, 0, b"k0"),
        (1601, 0x1000, 0, b"k0"),
        (1 << 31, 0x1000, 0, b"k0aw"),
        ((1 << 31) + 1, 0x1000, 0, b"k0w"),
    ],
)
def test_the_most_special_variant_that_a_call_permits(
    gpu: Device, fake: ctypes.CDLL, tmp_path: Path, n: int, base: int, offset: int, name: bytes
) -> None:
    run = unit(gpu, tmp_path).prepare(
        [(0, [(0, offset), (1, 0)])], array("Q", [base, 0x4000]), array("q", [0, n])
    )
    assert run() == 0
    (seen,) = launches(fake)
    assert seen.function == name and seen.values[2] == n


def test_variants_are_built_when_needed(gpu: Device, fake: ctypes.CDLL, tmp_path: Path) -> None:
    build = built_by(tmp_path)
    some = CudaUnit((program(), program(1 << 33)), ("m", "n"), VariantCompiler(printed, build), gpu)  # type: ignore[arg-type]
    made: list[TritonSource] = build.made  # type: ignore[attr-defined]
    assert usual(program()) == (Variant(True, False),)
    assert usual(program(1 << 33)) == (Variant(True, True),)

    def runs(n: int, *bases: int) -> list[str]:
        """The variants that were built for a run."""
        before = len(made)
        assert some.prepare([(0, [(0, 0), (1, 0)])], array("Q", bases), array("q", [0, n]))() == 0
        return sorted(x.entry for x in made[before:])

    assert runs(960, 0x1000, 0x2000) == ["k0a"]
    assert runs(999, 0x1000, 0x2000) == ["k0"] and runs(998, 0x1000, 0x2000) == []
    assert runs(1 << 40, 0x1000, 0x2000) == ["k0aw"]
    assert runs(1 << 40, 0x1004, 0x2000) == ["k0w"] and runs(1 << 40, 0x1004, 0x2000) == []
    assert [x.function for x in launches(fake)] == [b"k0a", b"k0", b"k0", b"k0aw", b"k0w", b"k0w"]


def test_addresses_that_ask_for_another_variant_get_it(
    gpu: Device, fake: ctypes.CDLL, tmp_path: Path
) -> None:
    """In a run of several kernels, of which some have what they need; nothing is launched twice."""
    build = built_by(tmp_path)
    some = CudaUnit((program(64), program(64)), ("m", "n"), VariantCompiler(printed, build), gpu)  # type: ignore[arg-type]
    made: list[TritonSource] = build.made  # type: ignore[attr-defined]
    bases = array("Q", [0x1000, 0x2000])
    run = some.prepare([(k, [(k, 0), (k, 32)]) for k in (0, 1, 0, 1, 0)], bases, array("q", [0, 64]))
    for _ in range(4):  # the last ones as a bundle
        assert run() == 0
    assert sorted(x.entry for x in made) == ["k0a", "k1a"]
    bases[1] = 0x2008
    assert run() == 0
    assert sorted(x.entry for x in made) == ["k0a", "k1", "k1a"]
    assert [x.function for x in launches(fake)[20:]] == [b"k0a", b"k1", b"k0a", b"k1", b"k0a"]
    bases[1] = 0x3000
    assert run() == 0
    assert [x.function for x in launches(fake)[25:]] == [b"k0a", b"k1a", b"k0a", b"k1a", b"k0a"]
    assert len(made) == 3


def test_calls_of_exact_sizes_need_one_variant() -> None:
    rows = entry(BY_NAME["softmax"], True).scheduled.program
    (name,) = aligning(rows)
    of = {str(s): 64 for s in (N, symbol("m"))} | {name: 64}
    assert needed(rows, of) == (Variant(True, False),) and len(usual(rows)) == 2
    assert needed(rows, of | {name: 65}) == (Variant(False, False),)


def test_grids_without_points_and_grids_that_are_too_large(
    gpu: Device, fake: ctypes.CDLL, tmp_path: Path
) -> None:
    some = unit(gpu, tmp_path)
    assert some.prepare([(0, [(0, 0), (1, 0)])], array("Q", [0, 0]), array("q", [0, 0]))() == 0
    assert not launches(fake)
    with pytest.raises(UnsupportedError, match="blocks"):
        some.prepare([(0, [(0, 0), (1, 0)])], array("Q", [0, 0]), array("q", [0, 1 << 42]))


def test_the_device_s_context_is_current_for_a_launch_only(
    gpu: Device, fake: ctypes.CDLL, tmp_path: Path
) -> None:
    run = unit(gpu, tmp_path).prepare([(0, [(0, 0), (1, 0)])], array("Q", [0, 0]), array("q", [0, 9]))
    current = ctypes.c_void_p.in_dll(fake, "current_context")
    for before in (None, 0xABC0):
        current.value = before
        run()
        assert current.value == before and ctypes.c_int.in_dll(fake, "context_depth").value == 0
    first, second = launches(fake)
    assert first.context == second.context not in (None, 0xABC0)


def test_a_failed_check_is_reported_by_the_next_run(gpu: Device, fake: ctypes.CDLL, tmp_path: Path) -> None:
    run = unit(gpu, tmp_path).prepare([(0, [(0, 0), (1, 0)])], array("Q", [0, 0]), array("q", [0, 9]))
    run()
    ctypes.c_int32.from_address(launches(fake)[0].values[3]).value = 7
    assert run() == 7 and len(launches(fake)) == 1, "nothing more is launched"
    assert run() == 0 and len(launches(fake)) == 2
    ctypes.c_int32.from_address(gpu.error_address).value = 3
    assert gpu.failed() == 3 and gpu.failed() == 0


def test_errors_of_the_driver(gpu: Device, fake: ctypes.CDLL, tmp_path: Path) -> None:
    run = unit(gpu, tmp_path).prepare([(0, [(0, 0), (1, 0)])], array("Q", [0, 0]), array("q", [0, 9]))
    ctypes.c_int.in_dll(fake, "fail_launch").value = 700
    with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        run()
    ctypes.c_int.in_dll(fake, "fail_load").value = 1
    (tmp_path / "x").mkdir()
    with pytest.raises(DriverError, match="could not load k0"):
        unit(gpu, tmp_path / "x").prepare([(0, [(0, 0), (1, 0)])], array("Q", [0, 0]), array("q", [0, 9]))
    with pytest.raises(DriverError, match="open device 9"):
        Device(gpu.driver, 9)


def test_a_driver_without_memory(gpu: Device, fake: ctypes.CDLL, tmp_path: Path) -> None:
    """Both for a launch and for a load torch's own kind of error is raised, which callers try again after."""
    run = unit(gpu, tmp_path).prepare([(0, [(0, 0), (1, 0)])], array("Q", [0, 0]), array("q", [0, 9]))
    ctypes.c_int.in_dll(fake, "fail_launch").value = 2
    with pytest.raises(DriverOutOfMemory) as refused:
        run()
    assert isinstance(refused.value, torch.OutOfMemoryError) and not launches(fake)
    ctypes.c_int.in_dll(fake, "fail_launch").value = 0
    assert run() == 0 and len(launches(fake)) == 1
    ctypes.c_int.in_dll(fake, "fail_load").value = 2
    (tmp_path / "x").mkdir()
    other = unit(gpu, tmp_path / "x")
    given = [(0, [(0, 0), (1, 0)])], array("Q", [0, 0]), array("q", [0, 9])
    with pytest.raises(DriverOutOfMemory, match="could not load k0"):
        other.prepare(*given)
    ctypes.c_int.in_dll(fake, "fail_load").value = 0
    assert other.prepare(*given)() == 0, "what did not load is loaded when there is memory again"


def test_kernels_are_loaded_once_and_ask_for_their_shared_memory(
    gpu: Device, fake: ctypes.CDLL, tmp_path: Path
) -> None:
    some = unit(gpu, tmp_path, shared=100_000)
    for n in (9, 10):
        some.prepare([(0, [(0, 0), (1, 0)])], array("Q", [0, 0]), array("q", [0, n]))()
    first, second = launches(fake)
    assert first.shared == 100_000
    assert first.address == second.address


def test_variants_with_other_arguments_are_a_defect(gpu: Device, tmp_path: Path) -> None:
    def odd(kernel: int, variant: Variant) -> TritonSource:
        return product(64) if variant.aligned else replace(scaled(variant), entry="k9")

    some = CudaUnit((program(64),), ("m", "n"), VariantCompiler(odd, built_by(tmp_path)), gpu)  # type: ignore[arg-type]
    run = some.prepare([(0, [(0, 0), (1, 0), (1, 0)])], array("Q", [8, 0]), array("q", [0, 64]))
    with pytest.raises(VerifyError, match="differ in their arguments"):
        run()


def test_long_runs_are_launched_as_one_bundle(gpu: Device, fake: ctypes.CDLL, tmp_path: Path) -> None:
    bases = array("Q", [0x1000, 0x2000, 0x3000])
    order = [[(0, 0), (1, 0)], [(1, 0), (2, 0)], [(2, 0), (1, 64)], [(1, 64), (2, 64)]]
    run = unit(gpu, tmp_path).prepare([(0, p) for p in order], bases, array("q", [0, 32]))
    wanted = [[bases[a] + i, bases[b] + j] for (a, i), (b, j) in order]
    for turn in range(4):
        assert run() == 0
        seen = launches(fake)[4 * turn :]
        assert [list(x.values)[:2] for x in seen] == wanted and {x.stream for x in seen} == {STREAM + 1}
        assert number(fake, "graphs_alive").value == (turn >= 2)
    assert number(fake, "nodes_set").value == 0
    bases[2] = 0x5000
    run()
    assert number(fake, "nodes_set").value == 3, "those that use it"
    wanted = [[bases[a] + i, bases[b] + j] for (a, i), (b, j) in order]
    assert [list(x.values)[:2] for x in launches(fake)[-4:]] == wanted
    del run
    assert number(fake, "graphs_alive").value == 0


def test_a_bundle_is_not_used_where_it_does_not_fit(gpu: Device, fake: ctypes.CDLL, tmp_path: Path) -> None:
    bases = array("Q", [0x1000, 0x2000])
    run = unit(gpu, tmp_path).prepare([(0, [(0, 0), (1, 0)])] * 4, bases, array("q", [0, 32]))
    for _ in range(3):
        run()
    bases[0] = 0x1004
    run()
    assert [x.function for x in launches(fake)] == [b"k0a"] * 12 + [b"k0"] * 4
    bases[0] = 0x1010
    number(fake, "stream_captures").value = 1
    run()
    assert number(fake, "nodes_set").value == 0 and launches(fake)[-1].values[0] == 0x1010
    number(fake, "stream_captures").value = 0
    run()
    assert number(fake, "nodes_set").value == 4, "what changed while it was not used"
    assert [list(x.values)[:2] for x in launches(fake)[-4:]] == [[0x1010, 0x2000]] * 4


def test_without_bundles(
    gpu: Device, fake: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number(fake, "fail_graph").value = 1
    row = [(0, [(0, 0), (1, 0)])]
    some = unit(gpu, tmp_path)
    run = some.prepare(row * 4, array("Q", [0, 0]), array("q", [0, 32]))
    for _ in range(4):
        assert run() == 0
    assert len(launches(fake)) == 16 and number(fake, "graphs_alive").value == 0
    number(fake, "fail_graph").value = 0
    few = some.prepare(row * 3, array("Q", [0, 0]), array("q", [0, 32]))
    monkeypatch.setattr(kernels, "GPU_WORK", replace(kernels.GPU_WORK, min_bundled_launches=0))
    never = some.prepare(row * 9, array("Q", [0, 0]), array("q", [0, 32]))
    for _ in range(4):
        assert few() == never() == 0
    assert number(fake, "graphs_alive").value == 0


def test_no_driver(tmp_path: Path) -> None:
    options = Options()
    with pytest.raises(BuildError, match="cannot be used"):
        Driver(ContentStore(default_root(options)), options, str(tmp_path / "libnone.so"))
    other = Driver.__new__(Driver)
    with pytest.raises(BuildError, match="cuInit"):
        other.__init__(ContentStore(default_root(options)), options, "libm.so.6")  # type: ignore[misc]


def test_the_first_bucket_that_serves_is_taken(gpu: Device, fake: ctypes.CDLL, tmp_path: Path) -> None:
    short, longer = (call("le", N, dims.integer(b)) for b in (1500, 3000))
    some = CudaUnit(
        (program(), program(), program()), ("m", "n"), VariantCompiler(printed, built_by(tmp_path)), gpu,  # type: ignore[arg-type]
        buckets={0: [(short, 1), (longer, 2)]},
    )  # fmt: skip
    bases = array("Q", [0x1001, 0, 0x2001])
    for n in (1500, 1501, 4000):
        assert some.prepare([(0, [(0, 0), (2, 0)])], bases, array("q", [5, n]))() == 0
    assert [seen.function[:2] for seen in launches(fake)] == [b"k1", b"k2", b"k0"]
