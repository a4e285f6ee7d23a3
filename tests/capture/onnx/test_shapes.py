"""Shape arithmetic stays on host integers: with dynamic sizes the exported graph has no data-dependent op."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from tests.support.onnx_models import ints, model, node, value
from torch.export import Dim

from tilewright.capture.onnx import OnnxModule, load

# Tensors made by torch while it exports, and their strides, are torch's own business.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

X = [value("x", ["n", 3, "h", "w"])]
N, H, W = Dim("n", min=2, max=64), Dim("h", min=4, max=256), Dim("w", min=4, max=256)


def reference(m: onnx.ModelProto, *inputs: np.ndarray) -> list[np.ndarray]:
    """What onnxruntime computes."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(m.SerializeToString(), options)
    names = [i.name for i in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))


def targets(program: torch.export.ExportedProgram) -> list[str]:
    """The operators of an exported graph."""
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


def check(m: onnx.ModelProto, shapes: Sequence[tuple[int, ...]], dims: dict[int, object]) -> list[str]:
    """Eager and exported results agree with onnxruntime at all shapes; returns the exported operators."""
    module = load(m)
    assert isinstance(module, OnnxModule) and not module.data_dependent
    arrays = [np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in shapes]
    with torch.no_grad():
        program = torch.export.export(
            module, (torch.from_numpy(arrays[0]),), dynamic_shapes=((dims,),), strict=False
        )
        exported = program.module()
        for array in arrays:
            expected = reference(m, array)
            for run in (module, exported):
                result = run(torch.from_numpy(array))
                outputs = result if isinstance(result, tuple) else (result,)
                for want, have in zip(expected, outputs, strict=True):
                    assert want.shape == tuple(have.shape)
                    np.testing.assert_allclose(want, have.numpy(), rtol=1e-4, atol=1e-5)
    names = targets(program)
    assert not [t for t in names if "item" in t or "nonzero" in t or "local_scalar" in t]
    return names


SHAPES = [(2, 3, 8, 12), (3, 3, 16, 10), (5, 3, 7, 9)]
DIMS: dict[int, object] = {0: N, 2: H, 3: W}


def test_flatten_by_shape_gather_concat() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"], axis=0),
        node("Unsqueeze", ["n", "zero1"], ["n1"]),
        node("Concat", ["n1", "minus"], ["t"], axis=0),
        node("Reshape", ["x", "t"], ["y"]),
    ]
    constants = {"zero": np.array(0), "zero1": ints(0), "minus": ints(-1)}
    check(model(nodes, X, ["y"], constants), SHAPES, DIMS)


def test_arithmetic_on_sizes() -> None:
    """floor((h * 2 + 3) / 2.0) as a size, by way of floating point."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Slice", ["s", "two", "three", "zero1"], ["h"]),
        node("Slice", ["s", "three", "four"], ["w"]),
        node("Mul", ["h", "two"], ["h2"]),
        node("Add", ["h2", "three"], ["h3"]),
        node("Cast", ["h3"], ["hf"], to=TensorProto.FLOAT),
        node("Div", ["hf", "half"], ["hd"]),
        node("Floor", ["hd"], ["hl"]),
        node("Cast", ["hl"], ["hi"], to=TensorProto.INT64),
        node("Concat", ["hi", "w"], ["t"], axis=0),
        node("Expand", ["one", "t"], ["e"]),
        node("ReduceSum", ["e"], ["r"], keepdims=0),
        node("Slice", ["x", "zero1", "two", "three"], ["a"]),
        node("Add", ["a", "r"], ["y"]),
    ]
    constants = {
        "two": ints(2),
        "three": ints(3),
        "four": ints(4),
        "one": np.ones((1, 1), np.float32),
        "zero1": ints(0),
        "half": np.array([2.0], np.float32),
    }
    check(model(nodes, X, ["y"], constants), SHAPES, DIMS)


def test_expand_with_where_and_constant_of_shape() -> None:
    """The pattern that exporters write for expand(-1, c, h, w)."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("ConstantOfShape", ["four"], ["ones"], value=onnx.numpy_helper.from_array(ints(1))),
        node("Mul", ["ones", "minus"], ["neg"]),
        node("Equal", ["s", "neg"], ["same"]),
        node("Where", ["same", "ones", "s"], ["t"]),
        node("Expand", ["w", "t"], ["e"]),
        node("Add", ["x", "e"], ["y"]),
    ]
    constants = {"four": ints(4), "minus": ints(-1), "w": np.ones((1, 3, 1, 1), np.float32)}
    check(model(nodes, X, ["y"], constants), SHAPES, DIMS)


