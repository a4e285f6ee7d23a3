"""Loops as models write them, and what is asked of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.support.onnx_models import body, model, node, value

import tilewright


def lstm(path: Path, units: int, batch: int, direction: str = "forward") -> None:
    """A layer with as many inputs as units."""
    rng, ways = np.random.default_rng(0), 2 if direction == "bidirectional" else 1
    held = {
        "w": rng.standard_normal((ways, 4 * units, units)) / units**0.5,
        "r": rng.standard_normal((ways, 4 * units, units)) / units**0.5,
        "b": rng.standard_normal((ways, 8 * units)),
    }
    row = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["steps", batch, units])
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y", "yh"], hidden_size=units, direction=direction)
    graph = helper.make_graph(
        [node], "g", [row], [onnx.ValueInfoProto(name=n) for n in ("y", "yh")],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in held.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


RNG = np.random.default_rng(0)
WIDTH = 6


def weights() -> dict[str, np.ndarray]:
    return {
        "w": (RNG.standard_normal((WIDTH, WIDTH)) / 3).astype(np.float32),
        "half": np.array(0.5, np.float32),
        "cap": np.array(2.5, np.float32),
        "zero": np.array(0, np.int64),
    }


def step(condition: str = "none") -> onnx.GraphProto:
    """h = tanh(h w + x[i]); collects h; `data`: as long as the sum of |h| is below `cap`."""
    nodes = [
        node("MatMul", ["h", "w"], ["m"]),
        node("Gather", ["x", "i"], ["xi"], axis=0),
        node("Add", ["m", "xi"], ["a"]),
        node("Tanh", ["a"], ["h2"]),
        node("Identity", ["h2"], ["each"]),
    ]
    if condition == "data":
        nodes += [
            node("Abs", ["h2"], ["b"]),
            node("ReduceSum", ["b"], ["r"], keepdims=0),
            node("Less", ["r", "cap"], ["c2"]),
        ]
    else:
        nodes.append(node("Identity", ["c"], ["c2"]))
    return body(
        nodes,
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("h", [2, WIDTH])],
        [value("c2", [], TensorProto.BOOL), value("h2", [2, WIDTH]), value("each", [2, WIDTH])],
    )


def loop(condition: str, trips: str, flag: str = "") -> onnx.ModelProto:
    """The loop above over x [n, 2, 6]; `trips`: size (of x), given (an input), none."""
    inputs = [value("x", ["n", 2, WIDTH]), value("h0", [2, WIDTH])]
    nodes = [node("Shape", ["x"], ["s"], start=0, end=1), node("Squeeze", ["s"], ["size"])]
    if trips == "given":
        inputs.append(value("given", [], TensorProto.INT64))
    if flag:
        inputs.append(value("flag", [], TensorProto.BOOL))
    nodes.append(
        node(
            "Loop",
            ["" if trips == "none" else trips, flag, "h0"],
            ["last", "all"],
            name="walk",
            body=step(condition),
        )
    )
    return model(nodes, inputs, ["last", "all"], weights())


def check(proto: onnx.ModelProto, path: Path, *feeds: dict[str, np.ndarray], rtol: float = 2e-5) -> object:
    """Compile once, compare with onnxruntime for every feed; gives the compiled model."""
    onnx.save(proto, path)
    compiled = tilewright.compile(str(path))
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for feed in feeds:
        want = session.run(None, feed)
        have = compiled(**{k: torch.from_numpy(v) for k, v in feed.items()})
        have = have if isinstance(have, tuple) else (have,)
        for w, h in zip(want, have, strict=True):
            assert tuple(h.shape) == w.shape
            np.testing.assert_allclose(h.numpy(), w, rtol=rtol, atol=2e-6)
    return compiled


def feed(n: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    x = RNG.standard_normal((n, 2, WIDTH)).astype(np.float32)
    return {"x": x, "h0": RNG.standard_normal((2, WIDTH)).astype(np.float32) / 4, **more}
