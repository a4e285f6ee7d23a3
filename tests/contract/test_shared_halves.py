"""Halves that a kernel computes anew beside what another one stored of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.contract.half_programs import column_weights, columns_and_sums, fused, normed_scores
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.accuracy import compare_trees, in_float64
from tilewright.ir.expr import walk
from tilewright.ir.kernel import Kernel


def test_beside_a_maximum_that_was_stored_the_scores_are_rounded_as_it_was() -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, 300, 64) * 3).half()
    device = compiled(normed_scores, [x])
    stores, reads = (step for step in device.cover.steps if isinstance(step, Kernel))
    assert set(stores.outputs) & set(reads.inputs) and not set(stores.outputs) & set(reads.outputs)
    (sums,), _ = device.run([x])
    largest = (x @ x.mT / 4).amax((-2, -1))
    alone = (x @ x.mT / 4 == largest[:, None, None]).any(-2)
    assert bool((sums[alone] >= 1).all()) and bool((sums[alone] < 1.001).any())


@pytest.mark.parametrize("program", [column_weights, columns_and_sums])
def test_where_a_sum_of_exponentials_was_stored_its_kernel_rounds_the_scores_too(
    program: Callable[[Tensor], object],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 300, 64).half()
    made, _ = compiled(program, [x]).run([x])
    expected = program(x)
    given = made if isinstance(expected, tuple) else made[0]
    assert compare_trees(given, expected, in_float64(program)(x)).passed


def test_what_another_kernel_stores_wider_is_no_reason_to_round() -> None:
    x = torch.randn(1, 130, 16).half()
    for step in compiled(fused, [x]).cover.steps:
        assert isinstance(step, Kernel)
        bodies = [body for op in step.ops if op.expr is not None for body in op.expr.body]
        assert not any(e.op == "cast" and e.dtype.is_half for body in bodies for e in walk(body))
