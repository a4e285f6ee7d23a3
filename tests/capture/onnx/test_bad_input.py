"""Hostile, damaged and unsupported files; wrong inputs. Each gives one clear error."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.support.onnx_models import body, ints, model, node, value

from tilewright.capture.onnx import bind_inputs, load
from tilewright.errors import InputError, ModelError, UnsupportedError


def relu_model() -> onnx.ModelProto:
    """y = relu(x + w), x of [batch, 3]."""
    nodes = [node("Add", ["x", "w"], ["s"]), node("Relu", ["s"], ["y"])]
    return model(nodes, [value("x", ["batch", 3])], ["y"], {"w": np.ones(3, np.float32)})


@pytest.mark.parametrize("keep", [0, 1, 7, 20, 60])
def test_truncated(tmp_path: Path, keep: int) -> None:
    data = relu_model().SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(data[:keep])
    with pytest.raises(ModelError) as caught:
        load(path)
    assert caught.value.place and caught.value.hint


def test_every_truncation_is_refused_or_runs(tmp_path: Path) -> None:
    """A prefix of a model is never a crash."""
    data = relu_model().SerializeToString()
    path = tmp_path / "m.onnx"
    for keep in range(len(data)):
        path.write_bytes(data[:keep])
        try:
            load(path)
        except (ModelError, UnsupportedError):
            continue


def test_every_flipped_byte_is_refused_or_loads(tmp_path: Path) -> None:
    """Damage anywhere in the file ends in our errors or in another valid model."""
    data = bytearray(relu_model().SerializeToString())
    path = tmp_path / "m.onnx"
    for at in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= mask
            path.write_bytes(damaged)
            try:
                load(path)
            except (ModelError, UnsupportedError):
                continue


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 64, b"PK\x03\x04 a zip", b"<html></html>", os.urandom(4096)]
)
def test_not_a_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises((ModelError, UnsupportedError)):
        load(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        load(tmp_path / "absent.onnx")
    with pytest.raises(ModelError):
        load(tmp_path)


def test_unknown_operator_names_everything() -> None:
    nodes = [node("Frobnicate", ["x"], ["y"], name="layer7", domain="com.example")]
    m = model(nodes, [value("x", [3])], ["y"])
    m.opset_import.append(helper.make_opsetid("com.example", 3))
    with pytest.raises(UnsupportedError) as caught:
        load(m)
    text = str(caught.value)
    for part in ("Frobnicate", "com.example", "opset 3", "layer7", "Hint"):
        assert part in text


def test_domain_without_a_version() -> None:
    m = model([node("Thing", ["x"], ["y"], domain="com.example")], [value("x", [3])], ["y"])
    with pytest.raises(ModelError, match="no version"):
        load(m)


@pytest.mark.parametrize("opset", [1, 6, 999])
def test_opset_out_of_range(opset: int) -> None:
    with pytest.raises(UnsupportedError, match="opset"):
        load(model([node("Relu", ["x"], ["y"])], [value("x", [3])], ["y"], opset=opset))


def test_undefined_and_doubled_names() -> None:
    x = [value("x", [3])]
    with pytest.raises(ModelError, match="not defined"):
        load(model([node("Relu", ["nowhere"], ["y"])], x, ["y"]))
    with pytest.raises(ModelError, match="not defined"):
        load(model([node("Relu", ["z"], ["y"]), node("Relu", ["y"], ["z"])], x, ["y"]))
    with pytest.raises(ModelError, match="twice"):
        load(model([node("Relu", ["x"], ["y"]), node("Tanh", ["x"], ["y"])], x, ["y"]))
    with pytest.raises(ModelError, match="named 'x'"):
        load(model([node("Relu", ["x"], ["y"])], x + x, ["y"]))
    with pytest.raises(ModelError, match="nothing makes"):
        load(model([node("Relu", ["x"], ["y"])], x, ["elsewhere"]))


def test_wrong_number_of_inputs_and_attributes() -> None:
    x = [value("x", [3])]
    with pytest.raises(ModelError, match="takes 2"):
        load(model([node("Add", ["x"], ["y"])], x, ["y"]))
    with pytest.raises(ModelError, match="takes"):
        load(model([node("Add", ["x", ""], ["y"])], x, ["y"]))
    with pytest.raises(ModelError, match="takes"):
        load(model([node("Relu", ["x", "x"], ["y"])], x, ["y"]))
    with pytest.raises(ModelError, match="'to' is missing"):
        load(model([node("Cast", ["x"], ["y"])], x, ["y"]))
    with pytest.raises(UnsupportedError, match="attribute 'colour'"):
        load(model([node("Relu", ["x"], ["y"], colour=3)], x, ["y"]))


def test_declared_shape_larger_than_data() -> None:
    m = relu_model()
    m.graph.initializer[0].dims[0] = 1 << 40
    with pytest.raises(ModelError, match="bytes for shape"):
        load(m)
    m.graph.initializer[0].dims[0] = -1
    with pytest.raises(ModelError, match="negative"):
        load(m)
    typed = helper.make_tensor("w", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
    typed.dims[0] = 1 << 40
    m = relu_model()
    m.graph.initializer[0].CopyFrom(typed)
    with pytest.raises(ModelError, match="elements for shape"):
        load(m)


@pytest.mark.parametrize(
    "nodes",
    [
        [node("ConstantOfShape", ["big"], ["y"])],
        [node("Expand", ["one", "big"], ["e"]), node("Exp", ["e"], ["y"])],
        [node("Tile", ["one2", "big"], ["y"])],
    ],
)
def test_huge_tensors_are_not_made_at_load(nodes: list[onnx.NodeProto]) -> None:
    constants = {
        "big": ints(1 << 30, 1 << 30),
        "one": np.ones(1, np.float32),
        "one2": np.ones((1, 1), np.float32),
    }
    with pytest.raises(ModelError, match="too large"):
        load(model(nodes, [], ["y"], constants))


def test_folding_does_not_grow_large_constants() -> None:
    """An outer product of constants stays in the program instead of the constants."""
    constants = {"a": np.ones((40000, 1), np.float32), "b": np.ones((1, 40000), np.float32)}
    nodes = [node("Mul", ["a", "b"], ["m"]), node("Add", ["x", "m"], ["y"])]
    module = load(model(nodes, [value("x", [1])], ["y"], constants))
    assert sum(p.numel() for p in module.parameters()) == 80000


def external_model(folder: Path, location: str, **keys: str) -> Path:
    """A model whose weight lies in another file."""
    m = relu_model()
    tensor = m.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in {"location": location, **keys}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, text
    path = folder / "m.onnx"
    path.write_bytes(m.SerializeToString())
    return path


def test_external_data(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    weights = np.array([9, 1, 2, 3], np.float32)
    (tmp_path / "sub" / "w.bin").write_bytes(weights.tobytes())
    module = load(external_model(tmp_path, "sub/w.bin", offset="4", length="12"))
    assert torch.equal(module(torch.zeros(1, 3)), torch.tensor([[1.0, 2.0, 3.0]]))
    with pytest.raises(ModelError, match="folder"):
        load(onnx.load(tmp_path / "m.onnx", load_external_data=False))


@pytest.mark.parametrize(
    "location",
    [
        "../w.bin",
        "/etc/passwd",
        "a/../../w.bin",
        "",
        "..",
        "a\\..\\w.bin",
        "C:\\w.bin",
        "w\0.bin",
        "sub",
        "absent",
    ],
)
def test_external_data_stays_inside(tmp_path: Path, location: str) -> None:
    inner = tmp_path / "inner"
    (inner / "sub").mkdir(parents=True)
    (tmp_path / "w.bin").write_bytes(b"\0" * 12)
    with pytest.raises(ModelError):
        load(external_model(inner, location))


def test_external_data_links_and_ranges(tmp_path: Path) -> None:
    target = tmp_path / "target.bin"
    target.write_bytes(b"\0" * 12)
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "soft.bin").symlink_to(target)
    (inner / "folder").symlink_to(tmp_path)
    os.link(target, inner / "hard.bin")
    (inner / "short.bin").write_bytes(b"\0" * 8)
    (inner / "good.bin").write_bytes(b"\0" * 12)
    os.mkfifo(inner / "pipe.bin")
    for location in ("soft.bin", "hard.bin", "folder/target.bin", "short.bin", "pipe.bin"):
        with pytest.raises(ModelError):
            load(external_model(inner, location))
    for keys in (
        {"offset": "4"},
        {"offset": "-1"},
        {"length": "99"},
        {"length": "8"},
        {"offset": "x"},
        {"offset": str(1 << 70)},
        {"__class__": "y"},
    ):
        with pytest.raises(ModelError):
            load(external_model(inner, "good.bin", **keys))


HOSTILE = [
    '"""',
    "a\nb",
    "*/",
    "\\",
    "$(touch x)",
    "<script>",
    "\u202eabc",
    "self",
    "__class__",
    "x" * 100_000,
]


