"""If, Loop, Scan: resolved at load, unrolled at capture, or run by python on data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from tests.support.onnx_models import body, ints, model, node, value
from torch.export import Dim

from tilewright.capture.onnx import control, load
from tilewright.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

THEN = body([node("Add", ["x", "one"], ["t"])], [], ["t"])
ELSE = body([node("Sub", ["x", "one"], ["e"])], [], ["e"])
ONE = {"one": np.array(1.0, np.float32)}


def test_constant_condition_is_inlined() -> None:
    for flag in (True, False):
        constants = {**ONE, "c": np.array(flag)}
        nodes = [node("If", ["c"], ["y"], then_branch=THEN, else_branch=ELSE)]
        module = load(model(nodes, [value("x", [3])], ["y"], constants))
        assert not module.data_dependent
        assert torch.equal(module(torch.zeros(3)), torch.full((3,), 1.0 if flag else -1.0))


def test_condition_on_a_size_is_decided_at_capture() -> None:
    nodes = [
        node("Shape", ["x"], ["s"], start=0, end=1),
        node("Greater", ["s", "four"], ["c"]),
        node("If", ["c"], ["y"], then_branch=THEN, else_branch=ELSE),
    ]
    m = model(nodes, [value("x", ["n"])], ["y"], {**ONE, "four": ints(4)})
    module = load(m)
    assert not module.data_dependent
    assert torch.equal(module(torch.zeros(5)), torch.ones(5))
    assert torch.equal(module(torch.zeros(3)), -torch.ones(3))
    n = Dim("n", min=5, max=64)
    program = torch.export.export(module, (torch.zeros(6),), dynamic_shapes=(({0: n},),), strict=False)
    assert torch.equal(program.module()(torch.zeros(9)), torch.ones(9))


def test_condition_on_data_runs_eagerly_and_is_listed() -> None:
    nodes = [
        node("ReduceSum", ["x"], ["r"], keepdims=0),
        node("Greater", ["r", "one"], ["c"]),
        node("If", ["c"], ["y"], name="choose", then_branch=THEN, else_branch=ELSE),
    ]
    module = load(model(nodes, [value("x", [3])], ["y"], ONE))
    assert len(module.data_dependent) == 1 and "choose" in module.data_dependent[0]
    assert torch.equal(module(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(module(-torch.ones(3)), torch.full((3,), -2.0))


def loop_model(trips: str, condition: str, constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    """v = v * 2 + i, scanned; runs while the condition of the body holds."""
    graph = body(
        [
            node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
            node("Mul", ["v", "two"], ["d"]),
            node("Add", ["d", "f"], ["v2"]),
            *(
                [node("ReduceMax", ["v2"], ["m"], keepdims=0), node("Less", ["m", "cap"], ["c2"])]
                if condition == "data"
                else [node("Identity", ["c"], ["c2"])]
            ),
            node("Identity", ["v2"], ["scan"]),
        ],
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("v", None)],
        [value("c2", None, TensorProto.BOOL), "v2", "scan"],
        {"two": np.array(2.0, np.float32), "cap": np.array(20.0, np.float32)},
    )
    nodes = [node("Shape", ["x"], ["s"], start=0, end=1), node("Squeeze", ["s"], ["n"])]
    nodes.append(node("Loop", [trips, "", "x"], ["y", "all"], name="turn", body=graph))
    return model(nodes, [value("x", ["n"])], ["y", "all"], constants)


@pytest.mark.parametrize(("trips", "condition"), [("k", "none"), ("n", "none"), ("k", "data"), ("", "data")])
def test_loops_agree_with_onnxruntime(trips: str, condition: str) -> None:
    m = loop_model(trips, condition, {"k": np.array(6)})
    module = load(m)
    assert bool(module.data_dependent) == (condition == "data")
    session = onnxruntime.InferenceSession(m.SerializeToString())
    for n in (1, 3, 5):
        x = np.linspace(0, 1, n).astype(np.float32)
        want = session.run(None, {"x": x})
        have = module(torch.from_numpy(x))
        for w, h in zip(want, have, strict=True):
            np.testing.assert_allclose(w, h.numpy(), rtol=1e-6)


def test_known_trip_count_is_unrolled_by_export() -> None:
    module = load(loop_model("k", "none", {"k": np.array(4)}))
    program = torch.export.export(
        module, (torch.ones(3),), dynamic_shapes=(({0: Dim("n", min=2, max=9)},),), strict=False
    )
    x = torch.randn(5)
    for a, b in zip(program.module()(x), module(x), strict=True):
        assert torch.allclose(a, b)
    assert sum("mul" in str(n.target) for n in program.graph.nodes) == 4


def test_endless_loop_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "LOOP_LIMITS", replace(control.LOOP_LIMITS, max_steps=1000))
    graph = body(
        [node("Identity", ["c"], ["c2"]), node("Identity", ["v"], ["v2"])],
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("v", None)],
        [value("c2", None, TensorProto.BOOL), "v2"],
    )
    constants = {"go": np.array(True), "m": np.array(2**62)}
    for trips in ("", "m"):
        nodes = [node("Loop", [trips, "go", "x"], ["y"], body=graph)]
        module = load(model(nodes, [value("x", [1])], ["y"], constants))
        with pytest.raises(UnsupportedError, match="more than"):
            module(torch.ones(1))


def test_loop_without_iterations() -> None:
    """The carried value is returned, the scan output is empty."""
    last, scanned = load(loop_model("k", "none", {"k": np.array(0)}))(torch.ones(3))
    assert torch.equal(last, torch.ones(3)) and scanned.shape[0] == 0


def test_scan_and_captured_values() -> None:
    """A running sum that also reads a value of the outer graph."""
    graph = body(
        [node("Add", ["s", "e"], ["a"]), node("Mul", ["a", "w"], ["s2"]), node("Identity", ["s2"], ["o"])],
        [value("s", None), value("e", None)],
        ["s2", "o"],
    )
    nodes = [
        node("Relu", ["k"], ["w"]),
        node("Scan", ["s0", "x"], ["last", "all"], num_scan_inputs=1, body=graph),
    ]
    inputs = [value("s0", [2]), value("x", ["t", 2]), value("k", [2])]
    m = model(nodes, inputs, ["last", "all"])
    args = [np.random.default_rng(0).random(s).astype(np.float32) for s in ((2,), (5, 2), (2,))]
    session = onnxruntime.InferenceSession(m.SerializeToString())
    want = session.run(None, dict(zip(("s0", "x", "k"), args, strict=True)))
    have = load(m)(*[torch.from_numpy(a) for a in args])
    for w, h in zip(want, have, strict=True):
        np.testing.assert_allclose(w, h.numpy(), rtol=1e-6)


def test_model_functions_are_inlined() -> None:
    """A local function with an attribute and a default, called inside another one."""
    own = helper.make_opsetid("own", 1)
    standard = helper.make_opsetid("", 17)
    leaky = helper.make_node("LeakyRelu", ["a"], ["b"])
    reference = leaky.attribute.add()
    reference.name, reference.ref_attr_name, reference.type = "alpha", "slope", onnx.AttributeProto.FLOAT
    inner = helper.make_function("own", "Inner", ["a"], ["b"], [leaky], [standard], ["slope"])
    call = helper.make_node("Inner", ["p"], ["q"], domain="own", slope=0.5)
    twice = helper.make_node("Add", ["q", "q"], ["r"])
    outer = helper.make_function("own", "Outer", ["p"], ["r"], [call, twice], [standard, own])
    m = model([node("Outer", ["x"], ["y"], domain="own")], [value("x", [4])], ["y"])
    m.opset_import.append(own)
    m.functions.extend([inner, outer])
    assert torch.equal(load(m)(torch.tensor([-2.0, 0.0, 1.0, -4.0])), torch.tensor([-2.0, 0.0, 2.0, -4.0]))