def test_pads_by_reshape_and_transpose() -> None:
    """The pads of torch's own exporter: pairs, reversed, transposed, flattened."""
    nodes = [
        node("Concat", ["pairs", "zeros"], ["p"], axis=0),
        node("Reshape", ["p", "by2"], ["r"]),
        node("Slice", ["r", "minus", "low", "zero1", "minus"], ["b"]),
        node("Transpose", ["b"], ["t"], perm=[1, 0]),
        node("Reshape", ["t", "minus"], ["q"]),
        node("Cast", ["q"], ["c"], to=TensorProto.INT64),
        node("Pad", ["x", "c"], ["y"], mode="reflect"),
    ]
    constants = {
        "pairs": ints(1, 2, 3, 0),
        "zeros": ints(0, 0, 0, 0),
        "by2": ints(-1, 2),
        "minus": ints(-1),
        "low": ints(-(2**63) + 1),
        "zero1": ints(0),
    }
    check(model(nodes, X, ["y"], constants), SHAPES, DIMS)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_to_computed_sizes(mode: str) -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Slice", ["s", "two", "four"], ["hw"]),
        node("Slice", ["s", "zero1", "two"], ["nc"]),
        node("Mul", ["hw", "three"], ["big"]),
        node("Concat", ["nc", "big"], ["t"], axis=0),
        node("Resize", ["x", "", "", "t"], ["y"], mode=mode, coordinate_transformation_mode="half_pixel"),
    ]
    constants = {"two": ints(2), "four": ints(4), "three": ints(3), "zero1": ints(0)}
    check(model(nodes, X, ["y"], constants), SHAPES, DIMS)


def test_positions_by_range() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "three"], ["w"]),
        node("Range", ["zero", "w", "one"], ["r"]),
        node("Cast", ["r"], ["f"], to=TensorProto.FLOAT),
        node("Add", ["x", "f"], ["y"]),
    ]
    constants = {"three": np.array(3), "zero": np.array(0), "one": np.array(1)}
    names = check(model(nodes, X, ["y"], constants), SHAPES, DIMS)
    assert any("arange" in n for n in names)


