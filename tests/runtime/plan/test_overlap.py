"""Inputs that a plan writes and that share elements with another one, in a later call only."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.runtime.plan import executable
from tilewright.runtime.plan.overlap import share_elements


def places(t: Tensor) -> set[int]:
    return set(
        torch.arange(t.untyped_storage().nbytes() // 4)
        .as_strided(t.shape, t.stride(), t.storage_offset())
        .flatten()
        .tolist()
    )


def part_of(whole: Tensor, shape: list[int], draw: random.Random) -> Tensor:
    starts = [draw.randint(0, 2) for _ in shape]
    ends = [s + draw.randint(1, 2 * n) for s, n in zip(starts, shape, strict=True)]
    return whole[tuple(slice(s, e, draw.choice([1, 2])) for s, e in zip(starts, ends, strict=True))]


def test_what_shares_elements_is_known() -> None:
    draw = random.Random(0)
    found = {True: 0, False: 0}
    for _ in range(600):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        whole = torch.zeros([2 * n + 1 for n in shape])
        a, b = (part_of(whole, shape, draw) for _ in range(2))
        share = bool(places(a) & places(b))
        assert not share_elements(a, b) or share, (a.shape, a.stride(), b.shape, b.stride())
        if a.stride() == b.stride():
            assert share_elements(a, b) == share
            found[share] += 1
    assert min(found.values()) > 20


def write_and_read(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    return b * 2


def test_inputs_that_come_to_overlap_are_refused() -> None:
    """Torch guards what it saw of inputs when it compiled: these were apart."""
    run = torch.compile(write_and_read, backend="tilewright")
    run(torch.randn(4, 4), torch.randn(4, 4))
    rows = torch.randn(5, 4)
    before = rows.clone()
    with pytest.raises(
        tilewright.errors.InputError, match="input 0, which the program writes, shares memory with input 1"
    ):
        run(rows[1:], rows[:-1])
    assert torch.equal(rows, before)


@pytest.mark.parametrize("cut", [lambda m: (m[:, :4], m[:, 4:]), lambda m: (m[::2], m[1::2])])
def test_views_apart_of_one_tensor_are_not(cut: object) -> None:
    run = torch.compile(write_and_read, backend="tilewright")
    run(torch.randn(4, 4), torch.randn(4, 4))
    ours, eager = (torch.arange(64.0).view(8, 8) for _ in range(2))
    torch.testing.assert_close(run(*cut(ours)), write_and_read(*cut(eager)))  # type: ignore[operator]
    assert torch.equal(ours, eager)


def test_buffers_of_modules_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(executable, "check_written", lambda written, args: asked.append(written))
    net = nn.BatchNorm1d(4).train()
    torch.compile(net, backend="tilewright")(torch.randn(6, 4))
    assert asked == [()]
