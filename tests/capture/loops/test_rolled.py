"""Loops of equal steps that torch unrolled become one loop again, with gradients; steps that differ stay apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.capture.loops.rolled_loops import agrees, close, loops, weights
from torch import Tensor, fx, nn

import tilewright
from tilewright.capture.autograd import mended_scans
from tilewright.capture.loops import recurrent, rolled, scanned

STEPS = 20
MANY = 80
"""Steps that are a loop without what `fewer` does."""


@pytest.fixture(autouse=True)
def fresh() -> None:
    tilewright.reset()
    torch.manual_seed(0)


@pytest.fixture
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps than usual are a loop: torch writes each of them out first, and we compile those that stay apart."""
    monkeypatch.setattr(rolled, "LOOPS", replace(rolled.LOOPS, max_unrolled_steps=16))


def elman(x: Tensor, w: Tensor, u: Tensor, h: Tensor) -> Tensor:
    """The last state of a layer that runs along dim 1."""
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ w + h @ u)
    return h


def test_a_last_state_alone() -> None:
    agrees(elman, torch.randn(3, MANY, 8), *weights(), torch.randn(3, 8))


@pytest.mark.usefixtures("fewer")
def test_steps_are_cut_where_tensors_pass() -> None:
    """A cell gives one tuple, which is fewer than its two tensors, but nothing that a loop can carry."""
    cell = nn.LSTMCell(8, 8)

    def run(x: Tensor, h: Tensor) -> Tensor:
        c = h
        rows: list[Tensor] = []
        for row in x:
            h, c = cell(row, (h, c))
            rows.append(h)
        return torch.stack(rows)

    agrees(run, torch.randn(40, 3, 8), torch.zeros(3, 8))


def test_few_steps_stay_apart() -> None:
    agrees(elman, torch.randn(3, 12, 8), *weights(), torch.randn(3, 8), count=0)


