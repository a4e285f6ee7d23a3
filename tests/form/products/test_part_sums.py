"""Sums in parts of powers of two: which ones, and that plain products stay whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

from tilewright.form.classes import make_form
from tilewright.form.products.part_sums import in_part_sums
from tilewright.ir.form import Form
from tilewright.ir.sizes import dims


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2)).float(), -1).half() @ v


def normed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention((q.float() * torch.rsqrt(q.float().square().mean(-1, keepdim=True))).half(), k, v)


def form_of(run: Callable[..., Tensor], *widths: int) -> Form:
    given = [torch.empty(2, 64, n, dtype=torch.float16) for n in widths]
    graph = capture(run, given)
    return make_form(one_kernel(graph), graph.layouts)


def lengths(form: Form) -> list[int]:
    """Of all sums of a product."""
    return [
        dims.static(a.extent) or 0 for i in form.folds.values() for a in i.reduce if i.reduction is not None
    ]


@pytest.mark.parametrize(
    ("depth", "parts"),
    [(576, [512, 64]), (192, [128, 64]), (96, [64, 32]), (80, [64, 16]), (224, [128, 64, 32]), (72, [64, 8])],
)
def test_a_score_is_summed_in_blocks_that_are_full(depth: int, parts: list[int]) -> None:
    form = form_of(attention, depth, depth, 32)
    made = in_part_sums(form)
    assert depth in lengths(form) and depth not in lengths(made)
    scores = [i for i in made.folds.values() if any(dims.static(a.extent) in parts for a in i.reduce)]
    assert {dims.static(a.extent) for i in scores for a in i.reduce} == set(parts)


@pytest.mark.parametrize("depth", [64, 128, 16, 12, 1100])
def test_full_blocks_and_very_short_or_long_sums_stay(depth: int) -> None:
    form = form_of(attention, depth, depth, 32)
    assert in_part_sums(form) is form


def test_a_plain_product_stays() -> None:
    graph = capture(lambda a, b: a @ b, [torch.empty(64, 192).half(), torch.empty(192, 64).half()])
    form = make_form(one_kernel(graph), graph.layouts)
    assert in_part_sums(form) is form


def test_a_class_that_another_sum_runs_over_stays() -> None:
    form = form_of(normed, 192, 192, 32)
    assert in_part_sums(form) is form
