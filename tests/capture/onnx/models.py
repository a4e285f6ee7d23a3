"""Small ONNX models for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

Shape = Sequence[int | str | None]


def value(name: str, dims: Shape | None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """A tensor declaration; `dims` None leaves the rank open."""
    return helper.make_tensor_value_info(name, kind, None if dims is None else list(dims))


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: object) -> NodeProto:
    """A node; the keyword `domain` is passed on."""
    return helper.make_node(op, list(inputs), list(outputs), **attributes)


def body(
    nodes: Sequence[NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[str | onnx.ValueInfoProto],
    constants: Mapping[str, np.ndarray] | None = None,
    name: str = "g",
) -> GraphProto:
    """A graph; outputs given by name are declared as float without shape."""
    return helper.make_graph(
        list(nodes),
        name,
        list(inputs),
        [value(o, None) if isinstance(o, str) else o for o in outputs],
        [numpy_helper.from_array(array, key) for key, array in (constants or {}).items()],
    )


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[str | onnx.ValueInfoProto],
    constants: Mapping[str, np.ndarray] | None = None,
    opset: int = 17,
) -> ModelProto:
    """A model of one graph with the standard operators."""
    graph = body(nodes, inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def ints(*values: int) -> np.ndarray:
    """An int64 vector."""
    return np.array(values, dtype=np.int64)
