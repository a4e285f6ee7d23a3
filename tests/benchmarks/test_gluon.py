"""The kernels by hand are built for Hopper as they are meant, and the comparison survives contestants that fail."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from benchmarks.gluon import __main__ as main
from benchmarks.gluon import rows
from benchmarks.gluon.building import counts
from benchmarks.gluon.variants import ATTENTIONS, PRODUCTS

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_built(name: str) -> None:
    variant = PRODUCTS[name]
    found = counts(PRODUCTS[name].build())
    assert found["spilled_bytes"] == 0 and found["shared_bytes"] <= 232448  # type: ignore[operator]
    assert found["wgmma"] == 4 * max(1, variant.strips)  # 64 = 4 times 16 of depth, for each set of warps
    assert (found["registers_moved"] != 0) == (variant.strips != 0)
    assert found["copies_in"] and found["copies_out"]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_built(causal: bool) -> None:
    for variant in (v for v in ATTENTIONS.values() if v.persistent):  # else it is the same code
        found = counts(variant.build(causal))
        assert found["spilled_bytes"] == 0 and found["shared_bytes"] <= 232448  # type: ignore[operator]
        # Q K^T and P V: in front of the loop and in it, or in it and behind it: 128 = 8 times 16 each.
        assert found["wgmma"] == 4 * 8 * variant.strips
        assert found["copies_in"] and found["copies_out"] == variant.strips


def toy(device: torch.device) -> rows.Builders:
    """A library, one by hand that is right, one that writes nothing, one that fails, and ours."""

    def twice(x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(x * 2)

    def nothing(x: Tensor, out: Tensor) -> Tensor:
        return out

    def fails(x: Tensor, out: Tensor) -> Tensor:
        raise ValueError("no such kernel")

    def made(name: str, call: rows.Call) -> dict[str, rows.Call]:
        return {name: call}

    calls = {"library": twice, "gluon a": twice, "gluon b": nothing, "gluon c": fails, "tilewright": twice}
    return {name: lambda n=name, c=call: made(n, c) for name, call in calls.items()}


def toy_row() -> rows.Row:
    """Twice the input."""

    def exact(inputs: tuple[Tensor, ...]) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, 4), inputs[0].float() * 2

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        return torch.ones(4, 8), torch.empty(4, 8)

    return rows.Row(inputs, toy, exact, "library", 1e6, 1 << 22, has_out=True)


def test_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rows, "ROWS", {"toy": toy_row, "late": toy_row})
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"rows": {"late": {"done": True}}, "refused": {}, "until": time.time() + 99}))
    assert main.child(argparse.Namespace(child=path, device="cpu", only=[], rounds=2)) == 0
    found = json.loads(path.read_text())["rows"]
    who = found["toy"]["contestants"]
    assert found["toy"]["done"] and found["toy"]["best_by_hand"] == "gluon a"
    assert (
        who["gluon a"]["right"]
        and not who["gluon b"]["right"]
        and "no such kernel" in who["gluon c"]["traceback"]
    )
    assert found["toy"]["hand_over_ours"] > 0 and "no such kernel" in capsys.readouterr().out
    assert "WRONG" in main.summary(found) and "no such kernel" in main.summary(found)


def test_who_kills_the_process_is_left_out() -> None:
    state = {
        "rows": {
            "a": {"done": True, "trying": "x"},
            "b": {"trying": "gluon b", "failed": "Trace\nLost: not ended"},
            "c": {"contestants": {}},
        },
        "refused": {},
    }
    main.blame(state, main.LOST)
    assert state["refused"] == {"gluon b": "Lost: not ended"} and state["rows"]["c"]["done"]
    assert "done" not in state["rows"]["b"]


def test_rows_run_in_a_process_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    given = argparse.Namespace(json=path, device="cpu", only=[], rounds=1, commit="", budget=-1.0)
    found = main.measure_all(given)
    assert set(found) == set(rows.ROWS) and {f["not_available"] for f in found.values()} == {"no time left"}
    assert json.loads(path.read_text())["rows"] == found


def test_attention_without_a_mask_is_exact() -> None:
    q, k, v = (torch.randn(1, 2, 16, rows.DEPTH).half() for _ in range(3))
    right = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    torch.testing.assert_close(rows.Full()(q, k, v).float(), right, atol=2e-3, rtol=0)
    for causal in (False, True):
        row = rows.attended(16, causal)
        given = tuple(torch.randn(rows.BATCH, rows.HEADS, 16, rows.DEPTH).half() for _ in range(3))
        right = torch.nn.functional.scaled_dot_product_attention(
            *(t.float() for t in given), is_causal=causal
        )
        assert max(rows.errors(row, given, {"it": right}).values()) < 1e-6
        assert row.flops == 4 * 64 * 16 * 16 * 128 / (2 if causal else 1)
