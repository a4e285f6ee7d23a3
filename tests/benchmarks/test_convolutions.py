"""The benchmark of convolutions as far as it goes without a GPU: what is built, what machine code has, what is told."""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.convolutions import (
    ALONE,
    FUSED,
    LAYERS,
    PASS,
    USUAL_ROWS,
    Layer,
    child,
    main,
    options,
    row,
    summary,
)  # fmt: skip
from benchmarks.gemm import build
from tests.support.cuda import fake_driver
from tests.support.cuda.launches import launches

from benchmarks import convolutions, gemm
from tilewright.options import Options
from tilewright.runtime.cuda import triton_compat
from tilewright.runtime.cuda.driver import Device
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.schedule.gpu.proposed import plain_products
from tilewright.target import MemoryKind, preset

library, fake, gpu = fake_driver.library, fake_driver.fake, fake_driver.gpu
"""Fixtures: a driver that only writes down what it is asked."""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel takes a second to build."""
    monkeypatch.setattr(plain_products, "PROPOSALS", replace(plain_products.PROPOSALS, max_kept=2))


def test_rows() -> None:
    assert len(USUAL_ROWS) == 22 and row("C8x32") == (LAYERS["C8"], 32)
    layer = LAYERS["C3"]
    x, weight, bias, out = layer.inputs(2, torch.device("cpu"))
    result = layer.convolved(x.float(), weight.float(), bias.float())
    assert result.shape == out.shape and out.is_contiguous(memory_format=torch.channels_last)
    assert layer.flops(2) == 2 * 576 * out.numel()
    assert layer.moved(2) == 2 * (x.numel() + weight.numel() + out.numel())


@pytest.mark.parametrize("name", ["C12x1", "C1", "C1xa"])
def test_what_is_no_row(name: str) -> None:
    with pytest.raises(SystemExit):
        options(["--only", name])
    assert main(["--device", "cuda"]) == 2 or torch.cuda.is_available()


def built(name: str, folder: Path) -> Mapping[str, Mapping[str, int]]:
    """The kernels of a row with products, built for an H100."""
    given = argparse.Namespace(frozen=0, device="cpu", turns=None, child_json=folder / "found.json", rounds=1)
    child(name, given)
    facts = json.loads((folder / "found.json").read_text())
    assert facts["phase"] == "done" and {"p0", "p1"} <= set(facts["ways"])
    assert name in summary({name: facts})
    return {name: told for name, told in facts["kernels"].items() if not name.endswith("merge")}


@pytest.mark.skipif(triton_compat.version() is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", ["C2x32", "C3x32"])
def test_machine_code(name: str, tmp_path: Path) -> None:
    """Matrix units of warp groups, copies of 16 bytes, nothing put aside; of halves alone, at most the bias."""
    room = preset("sm_90").level(MemoryKind.SHARED)
    assert room is not None
    for told in built(name, tmp_path).values():
        assert told["wgmma"] > 0 and told["mma_sync"] == 0 and told["spills"] == 0
        assert (
            told["copies_of_16_bytes"] > 0 and told["shorter_copies"] == 0 and told["loads_of_2_bytes"] <= 1
        )
        assert told["shared_bytes"] <= room.capacity


@pytest.mark.skipif(triton_compat.version() is None, reason="Triton is not installed")
def test_parts_and_their_merge_run_one_after_the_other(
    gpu: Device, fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gemm, "driver_device", lambda *given: gpu)
    monkeypatch.setattr(convolutions, "gpu_target", lambda *given: preset("sm_90"))
    monkeypatch.setattr(convolutions, "MOST_PARTS", 2)
    monkeypatch.setattr(convolutions, "WORTH_A_TRY", 10.0)
    layer, store = Layer("small", 64, 32, 4, 3, 1, 1), ContentStore(default_root(Options()))
    found = convolutions.ways(layer, 1, preset("sm_90"))
    ((first, _), (last, _)) = found.steps["s2p1"]
    found.kernels.scheduled = {n: s for n, s in found.kernels.scheduled.items() if n in (first, last)}
    build(found.kernels, preset("sm_90"), store)
    assert found.built == ["s2p1"] and found.between["s2p1"] == (4 * 2 * 32 * 16,)
    for (
        name,
        made,
    ) in found.kernels.built.items():  # the fake driver reads the number of arguments from the code
        (tmp_path / name).mkdir()
        count = len(found.kernels.sources[name].arguments) + made.facts.hidden
        (tmp_path / name / "kernel.bin").write_bytes(str(count).encode() + b"\0")
        found.kernels.built[name] = replace(made, folder=tmp_path / name)
    tensors = layer.inputs(1, torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", lambda *given, **kinds: tensors[2])  # what lies between
    (call,) = convolutions.calls(found, store, torch.device("cuda:0")).values()
    assert call(*tensors) is tensors[-1]
    parts, merge = (list(x.values) for x in launches(fake))
    image, weight, bias, out = (t.data_ptr() for t in tensors)
    assert parts[:3] == [image, weight, bias] and set(merge[:3]) == {bias, out}, (
        "the bias stands for what lies between"
    )


def test_the_summary_tells_the_best() -> None:
    facts = {f"{ALONE}_us": 4.0, f"{PASS}_us": 6.0, f"{FUSED}_us": 5.0, "ours_us": 3.0, "best": "p1"}
    ways = {"p0": {"median_us": 3.5, "modelled_us": 2.0}, "p1": {"median_us": 3.0, "modelled_us": 2.5}}
    told = summary({"C2x1": facts | {"ways": ways}, "C3x1": {"failed": "late"}})  # type: ignore[dict-item]
    line = next(x for x in told.splitlines() if x.startswith("C2x1"))
    assert line.split() == ["C2x1", "4.0", "6.0", "5.0", "3.5", "3.0", "p1", "1.33", "2.00", "1.67"]
