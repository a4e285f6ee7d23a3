"""Graphs with tensors that are not dense: they run as captured, say so, and are refused where that is not wanted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import UnsupportedError


def _step(net: nn.Embedding, call: object, rows: Tensor) -> Tensor:
    """The gradient of the weights, dense."""
    net.zero_grad()
    call(rows).sin().sum().backward()  # type: ignore[operator]
    assert net.weight.grad is not None and net.weight.grad.is_sparse
    return net.weight.grad.to_dense()


def test_a_sparse_gradient_is_eagers_and_its_graph_says_that_it_runs_as_captured() -> None:
    tilewright.reset()
    torch.manual_seed(0)
    net = nn.Embedding(30, 4, sparse=True)
    call = torch.compile(net, backend=tilewright.backend)
    for rows in (torch.randint(0, 30, (3, 4)), torch.randint(0, 30, (2, 4))):
        torch.testing.assert_close(_step(net, call, rows), _step(net, net, rows))
    backward = [str(g) for g in tilewright.compilations() if str(g).startswith("backward")]
    assert backward and all("torch.sparse_coo" in line for line in backward)
    assert tilewright.stats().fallbacks == len(backward)


def test_strict_refuses_it() -> None:
    net = nn.Embedding(30, 4, sparse=True)
    call = torch.compile(net, backend=tilewright.backend, options={"strict": True})
    with pytest.raises(UnsupportedError, match="torch.sparse_coo"):
        _step(net, call, torch.tensor([[1, 2], [2, 5]]))


@pytest.mark.parametrize("scale", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_quantised_tensor_is_eagers_and_its_graph_says_that_it_runs_as_captured(scale: object) -> None:
    """Torch's fake kernel of it promises plain floats."""

    def program(x: Tensor) -> Tensor:
        zero = 10 if isinstance(scale, float) else torch.tensor(10)
        q = torch.quantize_per_tensor(x * 2, scale, zero, torch.quint8)  # type: ignore[call-overload]
        return q.dequantize() + 1

    tilewright.reset()
    x = torch.randn(5, 3)
    y = torch.compile(program, backend=tilewright.backend)(x)
    torch.testing.assert_close(y, program(x))
    assert any("torch.quint8" in str(g) for g in tilewright.compilations())