def test_names_do_not_matter() -> None:
    """Names of the model never become names in the module."""
    x = torch.randn(2, 3)
    for name in HOSTILE:
        nodes = [node("Add", ["in" + name, "w" + name], [name], name=name)]
        m = model(nodes, [value("in" + name, ["batch", 3])], [name], {"w" + name: np.ones(3, np.float32)})
        module = load(m)
        assert torch.equal(module(x), x + 1)
        assert [n for n, _ in module.named_parameters()] == ["p0"]


def test_long_chain_loads_quickly() -> None:
    count = 50_000
    nodes = [node("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(count)]
    m = model(nodes, [value("v0", [3])], [f"v{count}"])
    start = time.monotonic()
    module = load(m)
    assert time.monotonic() - start < 30
    assert torch.equal(module(torch.ones(3)), torch.ones(3))


def test_functions_that_call_themselves() -> None:
    """A recursive function, and one that doubles at each level, both end in an error."""
    call = node("F", ["a"], ["b"], domain="own")
    own = helper.make_opsetid("own", 1)
    m = model([node("F", ["x"], ["y"], domain="own")], [value("x", [3])], ["y"])
    m.opset_import.append(own)
    m.functions.append(helper.make_function("own", "F", ["a"], ["b"], [call], [own]))
    with pytest.raises(ModelError, match="deeper"):
        load(m)


def test_deep_bodies() -> None:
    """As deep as protobuf itself allows."""
    leaf = graph = body([node("Identity", ["x"], ["r"])], [], ["r"])
    for level in range(28):
        choose = node("If", ["c"], [f"r{level}"], then_branch=graph, else_branch=leaf)
        graph = body([choose], [], [f"r{level}"])
    c = [value("x", [3]), value("c", [], TensorProto.BOOL)]
    m = model([node("If", ["c"], ["y"], then_branch=graph, else_branch=leaf)], c, ["y"])
    module = load(m)
    assert module.data_dependent
    for flag in (True, False):
        assert torch.equal(module(torch.ones(3), torch.tensor(flag)), torch.ones(3))


def test_sparse_and_strings_are_refused() -> None:
    m = model([node("Identity", ["x"], ["y"])], [value("x", [3], TensorProto.STRING)], ["y"])
    with pytest.raises(UnsupportedError, match="STRING"):
        load(m)
    m = relu_model()
    m.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array(["a", "b", "c"], dtype=object), "w"))
    with pytest.raises(UnsupportedError, match="STRING"):
        load(m)


