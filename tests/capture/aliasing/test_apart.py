"""Tensors of one storage that are said to lie apart do, and views that programs take are known to."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tilewright.capture.aliasing.apart import is_shared, lie_apart, meet


def places(t: Tensor) -> set[int]:
    held = t.untyped_storage().nbytes() // t.element_size()
    return set(torch.arange(held).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist())


def part_of(whole: Tensor, shape: list[int], draw: random.Random) -> Tensor:
    starts = [draw.randint(0, 2) for _ in shape]
    ends = [s + draw.randint(1, 2 * n) for s, n in zip(starts, shape, strict=True)]
    return whole[tuple(slice(s, e, draw.choice([1, 2])) for s, e in zip(starts, ends, strict=True))]


def windows_of(whole: Tensor, draw: random.Random) -> Tensor:
    shape = [draw.randint(1, 4), draw.randint(1, 4)]
    return whole.as_strided(shape, [draw.randint(0, 3), draw.randint(0, 2)], draw.randint(0, 4))


def test_what_is_said_to_lie_apart_does() -> None:
    draw = random.Random(0)
    found = {True: 0, False: 0}
    for k in range(1500):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        whole = torch.zeros([2 * n + 18 for n in shape])
        a, b = (windows_of(whole, draw) if k % 3 == 0 else part_of(whole, shape, draw) for _ in range(2))
        share = bool(places(a) & places(b))
        assert not (lie_apart(a, b) and share), (a.shape, a.stride(), b.shape, b.stride())
        if k % 3 and a.stride() == b.stride():
            assert lie_apart(a, b) != share
            found[share] += 1
    assert min(found.values()) > 20


@pytest.mark.parametrize("cut", [
    lambda m: (m[:4], m[4:]), lambda m: (m[:, :4], m[:, 4:]), lambda m: (m[::2], m[1::2]),
    lambda m: (m[:, ::2], m[:, 1::2]), lambda m: (m[:, 0], m[:, 1]), lambda m: (m[0], m[1].view(2, 4)),
    lambda m: (m[:0], m), lambda m: (m.t()[0], m[:, 1]), lambda m: (m[:2].view(torch.int32), m[2:]),
])  # fmt: skip
def test_parts_of_one_tensor_lie_apart(cut: object) -> None:
    assert lie_apart(*cut(torch.zeros(8, 8)))  # type: ignore[operator]


def test_pairs_of_which_one_is_written_meet() -> None:
    m, alone = torch.zeros(6), torch.zeros(3)
    given = [m[:3], m[3:], 7, m[2:4], alone]
    assert list(meet(given, (1,), (0, 1, 3, 4))) == [(1, 3)]
    assert sorted(meet(given, (0, 1, 3), (0, 1, 3, 4))) == [(0, 3), (3, 1)]
    assert not list(meet(given, (4,), (0, 1, 3, 4)))
    assert list(meet([alone, alone], (0,), (0, 1))) == [(0, 1)], "one tensor holds its storage once"
    assert is_shared(m) and not is_shared(alone)


def test_many_parts_of_one_storage_are_asked_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def counted(a: Tensor, b: Tensor) -> bool:
        nonlocal asked
        asked += 1
        return lie_apart(a, b)

    monkeypatch.setattr("tilewright.capture.aliasing.apart.lie_apart", counted)
    parts = list(torch.zeros(4000).split(4))
    assert not list(meet(parts, range(len(parts)), range(len(parts)))) and not asked
