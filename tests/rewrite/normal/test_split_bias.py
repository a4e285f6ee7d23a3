"""Biases of convolutions that a kernel adds instead of the library."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.library_calls import agrees, captured
from torch import Tensor, nn

from tilewright.capture.aten import decompositions
from tilewright.capture.fx import from_fx
from tilewright.interp import run_graph
from tilewright.ir.graph import Graph, Value
from tilewright.library.select import select
from tilewright.rewrite.normal.frozen_weights import freeze
from tilewright.rewrite.normal.normalise import normalise
from tilewright.rewrite.normal.split_bias import split_biases


class Net(nn.Module):
    def __init__(self, bias: bool, transposed: bool) -> None:
        super().__init__()
        kind = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.layer = kind(3, 5, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


def graph_of(net: nn.Module, x: Tensor) -> Graph:
    program = torch.export.export(net, (x,), strict=False).run_decompositions(decompositions())
    return select(normalise(from_fx(program.graph_module)))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_call_goes_without_and_a_kernel_adds(transposed: bool) -> None:
    net, x = Net(True, transposed).eval(), torch.randn(2, 3, 9, 8)
    graph = split_biases(graph_of(net, x))
    (op,) = (op for op in graph.ops if op.call is not None)
    assert op.call is not None and op.call.args[2] is None and len(op.inputs) == 2
    assert any(op.name == "bias" for op in graph.ops)
    state = dict(net.named_parameters())
    inputs = [state["layer.weight"].detach().numpy(), state["layer.bias"].detach().numpy(), x.numpy()]
    (made,) = run_graph(normalise(graph), inputs)
    np.testing.assert_allclose(np.asarray(made), net(x).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_without_a_bias_nothing_changes() -> None:
    graph = graph_of(Net(False, False).eval(), torch.randn(2, 3, 9, 8))
    assert [op.name for op in split_biases(graph).ops] == [op.name for op in graph.ops]


def test_the_bias_that_a_frozen_norm_becomes_is_split_too() -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU6()).eval()
    with torch.no_grad():
        for p in (*net.parameters(), *net.buffers()):
            p.copy_(torch.rand_like(p.float()) + 0.5)
    x = torch.randn(2, 3, 9, 8)
    graph = split_biases(select(freeze(captured(net, (x,)))))
    graph.verify()  # what is frozen has numbers above those of the ops
    (op,) = (op for op in graph.ops if op.call is not None)
    assert op.call is not None and op.call.args[2] is None and len(op.inputs) == 2
    agrees(normalise(graph), net, (x,))


def test_a_graph_with_two_values_of_one_number_is_refused() -> None:
    graph = split_biases(graph_of(nn.Conv2d(3, 5, 3), torch.randn(2, 3, 9, 8)))
    first, *rest = graph.ops
    given = next(v for v in graph.inputs if isinstance(v, Value))
    numbered = replace(first, outputs=(replace(first.output, id=given.id),))
    with pytest.raises(ValueError, match="number of another value"):
        graph.with_ops([numbered, *rest]).verify()
