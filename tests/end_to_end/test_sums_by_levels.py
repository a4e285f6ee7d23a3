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
