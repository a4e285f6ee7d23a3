"""Extrema over no elements: refused, as torch does, also where only the sizes of a call tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

import tilewright
from tilewright.errors import InputError, NoElements
from tilewright.plan.portable import from_json, to_json


@pytest.fixture(autouse=True)
def fresh() -> None:
    tilewright.reset()


EXTREMA: dict[str, Callable[[Tensor], object]] = {
    "amax": lambda x: (x * 2).amax(0),
    "amin": lambda x: (x * 2).amin((0, 1)),
    "max": lambda x: (x * 2).max(),
    "max and place": lambda x: (x * 2).max(0),
    "min": lambda x: (x * 2).min(0).values,
    "argmax": lambda x: (x * 2).argmax(0),
    "argmin of all": lambda x: (x * 2).argmin(),
    "norm": lambda x: torch.linalg.vector_norm(x * 2, float("inf"), dim=0),
}


@pytest.mark.parametrize("name", EXTREMA)
def test_a_size_that_turns_out_0(name: str) -> None:
    program = EXTREMA[name]
    compiled = tilewright.compile(program, dims="oblivious")
    for n in (5, 0, 3, 0):
        x = torch.randn(n, 4)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        if n:
            torch.testing.assert_close(compiled(x), program(x))
            continue
        with pytest.raises((IndexError, RuntimeError)):
            program(x)
        with pytest.raises(NoElements, match=f"no elements.*{__file__}"):
            compiled(x)
    assert tilewright.stats().graphs == 1


def test_other_dims_may_be_empty() -> None:
    compiled = tilewright.compile(lambda x: (x * 2).amax(1), dims="oblivious")
    for n in (5, 0):
        x = torch.randn(n, 4)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        assert compiled(x).shape == (n,)  # type: ignore[attr-defined]
    assert tilewright.stats().graphs == 1


@pytest.mark.parametrize("name", EXTREMA)
def test_a_size_from_data(name: str) -> None:
    """Torch checks some of these sizes by an assertion of its own, which must come before they divide anything."""

    def program(x: Tensor) -> object:
        return EXTREMA[name](x[x[:, 0] > 0])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = tilewright.compile(program)
        x = torch.randn(40, 4).abs() + 0.1
        torch.testing.assert_close(compiled(x), program(x))
        with pytest.raises((IndexError, RuntimeError)):
            compiled(-x)
        torch.testing.assert_close(compiled(x), program(x))


def test_plans_keep_what_they_require() -> None:
    compiled = tilewright.compile(lambda x: x.max(0).values, dims="oblivious")
    x = torch.randn(3, 4)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    compiled(x)
    plan = compiled.trace["plan"]  # type: ignore[index]
    (needed,) = plan.segments[0].preconditions
    assert from_json(json.loads(json.dumps(to_json(plan)))).segments[0].preconditions == (needed,)


def _file(path: Path, op: str, **attributes: Any) -> Path:
    axes = [] if attributes else [helper.make_tensor("axes", TensorProto.INT64, [1], [1])]
    node = helper.make_node(op, ["x", *(a.name for a in axes)], ["y"], **attributes)
    kind = TensorProto.INT64 if attributes else TensorProto.FLOAT
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", "columns"])
    graph = helper.make_graph([node], "g", [x], [helper.make_tensor_value_info("y", kind, None)], axes)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


def test_files(tmp_path: Path) -> None:
    """The ONNX standard gives the maximum of nothing a value, but not its place."""
    extremum = tilewright.compile(str(_file(tmp_path / "max.onnx", "ReduceMax")))
    place = tilewright.compile(str(_file(tmp_path / "place.onnx", "ArgMax", axis=1)))
    for shape in ((3, 7), (3, 0), (0, 4)):
        x = torch.randn(shape)
        wanted = x.amax(1, keepdim=True) if shape[1] else torch.full((3, 1), -torch.inf)
        torch.testing.assert_close(extremum(x), wanted)
        if shape[1]:
            torch.testing.assert_close(place(x), x.argmax(1, keepdim=True))
        else:
            with pytest.raises(InputError, match="no elements"):
                place(x)
