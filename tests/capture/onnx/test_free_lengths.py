"""Dims of free length stay free: pooled ones in one graph for all lengths, and cut ones of as many as data say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from tests.support.onnx_models import ints, model, node, value

import tilewright

POOLS: dict[str, tuple[str, dict[str, object]]] = {
    "maxima": ("MaxPool", {"kernel_shape": [3], "pads": [1, 1], "strides": [2]}),
    "means": ("AveragePool", {"kernel_shape": [5], "pads": [2, 2], "count_include_pad": 1}),
    "norms": ("LpPool", {"kernel_shape": [3], "p": 2}),
    "all": ("GlobalMaxPool", {}),
}


@pytest.mark.parametrize("name", POOLS)
def test_rows_of_any_length(name: str, tmp_path: Path) -> None:
    kind, attributes = POOLS[name]
    made = model([node(kind, ["x"], ["y"], **attributes)], [value("x", ["n", 3, "length"])], ["y"], {})
    onnx.save(made, tmp_path / "pool.onnx")
    compiled = tilewright.compile(tmp_path / "pool.onnx")
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    tilewright.reset()
    for n, length in ((2, 9), (1, 17), (3, 40), (2, 9)):
        x = np.random.default_rng(length).standard_normal((n, 3, length)).astype(np.float32)
        (want,) = session.run(None, {"x": x})
        np.testing.assert_allclose(compiled(torch.from_numpy(x)), want, rtol=1e-5, atol=1e-5)
    assert tilewright.stats().graphs == 1


FARTHEST = 2**63 - 1
CUTS = [(0, 2, 1), (-2, FARTHEST, 1), (-4, -1, 2), (2, 5, 1)]
BACKWARDS = [(-2, -FARTHEST, -1), (3, 0, -1), (FARTHEST, -3, -2)]


@pytest.mark.parametrize("cut", CUTS + BACKWARDS)
def test_slices_of_as_many_as_data_say(cut: tuple[int, int, int], tmp_path: Path) -> None:
    """They ran into "Could not guard on data-dependent expression"."""
    constants = {k: ints(v) for k, v in zip(("start", "end", "step"), cut, strict=True)}
    nodes = [
        node("Greater", ["x", "zero"], ["positive"]),
        node("NonZero", ["positive"], ["places"]),
        node("Slice", ["places", "start", "end", "axis", "step"], ["some"]),
        node("Squeeze", ["some", "first"], ["index"]),
        node("Gather", ["x", "index"], ["y"]),
    ]
    extra = {"zero": np.zeros(1, np.float32), "axis": ints(1), "first": ints(0)}
    made = model(nodes, [value("x", ["n"])], ["y"], constants | extra)
    onnx.save(made, tmp_path / "cut.onnx")
    compiled = tilewright.compile(tmp_path / "cut.onnx")
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    for n, positive in ((9, 6), (1, 1), (3, 0), (5, 2), (30, 11)):
        x = np.where(np.arange(n) < positive, 1, -1).astype(np.float32) * np.arange(
            1, n + 1, dtype=np.float32
        )
        (want,) = session.run(None, {"x": x})
        np.testing.assert_array_equal(compiled(torch.from_numpy(x)), want)
    if cut in CUTS:
        assert "not proved" not in str(compiled.coverage)


@pytest.mark.parametrize("cut", [(3, 0, -1), (1, FARTHEST, 3), (-5, -1, 2), (-2, -FARTHEST, -1), (-4, 1, -1)])
def test_slices_of_rows_of_any_length(cut: tuple[int, int, int], tmp_path: Path) -> None:
    """What is left of few elements, and of none: of a slice that walks backwards from the fourth there were -1."""
    constants = {k: ints(v) for k, v in zip(("start", "end", "step"), cut, strict=True)}
    nodes = [node("Slice", ["x", "start", "end", "axis", "step"], ["some"]), node("Relu", ["some"], ["y"])]
    made = model(nodes, [value("x", ["n", "length"])], ["y"], constants | {"axis": ints(1)})
    onnx.save(made, tmp_path / "cut.onnx")
    compiled = tilewright.compile(tmp_path / "cut.onnx")
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    for length in (20, 7, 4, 2, 1, 0):
        x = np.random.default_rng(length).standard_normal((3, length)).astype(np.float32)
        (want,) = session.run(None, {"x": x})
        np.testing.assert_array_equal(compiled(torch.from_numpy(x)), want)
    assert "not proved" not in "".join(str(c.coverage) for c in tilewright.compilations())


@pytest.mark.parametrize(
    "attributes", [{"is_causal": 1}, {}, {"softcap": 2.0}], ids=["causal", "plain", "capped"]
)
def test_attention_of_as_many_heads_as_there_are(attributes: dict[str, object], tmp_path: Path) -> None:
    """Whether keys have fewer heads than queries only a call tells."""
    given = [value(n, [f"{n}_batch", f"{n}_heads", f"{n}_length", "channels"]) for n in "qkv"]
    made = model([node("Attention", ["q", "k", "v"], ["y"], **attributes)], given, ["y"], {}, opset=23)
    onnx.save(made, tmp_path / "attention.onnx")
    compiled = tilewright.compile(tmp_path / "attention.onnx")
    reference = ReferenceEvaluator(made)
    for heads, groups, length in ((4, 2, 5), (4, 4, 7), (6, 2, 5)):
        q, k, v = (torch.randn(2, n, length, 8) for n in (heads, groups, groups))
        (want,) = reference.run(None, {"q": q.numpy(), "k": k.numpy(), "v": v.numpy()})
        np.testing.assert_allclose(compiled(q, k, v), want, rtol=1e-4, atol=1e-5)