def test_size_as_a_number_in_float_arithmetic() -> None:
    """x / sqrt(w): the size enters as a symbolic number, not as a tensor."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "three"], ["w"]),
        node("Cast", ["w"], ["f"], to=TensorProto.FLOAT),
        node("Sqrt", ["f"], ["q"]),
        node("Div", ["x", "q"], ["y"]),
    ]
    check(model(nodes, X, ["y"], {"three": np.array(3)}), SHAPES, DIMS)


def test_shape_as_an_output() -> None:
    nodes = [node("Shape", ["x"], ["s"]), node("Relu", ["x"], ["y"])]
    check(model(nodes, X, ["y", value("s", None, TensorProto.INT64)]), SHAPES, DIMS)


def test_transposed_rows_and_reshape_by_zero() -> None:
    """[n, c, h, w] to [n, h * w, c] and back through sizes."""
    nodes = [
        node("Reshape", ["x", "rows"], ["r"]),
        node("Transpose", ["r"], ["t"], perm=[0, 2, 1]),
        node("ReduceMean", ["t"], ["m"], axes=[-1], keepdims=1),
        node("Sub", ["t", "m"], ["d"]),
        node("Shape", ["x"], ["s"]),
        node("Transpose", ["d"], ["u"], perm=[0, 2, 1]),
        node("Reshape", ["u", "s"], ["y"]),
    ]
    check(model(nodes, X, ["y"], {"rows": ints(0, 0, -1)}), SHAPES, DIMS)


def attention_model() -> onnx.ModelProto:
    """Self-attention of 2 heads on [n, s, 8], sizes read from the input, as exporters write it."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Slice", ["shape", "zero1", "two1"], ["ns"]),
        node("Concat", ["ns", "heads"], ["split"], axis=0),
        node("Concat", ["ns", "minus"], ["join"], axis=0),
        *[node("MatMul", ["x", f"w{k}"], [f"m{k}"]) for k in "qkv"],
        *[node("Reshape", [f"m{k}", "split"], [f"r{k}"]) for k in "qkv"],
        node("Transpose", ["rq"], ["q"], perm=[0, 2, 1, 3]),
        node("Transpose", ["rk"], ["k"], perm=[0, 2, 3, 1]),
        node("Transpose", ["rv"], ["v"], perm=[0, 2, 1, 3]),
        node("MatMul", ["q", "k"], ["scores"]),
        node("Mul", ["scores", "half"], ["scaled"]),
        node("Softmax", ["scaled"], ["p"], axis=-1),
        node("MatMul", ["p", "v"], ["o"]),
        node("Transpose", ["o"], ["t"], perm=[0, 2, 1, 3]),
        node("Reshape", ["t", "join"], ["j"]),
        node("Add", ["j", "x"], ["y"]),
    ]
    generator = np.random.default_rng(3)
    constants = {
        "zero1": ints(0),
        "two1": ints(2),
        "heads": ints(2, 4),
        "minus": ints(-1),
        "half": np.array(0.5, np.float32),
        **{f"w{k}": generator.standard_normal((8, 8)).astype(np.float32) for k in "qkv"},
    }
    return model(nodes, [value("x", ["n", "s", 8])], ["y"], constants)


@pytest.mark.parametrize("oblivious", [False, True])
def test_attention_with_dynamic_batch_and_length(oblivious: bool) -> None:
    """One graph; traced without regard to sizes 0 and 1 it also takes those."""
    shapes = [(2, 5, 8), (3, 7, 8), (4, 2, 8)]
    least = 2
    if oblivious:
        shapes += [(1, 5, 8), (3, 1, 8), (1, 1, 8)]
        least = 0
    dims: dict[int, object] = {0: Dim("n", min=least, max=64), 1: Dim("s", min=least, max=512)}
    with torch.fx.experimental._config.patch(backed_size_oblivious=oblivious):
        names = check(attention_model(), shapes, dims)
    assert names.count("aten.mm.default") == 3 and names.count("aten.bmm.default") == 2


