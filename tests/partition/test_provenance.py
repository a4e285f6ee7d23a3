"""What was refused is said with the captured node, its line, and the law or condition that failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.attention.regions import graph_of, with_columns
from torch import Tensor

import tilewright
from tilewright.ir.graph import Op, Origin
from tilewright.partition.choose_kernels import ChosenRegions
from tilewright.partition.provenance import fill_sites, references, site

LENGTH = 300


def deviation(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.transpose(-1, -2)
    far = s - s.mean(-1, keepdim=True)
    return far.abs().mean(-1), torch.softmax(s, -1) @ v


def sparsemax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2)
    z = torch.sort(s, -1, descending=True).values
    above = z.cumsum(-1) - 1
    count = (z * torch.arange(1, s.shape[-1] + 1) > above).sum(-1, keepdim=True)
    return torch.relu(s - above.gather(-1, count - 1) / count) @ v


def divided_along_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Figure 9 (a) of FlashTensor: a divisor that reads the axis of the sum."""
    d = 1 + k.square().sum(-1)[:, None, :]
    return ((q @ q.transpose(-1, -2)) / d) @ v


def any_sign(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.tanh(q @ k.transpose(-1, -2)) * torch.cos(torch.arange(q.shape[1]))[:, None]
    return s.amax(-1), torch.relu(s) @ v


def scores_of_others(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2)
    return torch.softmax(s.masked_fill(s < 0, float("-inf")), -1) @ v


def said(run: Callable[..., object]) -> list[str]:
    """Everything that `explain` says of refusals."""
    torch.manual_seed(0)
    given = tuple(torch.randn(2, LENGTH, 16) for _ in range(3))
    torch._dynamo.reset()
    options = {"contractions": "inside", "cache": False}
    made = tilewright.compile(run, given, options=options)
    for ours, theirs in zip(torch.utils._pytree.tree_leaves(made(*given)),
                            torch.utils._pytree.tree_leaves(run(*given)), strict=True):  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    mapped = made.trace["map"]
    assert isinstance(mapped, ChosenRegions)
    notes = [note for region in mapped.regions for note in str(region).splitlines()]
    return [*notes, *(reason for k in made.kernels for reason in k.reason.split("; "))]


def line(run: Callable[..., object], words: str) -> str:
    """`(file:line)` of a line of a function that holds some words."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = run.__code__.co_firstlineno
    return f"(test_provenance.py:{next(n for n in range(first, len(lines) + 1) if words in lines[n - 1])})"


@pytest.mark.parametrize(
    ("run", "words", "law"),
    [
        (
            deviation,
            "far.abs()",
            "in one kernel sum of mean_1 {} runs after sum of mean (test_provenance.py:",
        ),
        (
            sparsemax,
            "cumsum",
            "is read at an index that comes from data [law: a reduction in a kernel is read at its",
        ),
        (divided_along_keys, "/ d) @ v", "factor leaves sum at bmm_1 {}: it reads the axis of the sum"),
        (any_sign, "amax", "factor leaves maximum at amax {}: the sign of the factor is unknown (cos"),
        (
            scores_of_others,
            "softmax",
            "bmm_1 {}: its mask depends on what it computes: no tile is left out",
        ),
    ],
)
def test_refusals_name_a_place_and_a_law(run: Callable[..., object], words: str, law: str) -> None:
    found = said(run)
    place = line(run, words)
    assert any(law.format(place) in text and place in text for text in found), "\n".join(found)


def test_what_is_remembered_gets_the_names_of_the_graph_at_hand() -> None:
    region = graph_of(with_columns)
    reference = references(region)
    text = f"refused at {reference(region.ops[1])} and {reference(replace(region.ops[-1], inputs=()))}"
    assert text == f"refused at @1 and @{len(region.ops) - 1}"
    names = [site(region.ops[n], region.origins).split(" (")[0] for n in (1, -1)]
    assert all(name in fill_sites(text, region) for name in names)
    other = replace(
        region, origins=tuple(replace(o, node="renamed_7", place="a/b.py:3") for o in region.origins)
    )
    assert "renamed_7 (b.py:3)" in fill_sites(text, other)
    assert fill_sites("@999", region) == "@999"


def test_a_site_is_the_node_and_what_of_it() -> None:
    origins = (
        Origin(0, "aten._softmax", "/x/model.py:12", node="_softmax_3"),
        Origin(1, "aten.mul", node="mul_7"),
    )
    assert site(Op("exp", (), (), origin=0), origins) == "exp of _softmax_3 (model.py:12)"
    assert site(Op("exp", (), (), origin=0), origins, alone=True) == "_softmax_3 (model.py:12)"
    assert site(Op("mul", (), (), origin=1), origins) == "mul_7"
    assert site(Op("fill", (), ()), origins) == "fill"
