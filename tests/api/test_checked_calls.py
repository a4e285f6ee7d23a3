"""The short way of model files: calls like one that was checked before are not checked again; all others are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import tilewright
from tilewright.errors import InputError, ModelError, UnsupportedError
from tilewright.ways import files


def _saved(folder: Path, node: onnx.NodeProto, sizes: Sequence[Sequence[int | str]]) -> Path:
    names = list(node.input)
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip(names, sizes, strict=True)
    ]
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name=node.output[0])])
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each call whose inputs are bound by name and checked in full."""
    seen: list[int] = []
    plain = files.bind_inputs

    def counted(*args: object) -> object:
        seen.append(1)
        return plain(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(files, "bind_inputs", counted)
    return seen


def test_equal_calls_are_checked_once_in_whatever_order_names_come(
    tmp_path: Path, checked: list[int]
) -> None:
    model = tilewright.compile(_saved(tmp_path, helper.make_node("Sub", ["a", "b"], ["y"]), [["n", 3]] * 2))
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    for _ in range(3):
        assert torch.equal(model(a, b), a - b)  # type: ignore[arg-type]
        assert torch.equal(model(b=b, a=a), a - b)  # type: ignore[arg-type]
        assert torch.equal(model(a, b=b), a - b)  # type: ignore[arg-type]
    assert len(checked) == 3
    assert torch.equal(model(a[:2], b[:2]), a[:2] - b[:2])  # type: ignore[arg-type]
    assert len(checked) == 4


def test_one_tensor_for_two_inputs_and_arrays_still_work(tmp_path: Path, checked: list[int]) -> None:
    model = tilewright.compile(_saved(tmp_path, helper.make_node("Sub", ["a", "b"], ["y"]), [["n", 3]] * 2))
    a, out = torch.randn(4, 3), torch.empty(4, 3)
    for _ in range(2):
        assert not model(a, a).any()  # type: ignore[attr-defined]
        assert not np.any(model(a.numpy(), a.numpy()))  # type: ignore[arg-type]
        assert model(a, torch.ones(4, 3), out=out) is out
        assert torch.equal(out, a - 1)
    assert len(checked) == 3  # one tensor for two inputs is another call than two, and is checked each time


def test_what_does_not_fit_is_refused_behind_a_short_way(tmp_path: Path) -> None:
    model = tilewright.compile(_saved(tmp_path, helper.make_node("Sub", ["a", "b"], ["y"]), [["n", 3]] * 2))
    a = torch.randn(4, 3)
    for _ in range(2):
        model(a, a + 1)
    for wrong in (a.double(), a[:, :2], a[0], a[:3]):
        with pytest.raises((InputError, ModelError)):
            model(wrong, a)
    with pytest.raises(InputError):
        model(a, c=a)


def test_what_a_call_refuses_is_explained_every_time(tmp_path: Path) -> None:
    node = helper.make_node("Gather", ["x", "k"], ["y"])
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3]),
         helper.make_tensor_value_info("k", TensorProto.INT64, ["m"])],
        [onnx.ValueInfoProto(name="y")],
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model, x = tilewright.compile(path), torch.randn(4, 3)
    good, bad = torch.tensor([0, 3]), torch.tensor([0, 9])
    kinds: list[type[BaseException]] = []
    for k in (good, bad, good, bad):
        try:
            assert torch.equal(model(x, k), x[k])  # type: ignore[arg-type]
        except (IndexError, ModelError) as error:
            kinds.append(type(error))
    assert len(kinds) == 2 and kinds[0] is kinds[1]


def test_an_input_that_asks_for_a_gradient_is_refused(tmp_path: Path) -> None:
    model = tilewright.compile(_saved(tmp_path, helper.make_node("Sub", ["a", "b"], ["y"]), [["n", 3]] * 2))
    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(a, b), a - b)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match=r"gradient .*input a.*no_grad"):
            model(a, b)


def test_a_graph_made_with_one_tensor_for_two_inputs_serves_two(tmp_path: Path) -> None:
    model = tilewright.compile(_saved(tmp_path, helper.make_node("Sub", ["a", "b"], ["y"]), [["n", 3]] * 2))
    a = torch.randn(4, 3)
    assert not model(a, a).any()  # type: ignore[attr-defined]
    assert torch.equal(model(a, torch.ones(4, 3)), a - 1)  # type: ignore[arg-type]
