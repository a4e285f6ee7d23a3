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


def pipeline() -> onnx.ModelProto:
    """relu(x w), a branch on its sum, then a reshape by sizes of x, a second branch, and an independent tail."""
    then = body([node("Mul", ["h", "two"], ["t"])], [], ["t"])
    other = body([node("Neg", ["h"], ["e"])], [], ["e"])
    last = body([node("Identity", ["f"], ["t2"])], [], ["t2"])
    half = body([node("Div", ["f", "two"], ["e2"])], [], ["e2"])
    nodes = [
        node("MatMul", ["x", "w"], ["m"]),
        node("Relu", ["m"], ["h"]),
        node("Shape", ["x"], ["s"], start=0, end=1),
        node("Concat", ["s", "shape"], ["target"], axis=0),
        node("ReduceSum", ["h"], ["sum"], keepdims=0),
        node("Greater", ["sum", "limit"], ["c"]),
        node("If", ["c"], ["b"], name="first", then_branch=then, else_branch=other),
        node("Reshape", ["b", "target"], ["r"]),
        node("Softmax", ["r"], ["f"], axis=-1),
        node("ReduceMax", ["f"], ["top"], keepdims=0),
        node("Greater", ["top", "half"], ["c2"]),
        node("If", ["c2"], ["y"], name="second", then_branch=last, else_branch=half),
        node("Exp", ["x"], ["z"]),
    ]
    constants = {
        "w": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32),
        "two": np.array(2.0, np.float32),
        "half": np.array(0.5, np.float32),
        "limit": np.array(5.0, np.float32),
        "shape": ints(2, 3),
    }
    outputs = ["y", "z", value("target", None, TensorProto.INT64)]
    return model(nodes, [value("x", ["n", 4])], outputs, constants)