def test_nonzero_of_constant_of_shape() -> None:
    """The old way to write arange: known at capture when the size is."""
    nodes = [
        node("ConstantOfShape", ["five"], ["ones"], value=onnx.numpy_helper.from_array(ints(1))),
        node("NonZero", ["ones"], ["z"]),
        node("Transpose", ["z"], ["t"], perm=[1, 0]),
        node("Squeeze", ["t", "one"], ["q"]),
        node("Cast", ["q"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["x", "f"], ["y"]),
    ]
    m = model(nodes, [value("x", ["n", 5])], ["y"], {"five": ints(5), "one": ints(1)})
    names = check(m, [(2, 5), (4, 5)], {0: N})
    assert names.count("aten.mul.Tensor") == 1 and len(names) <= 2


def test_constants_are_folded_and_unused_ones_dropped() -> None:
    constants = {
        "a": np.ones((4, 4), np.float32),
        "b": np.full((4, 4), 2, np.float32),
        "dead": np.zeros(1000, np.float32),
        "one": np.array(1.0, np.float32),
    }
    nodes = [
        node("MatMul", ["a", "b"], ["c"]),
        node("Exp", ["dead"], ["nobody"]),
        node("Add", ["c", "one"], ["d"]),
        node("MatMul", ["x", "d"], ["e"]),
        node("Mul", ["e", "one"], ["y"]),
    ]
    module = load(model(nodes, [value("x", ["n", 4])], ["y"], constants))
    assert [tuple(p.shape) for p in module.parameters()] == [(4, 4)]
    assert not any(p.requires_grad for p in module.parameters())
    assert torch.equal(module(torch.ones(2, 4)), torch.full((2, 4), 36.0))


def test_scalar_constants_become_numbers() -> None:
    """No buffer for a one-element operand, also when its rank is higher than the tensor's."""
    constants = {"two": np.array([2.0], np.float32), "cube": np.full((1, 1, 1), 3.0, np.float32)}
    nodes = [node("Div", ["x", "two"], ["a"]), node("Sub", ["cube", "a"], ["y"])]
    m = model(nodes, [value("x", None)], ["y"], constants)
    module = load(m)
    assert not list(module.parameters())
    for shape in ((), (4,), (2, 4), (2, 2, 2, 2)):
        x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        (want,) = reference(m, x)
        have = module(torch.from_numpy(x))
        assert want.shape == tuple(have.shape)
        np.testing.assert_allclose(want, have.numpy(), rtol=1e-6)


def test_dim_names_are_not_proofs() -> None:
    names = ["n", "", "?", "-1", "a.b", "2x", "n"]
    (spec,) = load(model([node("Relu", ["x"], ["y"])], [value("x", names)], ["y"])).input_specs
    assert spec.dims == ("n", None, None, None, None, None, "n")
    (spec,) = load(model([node("Relu", ["x"], ["y"])], [value("x", [-1, 0, 4])], ["y"])).input_specs
    assert spec.dims == (None, None, 4)
    (spec,) = load(model([node("Relu", ["x"], ["y"])], [value("x", None)], ["y"])).input_specs
    assert spec.dims is None


def test_wrong_declared_output_shape_is_not_believed() -> None:
    m = model([node("Relu", ["x"], ["y"])], [value("x", ["n", 3])], ["y"])
    m.graph.output[0].CopyFrom(value("y", [7, 7, 7]))
    assert load(m)(torch.ones(2, 3)).shape == (2, 3)


def test_metadata_and_names() -> None:
    m = model([node("Relu", ["x"], ["y"])], [value("x", [3])], ["y"])
    onnx.helper.set_model_props(m, {"character": "a\nb\u6587"})
    module = load(m)
    assert module.metadata == {"character": "a\nb\u6587"}
    assert module.output_names == ("y",) and module.opset == 17
    assert [s.name for s in module.input_specs] == ["x"]


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 17, 21, onnx.defs.onnx_opset_version()])
def test_softmax_across_versions(opset: int) -> None:
    """Before opset 13 softmax runs over all dims from its axis on."""
    m = model([node("Softmax", ["x"], ["y"], axis=1)], [value("x", [2, 3, 4])], ["y"], opset=opset)
    x = torch.randn(2, 3, 4)
    want = torch.softmax(x, 1) if opset >= 13 else torch.softmax(x.flatten(1), 1).reshape(2, 3, 4)
    assert torch.allclose(load(m)(x), want, atol=1e-6)


def test_dynamo_takes_it_whole() -> None:
    """torch.compile sees one graph without breaks."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero1"], ["n"]),
        node("Concat", ["n", "minus"], ["t"], axis=0),
        node("Reshape", ["x", "t"], ["r"]),
        node("Gemm", ["r", "w", "b"], ["g"]),
        node("Relu", ["g"], ["y"]),
    ]
    constants = {
        "zero1": ints(0),
        "minus": ints(-1),
        "w": np.ones((12, 4), np.float32),
        "b": np.ones(4, np.float32),
    }
    module = load(model(nodes, [value("x", ["n", 3, 4])], ["y"], constants))
    graphs = 0

    def count(gm: torch.fx.GraphModule, _: object) -> object:
        nonlocal graphs
        graphs += 1
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=count, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n in (2, 5, 7):
            x = torch.randn(n, 3, 4)
            assert torch.equal(compiled(x), module(x))
    assert graphs == 1
