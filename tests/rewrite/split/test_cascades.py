"""Folds that wait for each other run in parts where there are few rows, and what is read of a row is made there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.harness import interpret, same_as_interpreter
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.rewrite.split.cascades import split_cascades

ROWS, LENGTH = 3, 70000


def _loss(x: Tensor, target: Tensor) -> Tensor:
    h = x.float()
    shifted = h - h.amax(-1, keepdim=True)
    log_softmax = shifted - shifted.exp().sum(-1, keepdim=True).log()
    return -log_softmax.gather(1, target[:, None]).squeeze(1).to(x.dtype)


def _inputs(dtype: torch.dtype, length: int = LENGTH) -> list[Tensor]:
    torch.manual_seed(0)
    return [(4 * torch.randn(ROWS, length)).to(dtype), torch.tensor([0, length - 1, length // 2])]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_loss_of_few_long_rows_reads_them_once(dtype: torch.dtype, dynamic: bool) -> None:
    inputs = _inputs(dtype)
    device = compiled(_loss, inputs, [(0, 1), (0,)] if dynamic else ())
    assert len(device.kernels) == 2
    (made,), _ = device.run(inputs)
    torch.testing.assert_close(made, _loss(*inputs))


def test_parts_without_elements_and_rows_of_minus_infinity() -> None:
    """The last parts of 65600 elements hold little or nothing; some see nothing but -inf, one row nothing else."""
    inputs = _inputs(torch.float32, 65600)
    inputs[0][0, :40000] = -torch.inf
    inputs[0][1] = -torch.inf
    inputs[1][0] = 65599
    device = compiled(_loss, inputs)
    (made,), _ = device.run(inputs)
    torch.testing.assert_close(made, _loss(*inputs), equal_nan=True)
    assert made[1].isnan() and made[0].isfinite()


def test_many_rows_stay_whole() -> None:
    inputs = [torch.empty(600, LENGTH, dtype=torch.float16), torch.zeros(600, dtype=torch.int64)]
    assert len(compiled(_loss, inputs).kernels) == 1


def test_what_leaves_a_row_is_not_made_again() -> None:
    """All elements of a softmax are required: reductions in parts would save no pass."""
    graph = capture(Case("softmax", lambda x: torch.softmax(x, -1), ((ROWS, LENGTH),)), False)
    same, new = split_cascades(graph, lambda *_: 1.0, 132, NO_HINTS)
    assert same is graph and not new


def test_printed_parts_mean_the_same(tmp_path: Path) -> None:
    inputs = _inputs(torch.float32)
    jobs = [j for dynamic in ([], [(0, 1), (0,)]) for j in compiled(_loss, inputs, dynamic).run(inputs)[1]]
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome)
