"""The benchmark of matrix products as far as it goes without a GPU: what is built, what is launched, what is told."""

from __future__ import annotations

import argparse
import ctypes
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.gemm import CUBLAS, SHAPES, USUAL, Shape, build, calls, child, kernels, summary
from tests.support.cuda import fake_driver
from tests.support.cuda.launches import launches

from benchmarks import gemm
from tilewright.options import Options
from tilewright.runtime.cuda.driver import Device
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.schedule.gpu.proposed import plain_products
from tilewright.target import preset

SMALL = Shape(64, 128, 256)

library, fake, gpu = fake_driver.library, fake_driver.fake, fake_driver.gpu
"""Fixtures: a driver that only writes down what it is asked."""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel takes a second to build."""
    monkeypatch.setattr(plain_products, "PROPOSALS", replace(plain_products.PROPOSALS, max_kept=2))


def test_shapes() -> None:
    assert len(SHAPES) == 22 and SHAPES["64x11008x4096"] == Shape(64, 11008, 4096)
    x, weight, out = SMALL.inputs(torch.device("cpu"))
    assert torch.equal(gemm.multiply(x, weight, out), gemm.multiplied(x, weight))


def test_a_child_builds_without_a_gpu(tmp_path: Path) -> None:
    given = argparse.Namespace(device="cpu", turns=None, child_json=tmp_path / "found.json", rounds=1)
    child(SMALL, given)
    facts = json.loads((tmp_path / "found.json").read_text())
    assert facts["phase"] == "done" and list(facts["schedules"]) == [USUAL, "p0", "p1"]
    for told in facts["schedules"].values():
        assert told["modelled_us"] > 0 and told["spills"] == 0 and ":grid/" in told["schedule"]
    assert SMALL.name in summary({SMALL.name: facts})


def test_tensors_reach_the_kernel_in_its_order(
    gpu: Device,
    fake: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(gemm, "driver_device", lambda *given: gpu)
    target, store = preset("sm_90"), ContentStore(default_root(Options()))
    found = kernels(SMALL, target)
    del found.scheduled["p0"]  # its descriptors need a driver
    build(found, target, store)
    for (
        name,
        built,
    ) in found.built.items():  # the driver that is none reads the number of arguments from the code
        folder = tmp_path / name
        folder.mkdir()
        count = len(found.sources[name].arguments) + built.facts.hidden
        (folder / "kernel.bin").write_bytes(str(count).encode() + b"\0")
        found.built[name] = replace(built, folder=folder)
    tensors = SMALL.inputs(torch.device("cpu"))
    for call in calls(found, target, store, torch.device("cuda:0")).values():
        assert call(*tensors) is tensors[-1]
    seen = launches(fake)
    pointers = [tensors[p].data_ptr() for p in found.places]
    assert [list(x.values)[:3] for x in seen] == [pointers, pointers] and sorted(found.places) == [0, 1, 2]


def test_the_summary_tells_the_best() -> None:
    schedules = {USUAL: {"median_us": 9.0}, "p0": {"median_us": 4.0}, "p1": {"median_us": 3.0}}
    facts = {"cublas_us": 3.6, "speed_over_cublas": 1.2, "best": "p1", "schedules": schedules}
    line = next(x for x in summary({"a": facts, "b": {"failed": "late"}}).splitlines() if x.startswith("a "))  # type: ignore[dict-item]
    assert line.split() == ["a", "3.6", "9.0", "4.0", "3.0", "p1", "1.20"] and CUBLAS == "cublas"
