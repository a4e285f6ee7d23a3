"""Serves an ONNX file with a dynamic batch: one graph for all sizes, called from several threads.

    python examples/serve_onnx.py [MODEL.onnx]

Without a file it writes a small one. Requests of one to eight rows are gathered into batches, as a server would.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx

import tilewright


def write_model(path: Path) -> None:
    """A perceptron with a free batch."""
    draw = np.random.default_rng(0)
    sizes = ((64, 256), (256, 10))
    weights = [
        onnx.numpy_helper.from_array(draw.normal(size=s).astype(np.float32), f"w{k}")
        for k, s in enumerate(sizes)
    ]
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w0"], ["h"]),
        onnx.helper.make_node("Relu", ["h"], ["r"]),
        onnx.helper.make_node("MatMul", ["r", "w1"], ["scores"]),
        onnx.helper.make_node("Softmax", ["scores"], ["y"], axis=-1),
    ]
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 64])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 10])
    graph = onnx.helper.make_graph(nodes, "perceptron", [x], [y], weights)
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))


def main(path: str | None = None) -> int:
    """Serve; gives the number of graphs that were compiled for all sizes of batches."""
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = str(Path(folder) / "perceptron.onnx")
            write_model(Path(path))
        model = tilewright.compile(path)
    print(model.signature)
    (given,) = model.inputs
    tail = tuple(n if isinstance(n, int) else 1 for n in (given.shape or ())[1:])

    def answer(rows: int) -> np.ndarray:
        result = model(np.random.default_rng(rows).normal(size=(rows, *tail)).astype(np.float32))
        assert isinstance(result, np.ndarray)
        return result

    with ThreadPoolExecutor(4) as threads:
        for rows, result in zip(range(1, 9), threads.map(answer, range(1, 9)), strict=True):
            print(f"{rows} rows -> {result.shape}")
    print(model.coverage)
    return len(model.compilations)


if __name__ == "__main__":
    main(*sys.argv[1:2])
