"""The files that the list needs: models that work, and such as do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

NET = """
import torch
class Double(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2
def make():
    return Double(), (torch.ones(2, 3),)
number = 3
def nothing():
    return None
def three():
    return Double(), (torch.ones(2, 3),), 1
def uncalled():
    return 3, (torch.ones(2, 3),)
def words():
    return Double(), ("x",)
def raises():
    raise ValueError("the weights are not there")
def fails():
    def f(x):
        return x @ x
    return f, (torch.ones(2, 3),)
def sorts():
    return (lambda x: torch.linalg.svd(x)[1]), (torch.ones(4, 4),)
"""


def write_model(
    path: Path, op: str = "Relu", domain: str = "", kind: int = TensorProto.FLOAT, out: str = "y"
) -> None:
    """One node."""
    node = helper.make_node(op, ["x"], ["y"], domain=domain)
    x = helper.make_tensor_value_info("x", kind, ["rows", 3])
    y = helper.make_tensor_value_info(out, kind, ["rows", 3])
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    graph = helper.make_graph([node], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))


def write_outside(path: Path, location: str) -> None:
    """A weight in another file."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3], np.ones(3, np.float32).tobytes(), raw=True)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", 3]) for n in "xy")
    made = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], [weight]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )  # fmt: skip
    path.write_bytes(made.SerializeToString())


def write_all(folder: Path) -> None:
    """All of them."""
    import tilewright

    (folder / "net_bad_inputs.py").write_text(NET)
    (folder / "net_bad_syntax.py").write_text("def make(:\n")
    (folder / "net_bad_import.py").write_text("raise RuntimeError('no licence')\n")
    write_model(folder / "good.onnx")
    data = (folder / "good.onnx").read_bytes()
    (folder / "folder.onnx").mkdir()
    (folder / "empty.onnx").write_bytes(b"")
    (folder / "cut.onnx").write_bytes(data[: len(data) // 2])
    (folder / "text.onnx").write_text("this is no model")
    write_model(folder / "unknown_op.onnx", "Frobnicate")
    write_model(folder / "unknown_domain.onnx", "Relu", "com.example")
    write_model(folder / "strings.onnx", "Identity", kind=TensorProto.STRING)
    write_model(folder / "no_such_output.onnx", out="z")
    write_outside(folder / "absent_weights.onnx", "weights.bin")
    write_outside(folder / "outer_weights.onnx", "../weights.bin")
    np.save(folder / "x.npy", np.ones((2, 3), np.float32))
    np.save(folder / "words.npy", np.array(["a", "b"]))
    np.save(folder / "objects.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    np.save(folder / "flat.npy", np.ones(6, np.float32))
    np.save(folder / "whole.npy", np.ones((2, 3), np.int64))
    (folder / "broken.npy").write_bytes(b"\x93NUMPY\x01")
    (folder / "file").write_text("")
    (folder / "numbers.json").write_text(json.dumps([1, 2]))
    (folder / "broken.json").write_text("{")
    good = tilewright.compile(folder / "good.onnx", (torch.ones(2, 3),))
    tilewright.save(good, folder / "good.tw")
    kept = (folder / "good.tw").read_bytes()
    (folder / "empty.tw").write_bytes(b"")
    (folder / "cut.tw").write_bytes(kept[: len(kept) // 2])
    (folder / "text.tw").write_text("this is no artifact")
    (folder / "changed.tw").write_bytes(kept[:-9] + bytes([kept[-9] ^ 1]) + kept[-8:])
    (folder / "version.tw").write_bytes(kept[:8] + bytes([99]) + kept[9:])
    (folder / "text.pt2").write_text("this is no program")
