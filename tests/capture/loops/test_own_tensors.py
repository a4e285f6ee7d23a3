"""Python loops of which each step reads a tensor of its own: from a list of inputs, or of states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.capture.loops.part_loops import agrees, fewer, loops
from torch import Tensor, nn

import tilewright

__all__ = ["fewer"]
STEPS = 12


def weight() -> Tensor:
    return torch.randn(8, 8) / 4


def test_a_list_of_inputs() -> None:
    def run(w: Tensor, h: Tensor, *xs: Tensor) -> Tensor:
        for x in xs:
            h = torch.tanh(x + h @ w)
        return h

    agrees(run, weight(), torch.randn(3, 8), *(torch.randn(3, 8) for _ in range(STEPS)))


@pytest.mark.parametrize("view", [False, True])
def test_equal_fills_of_which_one_is_written_first(view: bool) -> None:
    """Of equal fills one is enough, but not where something wrote into one."""

    def run(w: Tensor, h: Tensor) -> Tensor:
        fills = [torch.zeros(3, 8) for _ in range(STEPS)]
        if view:
            fills[4][0] = 2.0
        else:
            fills[3].add_(5)
        for fill in fills:
            h = torch.tanh(h @ w) + fill
        return h

    agrees(run, weight(), torch.randn(3, 8))


def test_a_tensor_that_one_step_reads_and_that_every_step_reads() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        rows = x.unbind(0)
        for t in range(STEPS):
            h = torch.tanh(rows[t] + h @ w + rows[1] - rows[2] * 0.5)
        return h

    agrees(run, torch.randn(STEPS, 3, 8), weight(), torch.randn(3, 8))


def test_lists_that_meet_at_one_tensor() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        rows = x.unbind(0)
        for t in range(STEPS):
            h = torch.tanh(rows[t + 1] + h @ w + rows[2 * t] * 2)  # the same one in step 1
        return h

    agrees(run, torch.randn(2 * STEPS, 3, 8), weight(), torch.randn(3, 8))


def listed(outs: list[Tensor], t: int, h: Tensor) -> None:
    outs[t] = outs[t] + h


def added(outs: list[Tensor], t: int, h: Tensor) -> None:
    outs[t] += h


def copied(outs: list[Tensor], t: int, h: Tensor) -> None:
    outs[t].copy_(h)


@pytest.mark.parametrize("write", [listed, added, copied])
@pytest.mark.parametrize("begin", [torch.zeros, torch.ones])
def test_a_list_of_states(
    write: Callable[[list[Tensor], int, Tensor], None], begin: Callable[..., Tensor]
) -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        outs = [begin(3, 8) for _ in range(STEPS)]
        for t in range(STEPS):
            h = torch.tanh(x[t] + h @ w)
            write(outs, t, h)
        return torch.stack(outs)

    agrees(run, torch.randn(STEPS, 3, 8), weight(), torch.randn(3, 8))


class Layers(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(size, size) / size) for _ in range(STEPS)])
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(size)) for _ in range(STEPS)])

    def forward(self, h: Tensor, *, biases: bool) -> Tensor:
        for w, b in zip(self.weights, self.biases, strict=True):
            h = torch.tanh(h @ self.weights[0] + b) if biases else torch.tanh(h @ w)
        return h


@pytest.mark.parametrize(("biases", "size", "count"), [(True, 8, 1), (False, 80, 0)])
def test_layers_with_large_weights_of_their_own_stay_layers(biases: bool, size: int, count: int) -> None:
    """Their weights would be copied into one tensor at each call; small vectors are."""
    model, h = Layers(size), torch.randn(2, size)
    compiled = torch.compile(lambda h: model(h, biases=biases), backend="tilewright", fullgraph=True)
    found: list[Sequence[Tensor | None]] = []
    for f in (compiled, lambda h: model(h, biases=biases)):
        model.zero_grad()
        f(h).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=5e-5, atol=5e-6)
    assert loops() == 2 * count


def test_tensors_of_two_types_stay_apart() -> None:
    def run(w: Tensor, h: Tensor, *xs: Tensor) -> Tensor:
        for x in xs:
            h = torch.tanh(x + h @ w)
        return h

    xs = [torch.randn(3 if k % 2 else 1, 8) for k in range(STEPS)]
    agrees(run, weight(), torch.randn(3, 8), *xs, count=0)


def test_an_input_that_a_step_writes_is_its_own() -> None:
    def run(w: Tensor, h: Tensor, *xs: Tensor) -> Tensor:
        for x in xs:
            h = torch.tanh(x + h @ w)
            x.mul_(2)
        return h

    given = [weight(), torch.randn(3, 8), *(torch.randn(3, 8) for _ in range(STEPS))]
    tilewright.reset()
    mine, its = ([t.clone() for t in given] for _ in range(2))
    with torch.no_grad():
        have, want = torch.compile(run, backend="tilewright")(*mine), run(*its)
    torch.testing.assert_close([have, *mine], [want, *its], rtol=2e-5, atol=2e-6)
