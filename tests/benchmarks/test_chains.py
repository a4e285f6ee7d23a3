"""The chains can be made, and what is said of their times."""

from __future__ import annotations

import pytest
import torch
from benchmarks.chain_cases import CHAINS, Net

from benchmarks import chains


def test_there_are_enough() -> None:
    assert len(CHAINS) >= 40


@pytest.mark.parametrize("name", ["gated mlp 16", "window attention", "inverted residual", "modulated norm"])
def test_a_chain_computes(name: str) -> None:
    chain = CHAINS[name]
    small = type(chain)(chain.layers, chain.body, (2, *chain.shape[1:]))
    net, x = small.make(torch.device("cpu"), torch.float32)
    assert isinstance(net, Net) and bool(net(x).isfinite().all())


def test_speeds_are_over_the_best_peer_that_is_right() -> None:
    contestants = {
        "eager nchw": {"right": True, "median_us": 30.0},
        "inductor nchw": {"right": False, "median_us": 5.0},
        "tilewright nchw": {"right": True, "median_us": 10.0},
        "tilewright nhwc": {"not_available": "no"},
    }
    assert chains.speeds({"contestants": contestants}) == {"nchw": 3.0}
    assert chains.speeds({}) == {}


def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert chains.main(["--device", "cpu"]) == 2
    assert "on a GPU" in capsys.readouterr().err
