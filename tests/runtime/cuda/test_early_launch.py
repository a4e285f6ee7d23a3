"""Kernels that are launched before the kernel in front has ended: where the attribute is set, in streams and graphs, on
a driver that writes it down."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.support.cuda.launches import built_by, launches, number, printed, program

from tilewright.emit.triton.kernel import TritonSource
from tilewright.lower.variants import Variant
from tilewright.options import Options
from tilewright.runtime.cuda import device as devices
from tilewright.runtime.cuda.device import refuses_early_launch
from tilewright.runtime.cuda.driver import Device, Driver
from tilewright.runtime.cuda.kernels import CudaUnit, VariantCompiler
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.target import preset

ROW = [(0, [(0, 0), (1, 0)])]


@pytest.fixture
def newer(fake: ctypes.CDLL, library: Path) -> Device:
    """With a driver that launches early."""
    number(fake, "driver_version").value = 13000
    return _device(library)


def _device(library: Path) -> Device:
    options = Options()
    return Device(Driver(ContentStore(default_root(options)), options, str(library)), 1)


def _run(
    gpu: Device, tmp_path: Path, launched: int, *, outside: bool = False, early: bool = True,
    releases_first: bool = False,
) -> Callable[[], int]:  # fmt: skip
    def told(kernel: int, variant: Variant) -> TritonSource:
        return replace(printed(kernel, variant), outside=outside)

    compiler = VariantCompiler(told, built_by(tmp_path, early=early, releases_first=releases_first))  # type: ignore[arg-type]
    unit = CudaUnit((program(),), ("m", "n"), compiler, gpu)
    return unit.prepare(ROW * launched, array("Q", [0x1000, 0x2000]), array("q", [5, 1600]))


def _early(fake: ctypes.CDLL) -> list[int]:
    return [x.early for x in launches(fake)]


@pytest.mark.parametrize("outside", [False, True])
def test_kernels_that_wait_are_launched_early(
    newer: Device, fake: ctypes.CDLL, tmp_path: Path, outside: bool
) -> None:
    """The first of a run only where it may be another's kernel that it begins behind; in a bundle it is the graph."""
    assert newer.driver.launches_early
    run = _run(newer, tmp_path, 4, outside=outside)
    for _ in range(2):
        assert run() == 0
    assert _early(fake) == [outside, 1, 1, 1] * 2
    assert run() == 0 and number(fake, "graphs_alive").value == 1
    assert _early(fake)[8:] == [0, 1, 1, 1]
    plain, bundled = launches(fake)[1], launches(fake)[9]
    assert list(plain.grid) == list(bundled.grid) == [2, 1, 1] and plain.values[:4] == bundled.values[:4]
    assert plain.shared == 100 and plain.stream == bundled.stream and list(plain.block) == [128, 1, 1]


def test_a_bundle_stays_early_where_its_nodes_are_set(
    newer: Device, fake: ctypes.CDLL, tmp_path: Path
) -> None:
    bases = array("Q", [0x1000, 0x2000])
    unit = CudaUnit((program(),), ("m", "n"), VariantCompiler(printed, built_by(tmp_path, early=True)), newer)  # type: ignore[arg-type]
    run = unit.prepare(ROW * 4, bases, array("q", [5, 1600]))
    for _ in range(3):
        run()
    bases[0] = 0x5000
    run()
    assert number(fake, "nodes_set").value == 4 and _early(fake)[-4:] == [0, 1, 1, 1]
    assert {x.values[0] for x in launches(fake)[-4:]} == {0x5000}


def test_the_last_of_a_run_is_launched_plainly_where_it_releases_first(
    newer: Device, fake: ctypes.CDLL, tmp_path: Path
) -> None:
    """What others launch behind it may begin before it waits."""
    run = _run(newer, tmp_path, 4, outside=True, releases_first=True)
    for _ in range(3):
        run()
    assert _early(fake) == [1, 1, 1, 0] * 2 + [0, 1, 1, 0]  # the third is a bundle


@pytest.mark.parametrize("captures", [0, 1])
def test_kernels_that_do_not_wait_are_not(
    newer: Device, fake: ctypes.CDLL, tmp_path: Path, captures: int
) -> None:
    run = _run(newer, tmp_path, 4, outside=True, early=False)
    number(fake, "stream_captures").value = captures
    for _ in range(3):
        run()
    assert _early(fake) == [0] * 12


def test_a_caller_s_capture_gets_the_attribute(newer: Device, fake: ctypes.CDLL, tmp_path: Path) -> None:
    run = _run(newer, tmp_path, 4)
    number(fake, "stream_captures").value = 1
    for _ in range(3):
        run()
    assert _early(fake) == [0, 1, 1, 1] * 3 and number(fake, "graphs_alive").value == 0


@pytest.mark.parametrize("version", [0, 12020])
def test_an_old_driver_launches_in_order(
    fake: ctypes.CDLL, library: Path, tmp_path: Path, version: int
) -> None:
    number(fake, "driver_version").value = version
    gpu = _device(library)
    run = _run(gpu, tmp_path, 4, outside=True)
    for _ in range(3):
        assert run() == 0
    assert not gpu.driver.launches_early and _early(fake) == [0] * 12


def test_what_a_driver_does_not_support_is_launched_in_order(
    newer: Device, fake: ctypes.CDLL, tmp_path: Path
) -> None:
    number(fake, "fail_early").value = 801
    run = _run(newer, tmp_path, 4)
    for _ in range(4):
        assert run() == 0
    assert _early(fake) == [0] * 16 and number(fake, "graphs_alive").value == 0


FACTS: Mapping[str, str] = MappingProxyType(
    {"sm_80": "cannot begin kernels early", "gfx942": "cannot begin kernels early", "sm_90": "", "sm_100": ""}
)


@pytest.mark.parametrize("name", FACTS)
def test_which_machines_can(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = refuses_early_launch(preset(name))
    assert FACTS[name] in found and bool(found) == bool(FACTS[name])
    monkeypatch.setattr(devices.triton_compat, "can_wait", lambda: False)
    assert refuses_early_launch(preset(name))