# inputs of a call


def test_bind_by_position_and_name() -> None:
    nodes = [node("Sub", ["x", "y"], ["z"])]
    module = load(model(nodes, [value("x", ["n", 3]), value("y", ["n", 3])], ["z"]))
    a, b = np.ones((2, 3), np.float32), torch.zeros(2, 3)
    for bound in (
        bind_inputs(module, [a, b], {}),
        bind_inputs(module, [a], {"y": b}),
        bind_inputs(module, [], {"y": b, "x": a}),
    ):
        assert torch.equal(module(*bound), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([], {}, "missing input 'x'"),
        ([np.zeros((2, 3), np.float32)] * 2, {}, "2 inputs were given"),
        ([np.zeros((2, 3), np.float32)], {"x": np.zeros((2, 3), np.float32)}, "twice"),
        ([], {"X": np.zeros((2, 3), np.float32)}, "did you mean 'x'"),
        ([np.zeros((2, 3), np.float64)], {}, "dtype float64"),
        ([np.zeros(3, np.float32)], {}, "has 1 dims"),
        ([np.zeros((2, 4), np.float32)], {}, "dim 1 of input 'x' is 4"),
        ([np.array([["a"]])], {}, "dtype"),
        ([[1.0, 2.0]], {}, "is a list"),
        ([None], {}, "is a NoneType"),
        ([torch.zeros(2, 3, device="meta")], {}, "is on meta, the model on cpu"),
    ],
)
def test_bind_errors(args: list[object], kwargs: dict[str, object], message: str) -> None:
    module = load(relu_model())
    with pytest.raises(InputError) as caught:
        bind_inputs(module, args, kwargs)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert caught.value.hint


def test_bind_takes_awkward_arrays() -> None:
    """Read-only, big-endian, strided and Fortran-ordered arrays arrive with the same values."""
    module = load(relu_model())
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    frozen = x.copy()
    frozen.flags.writeable = False
    for array in (x, frozen, x.astype(">f4"), x[::-1], np.asfortranarray(x), x[:, ::-1]):
        (tensor,) = bind_inputs(module, [array], {})
        assert np.array_equal(tensor.numpy(), array)