class Cells(nn.Module):
    """Two cells, one upon the other, over dim 0; the states of both leave."""

    def __init__(self, kind: type[nn.GRUCell], width: int) -> None:
        super().__init__()
        self.low, self.high = kind(width, width), kind(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low = high = x.new_zeros(x.shape[1:])
        lows: list[Tensor] = []
        highs: list[Tensor] = []
        for row in x:
            low = self.low(row, low)
            high = self.high(low, high)
            lows.append(low)
            highs.append(high)
        return torch.stack(lows), torch.stack(highs, 1), high


class Long(nn.Module):
    """An LSTM cell over dim 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = c = x.new_zeros(x.shape[1:])
        rows: list[Tensor] = []
        for row in x.unbind(0):
            h, c = self.cell(row, (h, c))
            rows.append(h)
        return torch.cat(rows), c


@pytest.mark.usefixtures("fewer")
@pytest.mark.parametrize("make", [lambda: Cells(nn.GRUCell, 8), lambda: Long(8)])
def test_cells_in_training_with_a_dynamic_batch(make: Callable[[], nn.Module]) -> None:
    module = make()
    compiled = torch.compile(module, backend="tilewright", fullgraph=True)
    for batch in (3, 5):
        x = torch.randn(STEPS, batch, 8)
        found: list[Sequence[Tensor]] = []
        for f in (compiled, module):
            given = x.clone().requires_grad_()
            torch._dynamo.mark_dynamic(given, 1)  # type: ignore[attr-defined]
            made = f(given)
            loss = sum(((k + 1) * y.square().sum() for k, y in enumerate(made)), torch.zeros(()))
            gradients = torch.autograd.grad(loss, [given, *module.parameters()])
            found.append([*(y.detach() for y in made), *gradients])
        close(found[0], found[1])
    assert loops() == 2 and tilewright.stats().graphs == 2


@pytest.mark.usefixtures("fewer")
def test_backwards_in_time_and_every_state_by_itself() -> None:
    def run(x: Tensor, w: Tensor, u: Tensor, h: Tensor) -> list[Tensor]:
        states = [h]
        for t in reversed(range(x.shape[0])):
            states.append(torch.tanh(x[t] @ w + states[-1] @ u))
        return states[::7]

    agrees(run, torch.randn(STEPS, 3, 8), *weights(), torch.randn(3, 8))


@pytest.mark.usefixtures("fewer")
def test_two_results_of_each_step_and_pieces_beside_them() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        hs: list[Tensor] = [h]
        sums: list[Tensor] = []
        for t in range(x.shape[0]):
            h = torch.sin(h @ w) + x[t]
            hs.append(h)
            sums.append(h.sum(-1, keepdim=True) * x[t])
        return torch.stack([*hs, h * 2], 1), torch.cat(sums, -1)

    agrees(run, torch.randn(STEPS, 3, 8), weights()[0], torch.randn(3, 8))


@pytest.mark.usefixtures("fewer")
def test_a_number_that_changes_with_the_step() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        for t in range(x.shape[0]):
            h = torch.sin(h @ w) * (1 + 0.25 * t / STEPS) + x[t] - t
        return h

    agrees(run, torch.randn(STEPS, 3, 8), weights()[0], torch.randn(3, 8))


@pytest.mark.usefixtures("fewer")
def test_one_step_differs() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        for t in range(x.shape[0]):
            h = torch.sin(h @ w) + x[t]
            if t == 19:
                h = h.relu() * 2
        return h

    agrees(run, torch.randn(40, 3, 8), weights()[0], torch.randn(3, 8), count=2)


@pytest.mark.usefixtures("fewer")
def test_one_step_reads_something_else() -> None:
    def run(x: Tensor, w: Tensor, u: Tensor, h: Tensor) -> Tensor:
        for t in range(x.shape[0]):
            h = torch.sin(h @ (u if t == 19 else w)) + x[t]
        return h

    agrees(run, torch.randn(40, 3, 8), *weights(), torch.randn(3, 8), count=2)


@pytest.mark.usefixtures("fewer")
def test_a_first_step_without_a_state() -> None:
    def run(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        h = torch.tanh(x[:, 0] @ w)
        for t in range(1, x.shape[1]):
            h = torch.tanh(x[:, t] @ w + h @ u)
        return h

    agrees(run, torch.randn(3, STEPS, 8), *weights())


@pytest.mark.usefixtures("fewer")
def test_nothing_is_read_but_the_state() -> None:
    def run(w: Tensor, h: Tensor) -> Tensor:
        for _ in range(STEPS):
            h = torch.sin(h @ w)
        return h

    agrees(run, weights()[0], torch.randn(3, 8))


@pytest.mark.usefixtures("fewer")
def test_states_of_two_steps_before_that_are_few() -> None:
    def run(x: Tensor) -> Tensor:
        a = b = x
        for _ in range(18):
            a, b = torch.sin(a + 0.5 * b), a
        return a

    with torch.no_grad():
        x = torch.randn(3, 4)
        close(torch.compile(run, backend="tilewright", fullgraph=True)(x), run(x))


@pytest.mark.usefixtures("fewer")
def test_what_is_read_without_gradient_gets_none() -> None:
    """Torch's gradient of a scan is zeros for whatever it reads; eager has none, and optimizers tell them apart."""
    seen, hidden = nn.Linear(4, 4), nn.Linear(4, 4)
    start = torch.randn(3, 4, requires_grad=True)
    rows = torch.randn(STEPS, 4, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        h = start
        for t in range(STEPS):
            with torch.no_grad():
                fixed = hidden(h).tanh()
            h = torch.tanh(seen(x) + fixed * rows[t].detach() + h.detach())
        return h

    leaves = [*seen.parameters(), *hidden.parameters(), start, rows]
    x = torch.randn(3, 4, requires_grad=True)
    want = torch.autograd.grad(run(x).sum(), [x, *leaves], allow_unused=True)
    have = torch.autograd.grad(
        torch.compile(run, backend="tilewright", fullgraph=True)(x).sum(), [x, *leaves], allow_unused=True
    )
    assert [g is None for g in want] == [False] * 3 + [True] * 4
    close(have, want)
    assert loops() == (2 if recurrent.SCANS_DIFFERENTIATE else 0)


PARTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a number before a new dim": lambda x, t: x[:, t, None][:, 0],
    "a part of length one": lambda x, t: x[:, t : t + 1].squeeze(1),
    "behind an ellipsis": lambda x, t: x[..., t, :],
    "beside a slice that stays": lambda x, t: torch.cat((x[:, t, :4], x[:, t, 4:]), -1),
    "before a new dim": lambda x, t: x[None, :, t][0],
    "the one before, from the last on": lambda x, t: x[:, t - 1],
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.usefixtures("fewer")
def test_parts_that_steps_take(name: str) -> None:
    part = PARTS[name]

    def run(x: Tensor, w: Tensor, u: Tensor, h: Tensor) -> Tensor:
        rows: list[Tensor] = []
        for t in range(x.shape[1]):
            h = torch.tanh(part(x, t) @ w + h @ u)
            rows.append(h[:, None])
        return torch.cat(rows, 1)

    agrees(run, torch.randn(3, STEPS, 8), *weights(), torch.randn(3, 8))


@pytest.mark.usefixtures("fewer")
def test_gradients_where_torch_loses_those_of_states_that_begin_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What begins a loop is tied to a tensor that needs a gradient; that one gets none through it."""
    monkeypatch.setattr(recurrent, "SCANS_DIFFERENTIATE", False)
    monkeypatch.setattr(rolled, "SCANS_DIFFERENTIATE", False)
    tied: list[int] = []
    plain = scanned.tie_states

    def watched(states: Sequence[Tensor], others: Sequence[object]) -> list[Tensor]:
        made = plain(states, others)
        tied.append(sum(a is not b for a, b in zip(states, made, strict=True)))
        return made

    monkeypatch.setattr(scanned, "tie_states", watched)

    def run(x: Tensor, w: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1:])
        c = torch.ones_like(h)
        for row in x:
            h, c = (h @ w + row).sin(), c * 0.9 + h
        return h * c

    found: list[Sequence[Tensor]] = []
    x, w = torch.randn(STEPS, 3, 4), torch.randn(4, 4) / 3
    for f in (torch.compile(run, backend="tilewright", fullgraph=True), run):
        given = [t.clone().requires_grad_() for t in (x, w)]
        made = f(*given)
        found.append([made.detach(), *torch.autograd.grad(made.sum(), given)])
    close(found[0], found[1])
    assert loops() == 2 and max(tied) == 2


@pytest.mark.usefixtures("fewer")
@pytest.mark.parametrize("gradients", [False, True])
def test_complex_numbers(gradients: bool) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        h = x[0]
        for row in x:
            h = (h @ w + row) * 0.5
        return h

    found: list[Sequence[Tensor]] = []
    x, w = torch.randn(STEPS, 3, 4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.complex64) / 3
    for f in (torch.compile(run, backend="tilewright", fullgraph=True), run):
        given = [t.clone().requires_grad_(gradients) for t in (x, w)]
        made = f(*given)
        found.append([made.detach(), *(torch.autograd.grad(made.abs().sum(), given) if gradients else ())])
    close(found[0], found[1])
    assert loops() == 1 + gradients


@pytest.mark.usefixtures("fewer")
def test_gradients_that_a_step_passes_on_are_tensors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros for what needs no gradient: older versions of torch refuse a step that returns what it was given."""
    for module in (recurrent, rolled):
        monkeypatch.setattr(module, "SCANS_DIFFERENTIATE", False)
    copies: list[int] = []
    plain = mended_scans._own_results

    def watched(gm: fx.GraphModule) -> None:
        before = len(gm.graph.nodes)
        plain(gm)
        outputs = gm.graph.output_node().all_input_nodes
        assert all(n.op != "placeholder" for n in outputs)
        copies.append(len(gm.graph.nodes) - before)

    monkeypatch.setattr(mended_scans, "_own_results", watched)

    def run(w: Tensor) -> Tensor:
        h = torch.ones(3, 4)
        for k in range(STEPS):
            h = (h @ w).sin() * (0.5 + k / 40)
        return h

    found: list[Sequence[Tensor]] = []
    for f in (torch.compile(run, backend="tilewright", fullgraph=True), run):
        w = (torch.arange(16.0).view(4, 4) / 40).requires_grad_()
        made = f(w)
        found.append([made.detach(), *torch.autograd.grad(made.sum(), [w])])
    close(found[0], found[1])
    assert loops() == 2 and copies


def test_numbers_counted_of_sizes_are_counted_again_in_each_step() -> None:
    """A scan takes no float: neither the inverse of a size nor its root."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(MANY):
            x = torch.tanh(x @ w) * (1 / x.shape[0]) + x.shape[0] ** -0.5
        return x

    compiled = torch.compile(run, backend="tilewright", fullgraph=True)
    x, w = torch.randn(6, 8), weights()[0].requires_grad_()
    torch._dynamo.mark_dynamic(x, 0)  # type: ignore[attr-defined]
    for given in (x, torch.randn(9, 8)):
        y, want = compiled(given, w), run(given, w)
        close(y, want)
        close(torch.autograd.grad(y.square().sum(), w), torch.autograd.grad(want.square().sum(), w))
    assert [c.kind for c in tilewright.compilations()] == ["forward", "backward"]
    assert loops() == 2
