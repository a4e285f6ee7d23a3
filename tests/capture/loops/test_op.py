"""Loops stay loops: `Loop`, `Scan` and torch's own loops as one op whose body is compiled once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto
from tests.support.loops import RNG, WIDTH, check, feed, loop, weights
from tests.support.onnx_models import body, model, node, value

import tilewright
from tilewright.capture.fx import from_fx
from tilewright.capture.loops.op import Changing, loop_op
from tilewright.capture.trace import trace
from tilewright.interp.graph import run_graph

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def loops_of(compiled: object) -> list[str]:
    return [c.name for c in compiled.calls if c.name == "loop"]  # type: ignore[attr-defined]


def test_a_loop_over_a_size_serves_all_sizes(tmp_path: Path) -> None:
    before = tilewright.stats().graphs
    compiled = check(loop("none", "size"), tmp_path / "m.onnx", *(feed(n) for n in (80, 7, 300, 1)))
    assert loops_of(compiled) == ["loop"] and tilewright.stats().graphs == before + 1
    assert compiled.coverage.ops < 16  # type: ignore[attr-defined]


@pytest.mark.parametrize("n", [0, 1, 5, 33])
def test_a_trip_count_may_be_data(n: int, tmp_path: Path) -> None:
    compiled = check(loop("none", "given"), tmp_path / "m.onnx", feed(40, given=np.array(n)))
    assert loops_of(compiled) == ["loop"]


def test_a_condition_on_data_ends_a_loop(tmp_path: Path) -> None:
    compiled = check(loop("data", "size"), tmp_path / "m.onnx", *(feed(n) for n in (9, 40)))
    assert loops_of(compiled) == ["loop"]


def test_a_condition_may_be_all_that_ends_a_loop(tmp_path: Path) -> None:
    check(loop("data", "none"), tmp_path / "m.onnx", *(feed(90) for _ in range(3)))


@pytest.mark.parametrize("allowed", [True, False])
def test_the_first_step_may_be_forbidden(allowed: bool, tmp_path: Path) -> None:
    check(loop("none", "size", "flag"), tmp_path / "m.onnx", feed(8, flag=np.array(allowed)))


# --- the op itself ---


class Walk(torch.nn.Module):
    """h = tanh(x[t] + h w), from either end, with h and its sum collected."""

    def __init__(self, backwards: bool = False) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(8, 8) / 3, requires_grad=False)
        self.backwards = backwards

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def step(t: torch.Tensor, h: torch.Tensor, part: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
            h = torch.tanh(part + h @ w) + t / 100
            return [h, h.clone(), h.sum(-1)]

        return loop_op(step, x.shape[0], None, 2, self.backwards, [h], [x], [self.w])


@pytest.mark.parametrize("backwards", [False, True])
def test_the_interpreter_gives_a_loop_torchs_meaning(backwards: bool) -> None:
    module, x, h = Walk(backwards), torch.randn(11, 2, 8), torch.randn(2, 8)
    program = trace(module, [x, h], [[0, 1], [0]], [[(0, 1), (1, 0)]])
    graph = from_fx(program.gm)
    graph.verify()
    assert [op.name for op in graph.ops if op.call] == ["loop"]
    for n in (11, 3, 0):
        for have, want in zip(run_graph(graph, [x[:n], h]), module(x[:n], h), strict=True):
            torch.testing.assert_close(torch.as_tensor(have).to(want.dtype), want)


def test_a_body_that_does_not_fit_its_loop_is_refused() -> None:
    program = trace(Walk(), [torch.randn(5, 2, 8), torch.randn(2, 8)], [[], []])
    graph = from_fx(program.gm)
    (op,) = [op for op in graph.ops if op.call]
    assert op.call is not None and op.call.loop is not None
    whole = op.call.loop
    for wrong in (
        replace(whole, carried=2, stacked=1),
        replace(whole, steps=None),
        replace(whole, conditional=True),
        replace(whole, body=replace(whole.body, outputs=whole.body.outputs[::-1])),
    ):
        with pytest.raises(ValueError, match="loop"):
            graph.with_ops([replace(op, call=replace(op.call, loop=wrong))]).verify()


def test_a_loop_is_part_of_what_identifies_a_graph() -> None:
    """Two graphs that differ in a body, or in a direction, are different graphs."""
    x, h = torch.randn(5, 2, 8), torch.randn(2, 8)
    found = {from_fx(trace(Walk(b), [x, h], [[], []]).gm).digest() for b in (False, True, False)}
    assert len(found) == 2


def test_a_carried_value_keeps_its_shape() -> None:
    def grow(t: torch.Tensor, h: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat([h, h])]

    class Growing(torch.nn.Module):
        def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with pytest.raises(Changing):
                loop_op(grow, 5, None, 0, False, [h], [], [])
            return (h + 1,)

    trace(Growing(), [torch.randn(3)], [[]])


# --- recurrent layers ---

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def layer(kind: str, n: int | str, *, lengths: bool = False, states: bool = True, **attributes: object):
    """One recurrent layer of 5 inputs and 6 units over x [n, 3, 5]."""
    d = 2 if attributes.get("direction") == "bidirectional" else 1
    g = GATES[kind]
    batch_first = attributes.get("layout")
    shape = [3, n, 5] if batch_first else [n, 3, 5]
    held = [3, d, WIDTH] if batch_first else [d, 3, WIDTH]
    constants = {
        "w": (RNG.standard_normal((d, g * WIDTH, 5)) / 2).astype(np.float32),
        "r": (RNG.standard_normal((d, g * WIDTH, WIDTH)) / 2).astype(np.float32),
        "b": (RNG.standard_normal((d, 2 * g * WIDTH)) / 2).astype(np.float32),
    }
    names = ["x", "w", "r", "b", "lengths" if lengths else "", "h0" if states else ""]
    inputs = [value("x", shape)]
    if lengths:
        inputs.append(value("lengths", [3], TensorProto.INT32))
    outs = ["y", "yh"]
    inputs += [value("h0", held)] if states else []
    if kind == "LSTM":
        names.append("c0" if states else "")
        inputs += [value("c0", held)] if states else []
        outs.append("yc")
        if attributes.pop("peephole", False):
            names.append("p")
            constants["p"] = (RNG.standard_normal((d, 3 * WIDTH)) / 2).astype(np.float32)
    nodes = [node(kind, names, outs, hidden_size=WIDTH, **attributes)]
    opset = 14 if batch_first is not None else 13
    proto = model(nodes, inputs, outs, constants, opset=opset)

    def given(steps: int) -> dict[str, np.ndarray]:
        sizes = [3, steps, 5] if batch_first else [steps, 3, 5]
        made = {"x": RNG.standard_normal(sizes).astype(np.float32)}
        if states:
            for name in ("h0", "c0") if kind == "LSTM" else ("h0",):
                made[name] = RNG.standard_normal(held).astype(np.float32)
        if lengths:
            made["lengths"] = np.array([steps, max(1, steps // 2), 1], np.int32)
        return made

    return proto, given


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_is_a_loop(kind: str, direction: str, tmp_path: Path) -> None:
    proto, given = layer(kind, "n", direction=direction, lengths=direction != "forward")
    compiled = check(proto, tmp_path / "m.onnx", given(70), given(9), given(1))
    assert len(loops_of(compiled)) == (2 if direction == "bidirectional" else 1)


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("LSTM", {"peephole": True, "input_forget": 1}),
        ("LSTM", {"clip": 0.5, "activations": ["HardSigmoid", "Softsign", "Tanh"]}),
        ("GRU", {"linear_before_reset": 1}),
        ("RNN", {"activations": ["Relu"]}),
    ],
)
def test_what_a_layer_may_have_besides(kind: str, attributes: dict[str, object], tmp_path: Path) -> None:
    proto, given = layer(kind, 40, states=False, **attributes)
    check(proto, tmp_path / "m.onnx", given(40))


def test_a_loop_inside_a_loop_reads_what_both_stand_in(tmp_path: Path) -> None:
    inner = body(
        [
            node("Mul", ["k", "half"], ["k1"]),
            node("Add", ["k1", "xi"], ["k2"]),
            node("Add", ["k2", "h0"], ["k3"]),
            node("Identity", ["d"], ["d2"]),
        ],
        [value("j", [], TensorProto.INT64), value("d", [], TensorProto.BOOL), value("k", [2, WIDTH])],
        [value("d2", [], TensorProto.BOOL), value("k3", [2, WIDTH])],
    )
    outer = body(
        [
            node("Gather", ["x", "i"], ["xi"], axis=0),
            node("Loop", ["six", "", "h"], ["h2"], body=inner),
            node("Identity", ["c"], ["c2"]),
            node("ReduceSum", ["h2"], ["each"], keepdims=0),
        ],
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("h", [2, WIDTH])],
        [value("c2", [], TensorProto.BOOL), value("h2", [2, WIDTH]), value("each", [])],
    )
    nodes = [
        node("Shape", ["x"], ["s"], start=0, end=1),
        node("Squeeze", ["s"], ["n"]),
        node("Loop", ["n", "", "h0"], ["last", "all"], body=outer),
    ]
    inputs = [value("x", ["n_", 2, WIDTH]), value("h0", [2, WIDTH])]
    proto = model(nodes, inputs, ["last", "all"], weights() | {"six": np.array(6)})
    compiled = check(proto, tmp_path / "m.onnx", feed(12), feed(70))
    assert loops_of(compiled) == ["loop", "loop"]
