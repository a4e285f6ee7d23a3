"""Python loops that write into parts of tensors in any spelling, as loops."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from tests.capture.loops.part_loops import agrees, fewer, loops
from torch import Tensor

from tilewright.capture.loops.spelling import in_place_ops

__all__ = ["fewer"]
STEPS = 12
Write = Callable[[Tensor, int, Tensor], None]


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(STEPS, 3, 8), torch.randn(8, 8) / 3, torch.randn(3, 8)


def copied(out: Tensor, t: int, h: Tensor) -> None:
    out[t].copy_(h)


def added(out: Tensor, t: int, h: Tensor) -> None:
    out[t] += h


def added_in_place(out: Tensor, t: int, h: Tensor) -> None:
    out[t].add_(h, alpha=2)


def scaled_from_behind(out: Tensor, t: int, h: Tensor) -> None:
    out[-1 - t] *= h


def moved(out: Tensor, t: int, h: Tensor) -> None:
    out[t : t + 1].lerp_(h[None], 0.3)


def cut_off(out: Tensor, t: int, _: Tensor) -> None:
    out[t].clamp_(-0.1, 0.1)


@pytest.mark.parametrize("write", [copied, added, added_in_place, scaled_from_behind, moved, cut_off])
def test_gradients_through_parts(write: Write) -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.sin(x)
        for t in range(STEPS):
            h = torch.tanh(x[t] + h @ w)
            write(out, t, h)
        return out, h

    agrees(run, *operands())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("write", [copied, added, added_in_place])
def test_a_value_of_another_type_is_rounded_to_the_part_s(write: Write, dtype: torch.dtype) -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        out = x.to(dtype)
        for t in range(STEPS):
            h = torch.tanh(h @ w)
            write(out, t, h)
        return out

    torch.manual_seed(1)  # none of its sums lies between two halves
    agrees(run, *operands(), trains=False)


@pytest.mark.parametrize("number", [3.0, 0, True])
def test_a_number_that_is_written_once_its_part_is_read(number: float) -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.sin(x)
        for t in range(STEPS):
            h = torch.tanh(h @ w + out[t])
            out[t] = number
        return out, h

    agrees(run, *operands())


def test_two_parts_of_one_tensor() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros(STEPS, 2, 3, 8)
        seen = torch.zeros(3, STEPS, dtype=torch.bool)
        for t in range(STEPS):
            h = torch.tanh(h @ w + x[t])
            out[t, 0] = h
            out[t, 1] += h * 2
            seen[0, t] |= (h > 0).any()
            seen[2, t] = (h > 0).all()
        return out + seen.any(), h

    agrees(run, *operands())


def parts_of_one_place(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros(STEPS, 2, 3, 8)
    for t in range(STEPS):
        h = torch.tanh(h @ w + x[t])
        out[t, 0] = h
        out[t, -2] = h * 2
        out[t, :, 1] = h[:2]
    return out, h


def test_a_written_input_of_the_program() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        for t in range(STEPS):
            h = torch.tanh(h @ w)
            x[t] += h
        return x * 2, h

    given = operands()
    agrees(run, *given, trains=False)


def read_afterwards(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.sin(x)
    for t in range(STEPS):
        part = out[t]
        part += torch.tanh(h @ w)
        h = part * 0.5
    return out, h


def shown_afterwards(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.sin(x)
    for t in range(STEPS):
        part = out[t].view(-1)
        out[t].mul_(0.5)
        h = torch.tanh(h @ w + part.view(3, 8))
    return out, h


def written_twice(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.sin(x)
    for t in range(STEPS):
        h = torch.tanh(h @ w)
        out[t] += h
        out[t] *= 2
    return out, h


def parts_that_overlap(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.sin(torch.cat((x, x)))
    for t in range(STEPS):
        h = torch.tanh(h @ w)
        out[t : t + 2] += h
    return out, h


def one_part(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.sin(x)
    for t in range(STEPS):
        h = torch.tanh(h @ w + x[t])
        out[1] += h
        out[0] = 2.0
    return out, h


def read_by_the_next(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.sin(torch.cat((x, x)))
    for t in range(STEPS):
        h = torch.tanh(h @ w + out[t + 1])
        out[t] += h
    return out, h


def kept(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    out = torch.sin(x)
    parts: list[Tensor] = []
    for t in range(STEPS):
        part = out[t]
        parts.append(part)
        h = torch.tanh(h @ w)
        part += h
    return out, h, torch.stack(parts)


def through_a_view(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.sin(x)
    same = out.view(STEPS, 24)
    for t in range(STEPS):
        h = torch.tanh(h @ w + out[t])
        same[t] += 1.0
    return out, h


BESIDE = [
    read_afterwards, shown_afterwards, written_twice, parts_that_overlap, one_part, read_by_the_next, kept,
    through_a_view, parts_of_one_place,
]  # fmt: skip


@pytest.mark.parametrize("run", BESIDE)
@pytest.mark.parametrize("trains", [True, False])
def test_what_reads_a_part_beside_its_write(run: Callable[..., tuple[Tensor, ...]], trains: bool) -> None:
    """A loop or none: values and gradients are eager's."""
    found: list[list[Tensor]] = []
    for f in (torch.compile(run, backend="tilewright", fullgraph=True), run):
        torch.manual_seed(2)
        given = [t.requires_grad_(trains) for t in operands()]
        made = f(*given)
        whole = sum((t.square().sum() for t in made), torch.zeros(()))
        found.append([*(t.detach() for t in made), *(torch.autograd.grad(whole, given) if trains else [])])
    torch.testing.assert_close(found[0], found[1], rtol=5e-5, atol=5e-6)


def test_programs_without_loops_stay_as_they_are() -> None:
    def run(x: Tensor) -> Tensor:
        y = x * 2
        y[0] += 1
        y[1].copy_(x[2])
        y[2:4] = 7
        return y

    agrees(run, torch.randn(6, 8), count=0)
    assert loops() == 0


def test_what_cannot_be_computed_apart_is_written_at_places(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Tensor:
        raise RuntimeError("no such kernel")

    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.sin(x)
        for t in range(STEPS):
            h = torch.tanh(h @ w)
            out[t] += h
        return out, h

    monkeypatch.setitem(in_place_ops.IN_PLACE, operator.iadd, fails)
    agrees(run, *operands())
