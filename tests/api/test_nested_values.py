"""Model files whose inputs or outputs are sequences and optionals: compiled, cut, or refused with a type of ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, TypeProto, helper

import tilewright
from tilewright.errors import InputError, ModelError, TilewrightError

FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n", 3])
SEQUENCE = helper.make_sequence_type_proto(FLOATS)
OPTIONAL = helper.make_optional_type_proto(FLOATS)


def save(
    folder: Path, nodes: list[onnx.NodeProto], ins: dict[str, TypeProto], outs: dict[str, TypeProto]
) -> Path:
    """A file of these nodes."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_value_info(n, t) for n, t in ins.items()],
        [helper.make_value_info(n, t) for n, t in outs.items()],
    )
    path = folder / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def test_a_sequence_is_compiled(tmp_path: Path) -> None:
    """Lengths and sizes may differ from call to call; each length is a graph, sizes are free in it."""
    tilewright.reset()
    nodes = [
        helper.make_node("ConcatFromSequence", ["xs"], ["c"], axis=0),
        helper.make_node("Exp", ["c"], ["e"]),
        helper.make_node("SequenceInsert", ["xs", "e"], ["ys"]),
    ]
    tilewright.reset()
    compiled = tilewright.compile(save(tmp_path, nodes, {"xs": SEQUENCE}, {"e": FLOATS, "ys": SEQUENCE}))
    for sizes in ((2, 3), (5, 1), (2, 2, 4), (1,), (7, 0)):
        xs = [torch.randn(n, 3) for n in sizes]
        e, ys = compiled(xs)
        torch.testing.assert_close(e, torch.cat(xs).exp())
        assert len(ys) == len(xs) + 1 and all(map(torch.equal, ys, xs))
    assert "library" not in str(compiled.coverage)
    assert tilewright.stats().graphs == 3
    e, ys = compiled([np.ones((2, 3), np.float32)[::-1]])
    assert isinstance(e, np.ndarray) and isinstance(ys[0], np.ndarray)


def test_an_optional_may_be_absent(tmp_path: Path) -> None:
    nodes = [helper.make_node("OptionalHasElement", ["x"], ["y"])]
    path = save(tmp_path, nodes, {"x": OPTIONAL}, {"y": helper.make_tensor_type_proto(TensorProto.BOOL, [])})
    compiled = tilewright.compile(path)
    for _ in range(2):
        assert not compiled(None) and compiled(torch.ones(2, 3)) and compiled(x=np.ones((1, 3), np.float32))


def test_a_sequence_beside_data_dependent_sizes(tmp_path: Path) -> None:
    """What reads data runs as a named region, the rest is compiled."""
    nodes = [
        helper.make_node("ConcatFromSequence", ["xs"], ["c"], axis=0),
        helper.make_node("Exp", ["c"], ["e"]),
        helper.make_node("NonZero", ["e"], ["i"]),
    ]
    long = helper.make_tensor_type_proto(TensorProto.INT64, [2, None])
    compiled = tilewright.compile(save(tmp_path, nodes, {"xs": SEQUENCE}, {"i": long}))
    for sizes in ((2, 3), (4,)):
        xs = [torch.randn(n, 3) for n in sizes]
        assert torch.equal(compiled(xs), torch.nonzero(torch.cat(xs).exp()).T)


@pytest.mark.parametrize("given", [[1.0, "a"], "text", object(), [object()], {"a": torch.ones(2)}])
def test_what_is_no_sequence_is_refused(tmp_path: Path, given: object) -> None:
    nodes = [helper.make_node("ConcatFromSequence", ["xs"], ["c"], axis=0)]
    compiled = tilewright.compile(save(tmp_path, nodes, {"xs": SEQUENCE}, {"c": FLOATS}))
    with pytest.raises(InputError) as caught:
        compiled(given)
    assert caught.value.place == "input xs" and caught.value.hint


def test_an_empty_sequence_is_refused_where_it_has_no_meaning(tmp_path: Path) -> None:
    nodes = [helper.make_node("SequenceAt", ["xs", "k"], ["y"])]
    k = helper.make_node("Constant", [], ["k"], value_int=0)
    compiled = tilewright.compile(save(tmp_path, [k, *nodes], {"xs": SEQUENCE}, {"y": FLOATS}))
    for given in ([], None):
        with pytest.raises(TilewrightError):
            compiled(given)
    assert torch.equal(compiled([torch.ones(2, 3)]), torch.ones(2, 3))


@pytest.mark.parametrize("number", [300, -1, 2**70, 1.5])
def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, number: float) -> None:
    """A declared integer type changes no number in silence."""
    byte = helper.make_tensor_type_proto(TensorProto.UINT8, [])
    compiled = tilewright.compile(
        save(tmp_path, [helper.make_node("Identity", ["x"], ["y"])], {"x": byte}, {"y": byte})
    )
    with pytest.raises(InputError) as caught:
        compiled(number)
    assert caught.value.place == "input x"
    assert compiled(7) == 7


def test_a_sequence_of_unequal_ranks_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("ConcatFromSequence", ["xs"], ["c"], axis=0)]
    compiled = tilewright.compile(save(tmp_path, nodes, {"xs": SEQUENCE}, {"c": FLOATS}))
    with pytest.raises(ModelError):
        compiled([torch.ones(2, 3), torch.ones(2)])
