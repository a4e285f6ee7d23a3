"""Frozen convolutions absorb the scale and shift that follow; nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewright.interp import run_graph
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import DType, f16, f32
from tilewright.ir.expr import call, const, integer, symbol
from tilewright.ir.graph import Graph, LibraryCall, Op, Operand, Value
from tilewright.ir.ops import contract, norm, pointwise, view
from tilewright.rewrite import interpret
from tilewright.rewrite.normal.frozen_weights import freeze
from tilewright.rewrite.normal.normalise import normalise

aten = torch.ops.aten


class Net:
    """A builder of small frozen networks in which every node has its library call."""

    def __init__(self, dtype: DType = f32) -> None:
        self.b = Builder()
        self.dtype = dtype
        self.kind = torch.float16 if dtype is f16 else torch.float32

    def frozen(self, *shape: int, low: float = -1) -> Value:
        t = (torch.rand(shape) * (1 - low) + low).to(self.kind)
        return self.b.constant(t, tuple(map(integer, shape)), self.dtype)

    def node(
        self, name: str, function: object, inputs: list[Value], args: tuple[object, ...], make, reason="none"
    ) -> Value:
        with self.b.origin(name) as o:
            out = make()
        self.b.close_origin(o, LibraryCall(name, function, args, reason=reason), inputs, [out])
        return out

    def conv(
        self,
        x: Value,
        out: int,
        size: int = 3,
        *,
        bias: bool,
        groups: int = 1,
        stride: int = 1,
        transposed=False,
    ) -> Value:
        channels = x.shape[1].value
        assert isinstance(channels, int)
        shape = (channels, out // groups) if transposed else (out, channels // groups)
        w = self.frozen(*shape, size, size)
        c = self.frozen(out) if bias else None
        ones, half = [1, 1], [size // 2] * 2
        inputs = [x, w, *([c] if c is not None else [])]
        args = (
            Operand(0),
            Operand(1),
            Operand(2) if bias else None,
            [stride] * 2,
            half,
            ones,
            transposed,
            [0, 0],
            groups,
        )
        border = [integer(size // 2)] * 2

        def make() -> Value:
            if transposed:
                zero = [integer(0)] * 2
                return contract.transposed_convolution(
                    self.b, x, w, c, [stride] * 2, border, ones, zero, groups
                )
            return contract.convolution(self.b, x, w, c, [stride] * 2, border, ones, groups)

        return self.node("convolution", aten.convolution.default, inputs, args, make, "convolution")

    def norm(self, x: Value, *, affine: bool = True) -> Value:
        channels = x.shape[1].value
        assert isinstance(channels, int)
        mean, var = self.frozen(channels), self.frozen(channels, low=0.3)
        gain, shift = (self.frozen(channels), self.frozen(channels)) if affine else (None, None)
        return self.node(
            "batch_norm",
            None,
            [x, mean, var],
            (),
            lambda: norm.batch_norm_inference(self.b, x, mean, var, gain, shift, 1e-5),
        )

    def relu(self, x: Value) -> Value:
        return self.node("relu", torch.relu, [x], (Operand(0),), lambda: pointwise.relu(self.b, x))


def as_calls(graph: Graph) -> Graph:
    """The graph with every convolution as the library call of its origin."""
    ops: list[Op] = []
    for op in graph.ops:
        origin = graph.origins[op.origin]
        if origin.call is None or origin.call.reason != "convolution":
            ops.append(op)
        elif set(op.outputs) & set(origin.outputs):
            ops.append(Op("conv", origin.inputs, origin.outputs, call=origin.call, origin=op.origin))
    return graph.with_ops(ops)


def compare(graph: Graph, x: np.ndarray, tolerance: float = 1e-5) -> Graph:
    """Fold, then compare the graph before, the graph after, and the library calls after."""
    raw = freeze(graph)
    raw.verify()
    new = freeze(normalise(graph, interpret))
    new.verify()
    assert len(new.ops) == len(normalise(raw, interpret).ops)
    want = np.asarray(run_graph(graph, [x])[0], np.float64)
    for g in (raw, as_calls(raw), new, as_calls(new)):
        got = np.asarray(run_graph(g, [x])[0], np.float64)
        assert np.allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())
    return new


def image(channels: int, dtype: DType = f32) -> np.ndarray:
    return torch.rand(2, channels, 5, 4).numpy().astype(np.float16 if dtype is f16 else np.float32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("groups", "transposed"), [(1, False), (2, False), (4, False), (1, True)])
def test_norm_after_convolution_vanishes(bias: bool, affine: bool, groups: int, transposed: bool):
    net = Net()
    x = net.b.value((symbol("n", 0), *map(integer, (4, 5, 4))), f32)
    y = net.norm(net.conv(x, 8, bias=bias, groups=groups, transposed=transposed), affine=affine)
    new = compare(net.b.finish([x], [net.relu(y)]), image(4))
    assert [op.name for op in new.ops][1:] == ["bias", "relu"]
    assert len(new.constants) == 2 and all(v in new.layouts for v in new.constants)


def test_chains_of_blocks_fold_one_after_the_other():
    net = Net()
    x = net.b.value(tuple(map(integer, (2, 3, 5, 4))), f32)
    y = net.relu(net.norm(net.conv(x, 6, bias=False, stride=2)))
    y = net.norm(net.conv(y, 6, bias=True, groups=6))
    y = net.norm(net.conv(y, 4, 1, bias=False))
    new = compare(net.b.finish([x], [y]), image(3))
    assert [op.name for op in new.ops if "norm" in op.name] == []
    assert sum(o.call is not None and o.call.reason == "convolution" for o in new.origins) == 3


def test_a_plain_scale_folds_too():
    net = Net()
    x = net.b.value(tuple(map(integer, (2, 3, 5, 4))), f32)
    y = net.conv(x, 6, bias=True)
    z = net.node("mul", None, [y], (), lambda: pointwise.mul(net.b, y, const(0.3, f32)))
    new = compare(net.b.finish([x], [z]), image(3))
    assert len(new.ops) == 2


def test_half_weights_round_once():
    net = Net(f16)
    x = net.b.value(tuple(map(integer, (2, 3, 5, 4))), f16)
    y = net.norm(net.conv(x, 6, bias=True))
    new = compare(net.b.finish([x], [y]), image(3, f16), 4e-3)
    assert {t.dtype for t in new.constants.values()} == {torch.float16}


def test_the_memory_format_of_a_weight_is_kept():
    net = Net()
    x = net.b.value(tuple(map(integer, (2, 3, 5, 4))), f32)
    y = net.norm(net.conv(x, 6, bias=False))
    g = net.b.finish([x], [y])
    w = next(v for v in g.constants if len(v.shape) == 4)
    g.constants[w] = g.constants[w].to(memory_format=torch.channels_last)
    new = compare(g, image(3))
    (folded,) = [t for t in new.constants.values() if t.dim() == 4]
    assert folded.is_contiguous(memory_format=torch.channels_last)


def unchanged(net: Net, x: Value, outputs: list[Value], inputs: list[object]) -> None:
    g = normalise(net.b.finish([x], outputs), interpret)
    new = freeze(g)
    assert new.digest() == g.digest()
    for a, b in zip(run_graph(g, inputs), run_graph(new, inputs), strict=True):
        assert np.array_equal(a, b)


def test_what_must_not_fold():
    """A sum that someone else reads, a scale over space, something not affine, and a norm of the input."""
    data = [image(3)]
    net = Net()
    x = net.b.value(tuple(map(integer, (2, 3, 5, 4))), f32)
    y = net.conv(x, 6, bias=True)
    unchanged(net, x, [net.norm(y), y], data)
    net = Net()
    x = net.b.value(tuple(map(integer, (2, 3, 5, 4))), f32)
    y, space = net.conv(x, 6, bias=True), net.frozen(5, 4)
    unchanged(net, x, [net.node("mul", None, [y, space], (), lambda: pointwise.mul(net.b, y, space))], data)
    net = Net()
    x = net.b.value(tuple(map(integer, (2, 3, 5, 4))), f32)
    y = net.conv(x, 6, bias=True)
    unchanged(net, x, [net.node("abs", None, [y], (), lambda: net.relu(y))], data)
    net = Net()
    x = net.b.value(tuple(map(integer, (2, 3, 5, 4))), f32)
    unchanged(net, x, [net.conv(net.relu(net.norm(x)), 6, bias=True)], data)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_a_slice_is_no_scale(length: int, normed: bool) -> None:
    """The call makes all elements, so the chain ends in front of what takes only the first of them."""
    net = Net()
    x = net.b.value(tuple(map(integer, (2, 3, 5, 4))), f32)
    y = net.conv(x, 6, bias=not normed)
    y = net.norm(y) if normed else y
    size = integer(length)
    z = net.node("slice", None, [y], (), lambda: view.slice_(net.b, y, 2, None, size))
    new = compare(net.b.finish([x], [net.relu(z)]), image(3))
    (call,) = [o for o in new.origins if o.call is not None and o.call.reason == "convolution"]
    assert [v.shape[2] for v in call.outputs] == [integer(5)]


def test_scales_that_are_not_finite_stay():
    net = Net()
    x = net.b.value(tuple(map(integer, (2, 3, 5, 4))), f32)
    y = net.conv(x, 6, bias=True)
    bad = net.b.constant(
        torch.tensor([1.0, float("inf")] * 3).reshape(6, 1, 1), tuple(map(integer, (6, 1, 1))), f32
    )
    z = net.node("mul", None, [y, bad], (), lambda: pointwise.mul(net.b, y, bad))
    g = normalise(net.b.finish([x], [z]), interpret)
    assert freeze(g).digest() == g.digest()


def test_affine_in_every_form():
    """Subtraction from a constant, division, negation and sums of several uses of the scale."""
    net = Net()
    x = net.b.value(tuple(map(integer, (2, 3, 5, 4))), f32)
    y = net.conv(x, 6, bias=False)
    s = net.b.constant(torch.rand(6, 1, 1) + 0.5, tuple(map(integer, (6, 1, 1))), f32)
    compute = lambda e, c: call("neg", call("sub", c, call("div", call("add", call("mul", e, c), e), c)))  # noqa: E731
    z = net.node("mixed", None, [y, s], (), lambda: net.b.pointwise("mixed", compute, y, s))
    new = compare(net.b.finish([x], [z]), image(3))
    assert len(new.ops) == 2
