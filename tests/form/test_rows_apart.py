"""Rows that share no value with what was folded have its class: one loop, one vector, one block."""

from __future__ import annotations

import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture, one_kernel
from torch import Tensor

from tilewright.form.classes import make_form
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import preset


def scaled(p: Tensor, c: Tensor) -> Tensor:
    return c * torch.rsqrt(p.mean(-1, keepdim=True) + 1e-5)


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@pytest.mark.parametrize("rows", [1, 16])
def test_what_scales_by_another_row_shares_its_class(rows: int) -> None:
    graph = capture(Case("scaled", scaled, ((rows, 2048), (rows, 2048))), False)
    form = make_form(one_kernel(graph), graph.layouts)
    assert len(form.classes()) == (1 if rows == 1 else 2)


def test_products_keep_loops_of_their_own() -> None:
    graph = capture(Case("product", multiplied, ((64, 64), (64, 64))), False)
    assert len(make_form(one_kernel(graph), graph.layouts).classes()) == 3


@pytest.mark.parametrize("machine", ["sm_90", "gfx942"])
def test_a_gpu_holds_both_rows_in_one_block(machine: str) -> None:
    graph = capture(Case("scaled", scaled, ((1, 2048), (1, 2048))), False)
    solver = Solver(preset(machine), Options())
    assert solver.price(one_kernel(graph), graph.layouts) < 1e-5
