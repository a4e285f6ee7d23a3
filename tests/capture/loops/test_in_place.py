"""Python loops whose steps write into tensors, as loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.capture.loops.part_loops import agrees, fewer, loops
from torch import Tensor

import tilewright

__all__ = ["fewer"]
STEPS = 12


def states(
    x: Tensor, w: Tensor, h: Tensor, out: Tensor, write: Callable[[Tensor, int, Tensor], None]
) -> Tensor:
    """The last state of a recurrence, of which `write` writes each into `out`."""
    for t in range(STEPS):
        h = torch.tanh(x[t] + h @ w)
        write(out, t, h)
    return h


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(STEPS, 3, 8), torch.randn(8, 8) / 3, torch.randn(3, 8)


def at_step(out: Tensor, t: int, h: Tensor) -> None:
    out[:, t] = h


def from_behind(out: Tensor, t: int, h: Tensor) -> None:
    out[:, -1 - 2 * t, :] = h


def as_pairs(out: Tensor, t: int, h: Tensor) -> None:
    out[:, 2 * t : 2 * t + 2] = torch.stack([h, -h], 1)


@pytest.mark.parametrize("write", [at_step, from_behind, as_pairs])
def test_parts_that_nobody_reads(write: Callable[[Tensor, int, Tensor], None]) -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros(3, 2 * STEPS, 8, dtype=torch.float64)
        h = states(x, w, h, out, write)
        out[:, 3] += 1
        return out, h

    agrees(run, *operands(), trains=write is from_behind)


def test_a_written_input_of_the_program() -> None:
    out = torch.zeros(2, 3, 2 * STEPS, 8)

    def run(x: Tensor, w: Tensor, h: Tensor, out: Tensor) -> Tensor:
        return states(x, w, h, out, as_pairs)

    x, w, h = operands()
    with torch.no_grad():
        torch.compile(run, backend="tilewright", fullgraph=True)(x, w, h, out[0])
        run(x, w, h, out[1])
    torch.testing.assert_close(out[0], out[1], rtol=2e-5, atol=2e-6)


def overlapping(out: Tensor, t: int, h: Tensor) -> None:
    out[:, t : t + 2] = torch.stack([h, -h], 1)


def of_another_shape(out: Tensor, t: int, h: Tensor) -> None:
    out[:, t] = h[:1]


def read_ahead(out: Tensor, t: int, h: Tensor) -> None:
    out[:, t] = h + out[:, t + 1]


def twice(out: Tensor, t: int, h: Tensor) -> None:
    out[:, t] = h
    out[:, t + 1] = -h


@pytest.mark.parametrize("write", [overlapping, of_another_shape, read_ahead, twice])
def test_parts_that_are_written_at_places(write: Callable[[Tensor, int, Tensor], None]) -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros(3, 2 * STEPS, 8)
        h = states(x, w, h, out, write)
        return out, h

    agrees(run, *operands(), trains=False)


def rows_of(x: Tensor, w: Tensor) -> Tensor:
    made = torch.empty(STEPS, 6, 8)
    made[0] = x
    for t in range(1, STEPS):
        made[t] = torch.logsumexp(made[t - 1][:, :, None] + w, 1)
    return made


def of_two_before(x: Tensor, w: Tensor) -> Tensor:
    made = torch.zeros(6, 2 * STEPS, 8)
    made[:, :2] = x[:, None]
    for t in range(STEPS):
        made[:, t + 2] = torch.sin(made[:, t + 1] @ w) + made[:, t] / 2
    return made


def from_the_end(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.zeros(2 * STEPS + 2, 6, 8)
    made[-2:] = x
    for t in reversed(range(STEPS)):
        made[2 * t : 2 * t + 2] = torch.sin(made[2 * t + 2 : 2 * t + 4] @ w)
    return made, made[3] * 2


@pytest.mark.parametrize("table", [rows_of, of_two_before, from_the_end])
def test_tables_whose_parts_are_read_again(table: Callable[[Tensor, Tensor], object]) -> None:
    agrees(table, torch.randn(6, 8), torch.randn(8, 8) / 3, trains=table is rows_of)


def changed_first(x: Tensor, w: Tensor) -> Tensor:
    made = torch.zeros(STEPS + 1, 6, 8)
    made[0] = x
    for t in range(STEPS):
        made[t][0] = 1
        made[t + 1] = torch.sin(made[t] @ w)
    return made


def in_another_type(x: Tensor, w: Tensor) -> Tensor:
    made = torch.zeros(STEPS + 1, 6, 8, dtype=torch.float64)
    made[0] = x
    for t in range(STEPS):
        made[t + 1] = torch.sin(made[t].float() @ w)
    return made


@pytest.mark.parametrize("table", [changed_first, in_another_type])
def test_tables_that_are_written_at_places(table: Callable[[Tensor, Tensor], object]) -> None:
    agrees(table, torch.randn(6, 8), torch.randn(8, 8) / 3, trains=False)


def added(h: Tensor, w: Tensor) -> Tensor:
    for _ in range(STEPS):
        h += 0.1 * torch.tanh(h @ w)
    return h


def scaled(h: Tensor, w: Tensor) -> Tensor:
    for _ in range(STEPS):
        h.mul_(0.9).add_(torch.tanh(h @ w))
    return h


def diffused(h: Tensor, w: Tensor) -> Tensor:
    for _ in range(STEPS):
        h[1:-1] += 0.1 * (h[2:] - 2 * h[1:-1] + h[:-2])
        h[0] = w[0]
    return h


def seen_before(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    row = h[1]
    return added(h, w), row, row + 1


def smoothed(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    mean = torch.zeros_like(h)
    for _ in range(STEPS):
        h = torch.tanh(h @ w)
        mean.mul_(0.9).add_(0.1 * h)
    return h, mean


def of_two(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    speed = torch.zeros_like(h)
    for _ in range(STEPS):
        speed -= 0.1 * h @ w
        h += 0.1 * speed
    return h, speed


WRITES = (added, scaled, diffused, seen_before, smoothed, of_two)


@pytest.mark.parametrize("steps", WRITES)
@pytest.mark.parametrize("given", [True, False])
def test_tensors_that_are_read_again(steps: Callable[[Tensor, Tensor], object], given: bool) -> None:
    """They are inputs of the program, or made in it."""

    def run(h: Tensor, w: Tensor) -> tuple[object, Tensor]:
        h = h if given else h.clone()
        return steps(h, w), h

    agrees(run, torch.randn(6, 8), torch.randn(8, 8) / 3, trains=False)


@pytest.mark.parametrize("steps", [diffused, smoothed])
def test_gradients(steps: Callable[[Tensor, Tensor], object]) -> None:
    agrees(lambda h, w: steps(h.clone(), w), torch.randn(6, 8), torch.randn(8, 8) / 3)


def stored_before_a_write(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros(STEPS, 3, 8)
    for t in range(STEPS):
        h = torch.tanh(x[t] + h @ w)
        out[t] = h
        h += 1
    return out, h


def stored_part(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out, h = torch.zeros(STEPS, 8), h.clone()
    for t in range(STEPS):
        h += torch.tanh(x[t] + h @ w)
        out[t] = h[1]
        h[1] = 0
    return out, h


def stored_operand(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros(STEPS, 3, 8)
    for t in range(STEPS):
        out[t] = x[t]
        h = torch.tanh(x[t] + h @ w)
    return out, h


def stored_product(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros(STEPS, 3, 8)
    for t in range(STEPS):
        z = x[t] @ w
        out[t] = z
        h = torch.tanh(z + h @ w)
    return out, h


@pytest.mark.parametrize("run", [stored_before_a_write, stored_part, stored_operand, stored_product])
def test_parts_hold_what_was_there_when_they_were_written(run: Callable[..., object]) -> None:
    agrees(run, *operands(), trains=False)


def written_then_another(h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    seen: list[Tensor] = []
    first = h
    for _ in range(STEPS):
        h.mul_(0.9)
        h = torch.tanh(h @ w)
        seen.append(h[0])
    return h, torch.stack(seen), first


def one_beginning(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    a = h
    for _ in range(STEPS):
        h += torch.tanh(a @ w)
        a = torch.sin(a)
    return a, h


@pytest.mark.parametrize("steps", [written_then_another, one_beginning])
def test_a_beginning_that_something_else_reads(steps: Callable[[Tensor, Tensor], object]) -> None:
    """No loop, or one that begins later."""

    def run(h: Tensor, w: Tensor) -> object:
        return steps(h.clone(), w)

    given = torch.randn(6, 8), torch.randn(8, 8) / 3
    with torch.no_grad():
        have, want = torch.compile(run, backend="tilewright", fullgraph=True)(*given), run(*given)
    torch.testing.assert_close(have, want, rtol=2e-5, atol=2e-6)


def test_what_steps_make_without_gradients_has_none() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen: list[Tensor] = []
        out = torch.zeros(STEPS, 3, 8)
        for t in range(STEPS):
            h = torch.tanh(x[t] + h @ w)
            out[t] = h.detach()
            seen.append(2 * h.detach())
        return h, out, torch.stack(seen)

    given = [t.requires_grad_() for t in operands()]
    made = torch.compile(run, backend="tilewright", fullgraph=True)(*given)
    assert loops() > 0
    assert [t.requires_grad for t in made] == [True, False, False]


def read_elsewhere(h: Tensor, w: Tensor) -> Tensor:
    row = h[1]
    for _ in range(STEPS):
        h += 0.1 * torch.tanh(h @ w + row)
    return h


def collected(h: Tensor, w: Tensor) -> Tensor:
    made: list[Tensor] = []
    for _ in range(STEPS):
        h += 0.1 * torch.tanh(h @ w)
        made.append(h)
    return torch.stack(made)


def rows(h: Tensor, w: Tensor) -> Tensor:
    x = h.repeat(4, 1)
    for t in range(STEPS):
        h = torch.tanh(h @ w + x[t].mul_(2))
    return h + x[0]


@pytest.mark.parametrize(("steps", "count"), [(read_elsewhere, 0), (rows, 1)])
def test_memory_that_something_else_reads(steps: Callable[[Tensor, Tensor], Tensor], count: int) -> None:
    given = torch.randn(6, 8), torch.randn(8, 8) / 3
    agrees(lambda h, w: steps(h.clone(), w), *given, count=count, trains=False)


def test_one_tensor_that_is_collected_at_each_step() -> None:
    """All that is stacked is what the last step made of it."""
    agrees(lambda h, w: collected(h.clone(), w), torch.randn(6, 8), torch.randn(8, 8) / 3, trains=False)


def test_writes_without_gradients_among_others() -> None:
    """A mean of parameters under `no_grad` must not get a gradient by being carried."""

    def run(h: Tensor, w: Tensor) -> Tensor:
        mean = h.clone()
        for _ in range(STEPS):
            h = torch.tanh(h @ w + mean)
            with torch.no_grad():
                mean.mul_(0.9)
        return h

    tilewright.reset()
    given = torch.randn(6, 8), torch.randn(8, 8) / 3
    leaves = [[t.clone().requires_grad_() for t in given] for _ in range(2)]
    for f, (h, w) in zip((torch.compile(run, backend="tilewright"), run), leaves, strict=True):
        f(h.detach(), w).sum().backward()
    torch.testing.assert_close(leaves[0][1].grad, leaves[1][1].grad, rtol=5e-5, atol=5e-6)
