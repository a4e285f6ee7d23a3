"""Jagged tensors: their graphs are graphs of the values, through which the name of the ragged size passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import tilewright


def _jagged(lengths: Sequence[int], *, grad: bool = False) -> Tensor:
    rows = [torch.randn(n, 4) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=grad)


def _step(call: Callable[[Tensor], Tensor], n: Tensor) -> tuple[Tensor, Tensor]:
    n.grad = None
    result = call(n)
    assert result.shape[1] == n.shape[1]
    result.values().pow(2).sum().backward()
    assert n.grad is not None
    return result.values(), n.grad.values()


def test_a_layer_of_jagged_tensors_and_its_gradients_are_kernels() -> None:
    tilewright.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())
    fast = torch.compile(net, backend=tilewright.backend)
    for lengths in ((3, 1, 5), (2, 7), (1, 1, 1, 4)):
        n = _jagged(lengths, grad=True)
        torch.testing.assert_close(_step(fast, n), _step(net, n))
    assert tilewright.stats().fallbacks == 0
    assert all(graph.kernels for graph in tilewright.compilations())


def test_results_that_are_dense_and_inference() -> None:
    def pooled(n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return n.sin().values(), n.mean(1), n.to_padded_tensor(0.0).sum(1)

    fast = torch.compile(pooled, backend=tilewright.backend)
    for lengths in ((3, 1, 5), (2, 2)):
        n = _jagged(lengths)
        torch.testing.assert_close(fast(n), pooled(n))


def test_the_other_door() -> None:
    n = _jagged((3, 1, 5))
    result = tilewright.compile(lambda n: (n * 2).sin(), (n,))(n)
    assert isinstance(result, Tensor)
    torch.testing.assert_close(result.values(), (n.values() * 2).sin())
