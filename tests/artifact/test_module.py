"""What is loaded is a module: its weights are listed, and it stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from tests.support.artifacts import Saved
from torch import nn

import tilewright
from tilewright.errors import UnsupportedError


@pytest.fixture
def loaded(small: Saved, tmp_path: Path) -> Any:
    """The small model, loaded."""
    (tmp_path / "m.tw").write_bytes(small.data)
    return tilewright.load(tmp_path / "m.tw", rebuild=False)


def test_weights_have_their_names(small: Saved, loaded: Any) -> None:
    wanted, found = small.model.state_dict(), loaded.state_dict()
    assert isinstance(loaded, nn.Module) and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert {n for n, _ in loaded.named_parameters()} == {n for n, _ in small.model.named_parameters()}
    assert not any(p.requires_grad for p in loaded.parameters()) and "\n" not in repr(loaded)


def test_what_changes_nothing_is_taken(small: Saved, loaded: Any) -> None:
    assert loaded.eval() is loaded and loaded.to("cpu", torch.float32) is loaded and not loaded.training
    assert loaded.requires_grad_(False) is loaded
    loaded.load_state_dict(loaded.state_dict())
    both = nn.Sequential(loaded, nn.Identity()).eval()
    with torch.no_grad():
        torch.testing.assert_close(both(small.x)[0], copy.deepcopy(small.model)(small.x)[0])
    assert len(both.state_dict()) == 3


_CHANGES: dict[str, Callable[[Any], object]] = {
    "train": lambda m: m.train(),
    "type": lambda m: m.half(),
    "place": lambda m: m.to("meta"),
    "type, from around": lambda m: nn.Sequential(m).double(),
    "gradients": lambda m: m.requires_grad_(),
    "gradients, from around": lambda m: nn.Sequential(m).requires_grad_(),
    "a gradient": lambda m: setattr(next(m.parameters()), "requires_grad", True),
    "weights": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_what_it_cannot_do_is_refused(change: str, loaded: Any) -> None:
    with pytest.raises(UnsupportedError, match="stays as it is"):
        _CHANGES[change](loaded)


def test_what_it_writes_is_state(small: Saved, loaded: Any) -> None:
    loaded(small.x)
    state = loaded.state_dict()
    assert state["calls"] == 1
    loaded.load_state_dict({**state, "calls": torch.tensor(5.0)})
    assert loaded(small.x)[1]["calls"] == 12 and dict(loaded.named_buffers())["calls"] == 6


def test_weights_of_a_file_have_its_names_as_they_may_be_shown(tmp_path: Path) -> None:
    """Names come from model files: a line each, no control characters, none twice."""
    given = ["encoder.weight", "p2", "a\x1b[31m\n b", "a\x1b[31m b", "w" * 5000]
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [8]) for n in "xy")
    held = [onnx.helper.make_tensor(n, onnx.TensorProto.FLOAT, [8], torch.rand(8).tolist()) for n in given]
    steps = ["x", *(f"s{k}" for k in range(len(given) - 1)), "y"]
    nodes = [onnx.helper.make_node("Mul", [steps[k], n], [steps[k + 1]]) for k, n in enumerate(given)]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], held)
    file = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(file, str(tmp_path / "m.onnx"))
    fast = tilewright.compile(tmp_path / "m.onnx")
    tilewright.save(fast, tmp_path / "m.tw")
    for names in (list(m.state_dict()) for m in (fast, tilewright.load(tmp_path / "m.tw"))):  # type: ignore[attr-defined]
        assert names[:4] == ["encoder.weight", "p2", "a\\x1b[31m b", "p3"] and len(names) == 5
        assert names[4].startswith("www") and len(names[4]) < 500
