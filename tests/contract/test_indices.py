"""Indices from data against eager: what raises there raises here, wherever the read is used, and only that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tilewright

Program = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh() -> None:
    tilewright.reset()


PROGRAMS: dict[str, Program] = {
    "plain": lambda t, i: t[i] * 2,
    "embedding": lambda t, i: F.embedding(i, t) * 2,
    "under a where": lambda t, i: torch.where(t[0, 0] > 1e9, t[i].sum(1), 0.0),
    "under its own where": lambda t, i: torch.where((i >= -6) & (i < 6), t[i].sum(1), 0.0),
    "clamped": lambda t, i: t[i.clamp(0, 5)] + 1,
    "clamped, unsigned": lambda t, i: t[i.clamp(0, 5).to(torch.uint8).long()] + 1,
    "remainder": lambda t, i: t[i % 6] + 1,
    "padded": lambda t, i: F.pad(t[i], (2, 1, 3, 2)) * 2,
    "padded index": lambda t, i: t[F.pad(i, (2, 2))] * 2,
    "concatenated": lambda t, i: torch.cat([t, t[i], t]) * 2,
    "where of a pad": lambda t, i: torch.where(t[0, 0] > 1e9, F.pad(t[i], (0, 0, 1, 1)).sum(1), 0.0),
    "of a slice": lambda t, i: (t * 2)[1:4][i],
    "of a pad": lambda t, i: F.pad(t * 2, (0, 0, 1, 1))[i],
    "of an expanded": lambda t, i: (t[:1] * 2).expand(4, 3)[i],
    "of a range": lambda t, i: torch.arange(5)[i] * 2,
    "of a concatenation": lambda t, i: torch.cat([t, t * 2])[i] + 1,
    "twice": lambda t, i: t[torch.arange(7)[i]],
    "into a sum": lambda t, i: t[i].sum(),
    "scattered places": lambda t, i: t.gather(0, i[:, None].expand(-1, 3)) + 1,
    "under a where, by element": lambda t, i: torch.where(t[0, 0] > 1e9, t[i], 0.0),
    "pad of its own where": lambda t, i: F.pad(torch.where((i >= 0)[:, None], t[i], 0.0), (1, 1, 2, 2)) * 2,
    "index of an index": lambda t, i: F.pad(t[torch.arange(6).flip(0)[i]], (0, 0, 2, 2)) * 2,
    "transposed": lambda t, i: (t * 2).t().contiguous().t()[i],
    "of a column": lambda t, i: (t * 2)[:, 1][i],
    "in a maximum": lambda t, i: t[i].amax(0),
    "lower triangle": lambda t, i: t[i].tril() + 1,
}
INDICES = {
    "good": [0, 5, 2], "negative": [-1, 0, -6], "above": [0, 6, 1], "far above": [0, 1 << 40, 1], "below": [-7, 0, 0],
    "four": [0, 4, 1],
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_bad_indices_raise_where_they_do_in_eager(name: str) -> None:
    program, table = PROGRAMS[name], torch.randn(6, 3)
    compiled = tilewright.compile(program)
    for kind, numbers in INDICES.items():
        index = torch.tensor(numbers)
        try:
            wanted = program(table, index)
        except (IndexError, RuntimeError):
            with pytest.raises((IndexError, RuntimeError)):
                compiled(table, index)
                pytest.fail(f"{kind} does not raise")
            continue
        torch.testing.assert_close(compiled(table, index), wanted, msg=kind)
    assert compiled.coverage.generated >= 1


def test_a_table_that_is_the_same_along_the_indexed_dim() -> None:
    table, index = torch.randn(1, 3).expand(4, 3), torch.tensor([0, 3, -4])
    compiled = tilewright.compile(lambda t, i: t[i] * 2, (table, index))
    torch.testing.assert_close(compiled(table, index), table[index] * 2)
    with pytest.raises(IndexError):
        compiled(table, torch.tensor([0, 4, 1]))


def test_places_that_are_proved_are_not_tested() -> None:
    table, index = torch.randn(6, 3), torch.tensor([0, 9, -2])
    for program, tests in (
        (lambda t, i: t[i.clamp(0, 5)] + 1, 0),
        (lambda t, i: t[i % 6] + 1, 0),
        (lambda t, i: t[torch.arange(5)] + 1, 0),
        (lambda t, i: t[i.clamp(0, 6)] + 1, 1),
    ):
        compiled = tilewright.compile(program, (table, index))
        assert compiled.kernels[0].program.show().count("check") == tests  # type: ignore[attr-defined]
