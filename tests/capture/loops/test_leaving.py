"""What leaves a loop that was rolled shares memory, and shows writes, as what the steps left does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loops.rolled_loops import loops, weights
from torch import Tensor

import tilewright
from tilewright.capture.loops import rolled
from tilewright.ir.graph import Loop
from tilewright.pipeline.backends.cpu import CpuBackend
from tilewright.runtime.loops.call import LoopRunner

STEPS = 20
Left = tuple[list[Tensor], Tensor, Tensor]
"""What each step appended, the last state, and the input."""
Ending = Callable[[list[Tensor], Tensor, Tensor], tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps than usual are a loop: those that stay apart take long to compile."""
    monkeypatch.setattr(rolled, "LOOPS", replace(rolled.LOOPS, max_unrolled_steps=16))
    tilewright.reset()
    torch.manual_seed(0)


def states(x: Tensor, h: Tensor) -> Tensor:
    return h


def rows(x: Tensor, h: Tensor) -> Tensor:
    return h.unsqueeze(0)


def inputs(x: Tensor, h: Tensor) -> Tensor:
    return x


def parts(x: Tensor, h: Tensor) -> Tensor:
    return x[:, :4]


def both(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return h, h.view(-1)


def run(
    kept: Callable[..., object], end: Ending, x: Tensor, w: Tensor, u: Tensor, h: Tensor
) -> tuple[Tensor, ...]:
    """A recurrent layer that keeps something of each step, and what is done with that."""
    left: list[Tensor] = []
    for t in range(x.shape[0]):
        now = x[t]
        h = torch.tanh(now @ w + h @ u)
        made = kept(now, h)
        left.extend(made if isinstance(made, tuple) else (made,))  # pyright: ignore[reportArgumentType, reportUnknownArgumentType]
    return end(left, h, x)


def added(left: list[Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    left[3].add_(1.0)
    return (torch.stack(left),)


def through_a_view(left: list[Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    left[5].view(-1)[0] = 7.0
    return torch.cat(left), left[5]


def in_place_by_position(left: list[Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    F.relu(left[4], True)
    before = torch.stack(left)
    F.dropout(h, 0.5, False, True)
    h.mul_(2.0)
    return before, torch.stack(left), h


def by_other_names(left: list[Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    torch.add(h, 1.0, out=left[2])
    torch._foreach_add_([left[6], left[9]], 1.0)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    left[11][1:2] = 3.0
    return torch.stack(left), h


def stacked(left: list[Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return torch.stack(left), h


def joined(left: list[Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return torch.cat(left), h


def with_the_last(left: list[Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return torch.stack(left), left[-1], h.t()


def one_of_them(left: list[Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return left[1], h


def into_the_input(left: list[Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    x.zero_()
    return torch.stack(left), h


def into_one_of_two(left: list[Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    left[6].mul_(2.0)
    return torch.stack(left[::2]), torch.stack(left[1::2]), h


CASES = [
    (states, added, 1), (states, through_a_view, 1), (states, in_place_by_position, 1), (states, by_other_names, 1),
    (states, with_the_last, 1), (rows, joined, 1), (inputs, stacked, 1), (inputs, added, 0), (inputs, one_of_them, 1),
    (inputs, into_the_input, 1), (parts, stacked, 1), (parts, into_the_input, 0), (parts, one_of_them, 1),
    (both, into_one_of_two, 0), (both, lambda left, h, x: (left[2], left[3]), 0),
]  # fmt: skip


@pytest.mark.parametrize(("kept", "end", "count"), CASES)
def test_it_is_as_the_steps_left_it(kept: Callable[..., object], end: Ending, count: int) -> None:
    given = [torch.randn(STEPS, 3, 8), *weights(), torch.randn(3, 8)]
    compiled = torch.compile(
        lambda x, w, u, h: run(kept, end, x, w, u, h), backend="tilewright", fullgraph=True
    )
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            ours, eagers = [t.clone() for t in given], [t.clone() for t in given]
            have, want = compiled(*ours), run(kept, end, *eagers)  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close((have, ours), (want, eagers), rtol=2e-5, atol=2e-6)
        assert shared((*have, *ours)) == shared((*want, *eagers))
    assert loops() == 2 * count


def shared(tensors: tuple[Tensor, ...]) -> list[list[bool]]:
    """Which of the tensors share memory."""
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    return [[a == b for b in memory] for a in memory]


@pytest.mark.parametrize("reads", ["last", "two", "all"])
def test_what_only_the_last_step_gives_is_not_kept_of_each(
    reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for the states of all steps is made only where something reads more than the last."""
    found: list[int] = []
    plain = CpuBackend.loop_runner

    def looked(self: CpuBackend, loop: Loop, *args: Any, **named: Any) -> LoopRunner:
        found.append(loop.stacked)
        return plain(self, loop, *args, **named)

    monkeypatch.setattr(CpuBackend, "loop_runner", looked)

    def walked(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        made: list[Tensor] = []
        for t in range(x.shape[0]):
            h = torch.tanh(h * 0.5 + x[t])
            made.append(h)
        if reads == "last":
            return h, h.exp()
        return (made[3], h) if reads == "two" else (torch.stack(made), h)

    compiled = torch.compile(walked, backend="tilewright")
    x, h = torch.randn(STEPS, 3, 4), torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, h), walked(x, h))
    assert found == [0 if reads == "last" else 1]


def walked(x: Tensor, h: Tensor, w: Tensor, end: Callable[..., object]) -> object:
    """Two states of which only the last is read."""
    c = h
    for t in range(x.shape[0]):
        h = torch.tanh(h @ w + x[t])
        c = torch.sigmoid(c + h)
    return end(h, c)


@pytest.mark.parametrize(
    "end",
    [
        lambda h, c: torch.cat([h, c], 1),
        lambda h, c: torch.stack([c, h]),
        lambda h, c: torch.cat([h, c, h]),
        lambda h, c: (h.add_(1), c),
        lambda h, c: (h, c, h.view(-1)),
    ],
)
def test_last_states_together(end: Callable[..., object]) -> None:
    x, h, w = torch.randn(STEPS, 3, 4), torch.randn(3, 4), torch.randn(4, 4) / 2
    with torch.no_grad():
        made = torch.compile(walked, backend="tilewright")(x, h.clone(), w, end)
        torch.testing.assert_close(made, walked(x, h.clone(), w, end))
    assert loops() == 1


def viewed(x: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g = h.view(-1)
    for t in range(x.shape[0]):
        h = h * 0.3 + g.view(2, 4) * 0.1 + x[t]
        g = h.view(-1)
    h.add_(1)
    return h, g * 1


def outer(x: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g = h
    for t in range(x.shape[0]):
        h = h * 0.3 + g * 0.1 + x[t]
        g = w.view(2, 4)
    w.add_(1)
    return h, g * 1


def part(x: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g = h
    for t in range(x.shape[0]):
        h = h * 0.3 + g * 0.1
        g = x[t].view(2, 4)
    x.add_(1)
    return h, g * 1


def both_states(x: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g = h.view(-1)
    for t in range(x.shape[0]):
        h = h * 0.3 + g.view(2, 4) * 0.1 + x[t]
        g = h.view(-1)
    return h, g


@pytest.mark.parametrize("f", [viewed, outer, part, both_states])
def test_last_states_that_share_memory(f: Callable[..., tuple[Tensor, ...]]) -> None:
    """With each other, with what is the same in each step, with a slice: a write to one shows in the other."""
    results: list[tuple[Tensor, ...]] = []
    for g in (torch.compile(f, backend="tilewright"), f):
        torch.manual_seed(0)
        with torch.no_grad():
            results.append(g(torch.randn(STEPS, 2, 4), torch.randn(2, 4), torch.randn(8)))
    ours, eager = results
    torch.testing.assert_close(ours, eager)
    shared = [len({t.untyped_storage().data_ptr() for t in r}) for r in results]
    assert shared[0] == shared[1]
