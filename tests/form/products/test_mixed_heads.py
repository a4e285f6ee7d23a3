"""Mixtures of heads: what is written out, and what stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

from tilewright.form.classes import make_form
from tilewright.form.products.mixed_heads import write_out_mixtures
from tilewright.ir.form import Form

Function = Callable[..., Tensor]


def mixed(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.einsum("gh,hij->gij", w, q @ k.transpose(-1, -2)).float(), -1).half() @ v


def unmixed(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2)).float() * w[:, :1, None], -1).half() @ v


def averaged(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Heads are also summed where they are not mixed."""
    s = q @ k.transpose(-1, -2)
    p = torch.softmax((torch.einsum("gh,hij->gij", w, s) - s.amax((0, 2), keepdim=True)).float(), -1)
    return p.half() @ v


def form_of(run: Function, heads: int, others: int) -> Form:
    shapes = ((heads, 32, 16), (heads, 48, 16), (others, 48, 16), (others, heads))
    graph = capture(run, [torch.empty(shape, dtype=torch.float16) for shape in shapes])
    return make_form(one_kernel(graph), graph.layouts)


@pytest.mark.parametrize(("heads", "others"), [(3, 3), (2, 5), (12, 12)])
def test_each_head_has_products_of_its_own(heads: int, others: int) -> None:
    made = write_out_mixtures(form_of(mixed, heads, others))
    folds = [i for i in made.folds.values() if i.kept]
    assert len(made.outputs) == others
    assert len(folds) == heads + 3 * others
    assert all(i.id == n for n, i in enumerate(made.items))


@pytest.mark.parametrize(
    ("run", "heads", "others"), [(unmixed, 3, 3), (averaged, 3, 3), (mixed, 13, 13), (mixed, 1, 3)]
)
def test_the_rest_stays(run: Function, heads: int, others: int) -> None:
    form = form_of(run, heads, others)
    assert write_out_mixtures(form) is form
