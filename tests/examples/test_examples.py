"""Each example runs, and does what it says."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def test_one_graph_serves_all_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("serve_onnx")["main"]() == 1
    assert "8 rows -> (8, 10)" in capsys.readouterr().out


def test_training_follows_eager() -> None:
    compiled, eager = example("train")["main"](3)
    assert compiled == pytest.approx(eager, rel=1e-3)


def test_an_own_attention_is_one_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    made, exact = example("own_attention")["main"](96)
    torch.testing.assert_close(made.double(), exact, atol=1e-5, rtol=1e-5)
    assert "in 1 kernel" in capsys.readouterr().out


def test_buffers_take_results() -> None:
    assert len(example("out_buffers")["main"]()) == 4


def test_an_artifact_runs_where_there_is_no_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent / "src"))
    assert example("artifact")["main"]() < 1e-5
    assert "0 graphs were compiled here; input: float32[batch, 32]" in capsys.readouterr().out


def test_a_language_model_writes_what_eager_writes(capsys: pytest.CaptureFixture[str]) -> None:
    same, tokens, graphs = example("generate")["main"](".", tokens=8)
    assert same and tokens == 8 and graphs == 1
    told = capsys.readouterr().out
    assert "random weights" in told and "8 tokens by 1 graph; the same tokens as eager" in told


def test_every_example_has_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'example("{p.stem}")' in text for p in FOLDER.glob("*.py"))
