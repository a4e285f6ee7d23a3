"""The benchmark of convolutions as far as it goes without a GPU: what is built, what machine code has, what is told."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.convolutions import ALONE, FUSED, LAYERS, PASS, USUAL_ROWS, child, main, options, row, summary

from tilewright.runtime.cuda import triton_compat
from tilewright.schedule.gpu import proposals
from tilewright.target import MemoryKind, preset


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel takes a second to build."""
    monkeypatch.setattr(proposals, "PROPOSALS", replace(proposals.PROPOSALS, max_kept=2))


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
    """The schedules of a row, built for an H100."""
    given = argparse.Namespace(device="cpu", turns=None, child_json=folder / "found.json", rounds=1)
    child(name, given)
    facts = json.loads((folder / "found.json").read_text())
    assert facts["phase"] == "done" and list(facts["schedules"]) == ["p0", "p1"]
    assert name in summary({name: facts})
    return facts["schedules"]


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


def test_the_summary_tells_the_best() -> None:
    facts = {f"{ALONE}_us": 4.0, f"{PASS}_us": 6.0, f"{FUSED}_us": 5.0, "ours_us": 3.0, "best": "p1"}
    schedules = {"p0": {"median_us": 3.5}, "p1": {"median_us": 3.0}}
    told = summary({"C2x1": facts | {"schedules": schedules}, "C3x1": {"failed": "late"}})  # type: ignore[dict-item]
    line = next(x for x in told.splitlines() if x.startswith("C2x1"))
    assert line.split() == ["C2x1", "4.0", "6.0", "5.0", "3.5", "3.0", "p1", "1.33", "2.00", "1.67"]
