"""Float sums over few rows, from programs to results: no chain of additions so long that it errs more than eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.accuracy import compare

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "sum of squares": lambda x: (x * x).sum(0),
    "variance": lambda x: x.var(0),
    "centred": lambda x: x - x.mean(0),
}


@pytest.mark.parametrize("columns", [5, 1000])
def test_sums_of_columns_err_no_more_than_eagers(columns: int) -> None:
    for rows in (33, 64):
        for name, program in PROGRAMS.items():
            fast = tilewright.compile(program, (torch.zeros(rows, columns),))
            for seed in range(8):
                torch.manual_seed(seed)
                x = torch.randn(rows, columns) + 10 * (seed % 2)
                made = fast(x)
                assert isinstance(made, Tensor)
                verdict = compare(made, program(x), program(x.double()))
                assert verdict.passed, f"{name} of {rows} rows, seed {seed}: {verdict}"


def test_a_sum_beside_a_product_errs_no_more_than_eagers() -> None:
    """A bias's gradient is summed where the weight's is multiplied, over rows that all weigh the same: the error of one
    chain of equal summands grows with its length."""

    def program(x: Tensor, w: Tensor, b: Tensor, by: Tensor) -> Tensor:
        return torch.nn.functional.l1_loss(torch.nn.functional.linear(x, w, b), by)

    def gradient(run: Callable[..., Tensor], given: list[Tensor]) -> Tensor:
        w, b = given[1].requires_grad_(), given[2].requires_grad_()
        return torch.autograd.grad(run(*given[:4]) * given[4], (b, w))[0]

    fast = torch.compile(program, backend="tilewright")
    made: list[list[Tensor]] = [[], [], []]
    for seed in range(100):
        torch.manual_seed(seed)
        given = [torch.randn(16, 5), torch.randn(8, 5), torch.randn(8), torch.randn(16, 8), torch.rand(())]
        made[0].append(gradient(fast, given))
        made[1].append(gradient(program, given))
        made[2].append(gradient(program, [t.detach().double() for t in given]))
    ours, eager, exact = (torch.cat(gradients).double() for gradients in made)
    assert (ours - exact).square().sum() <= 1.5**2 * (eager - exact).square().sum()
