"""Which reductions are split on a GPU: not those that share a pass with others."""

from __future__ import annotations

import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.rewrite.split.cascades import waiting_reductions


@pytest.mark.parametrize(("rows", "dtype"), [(2092, torch.float16), (129, torch.float32)])
def test_reductions_that_wait_for_each_other_stay_together(rows: int, dtype: torch.dtype) -> None:
    """Halves of each would bring the rows a second time, or what lies between them to memory."""
    x = torch.empty(rows, 128255 if rows < 1024 else 128256, dtype=dtype)  # never touched

    def spread(x: Tensor) -> Tensor:
        shifted = x.float() - x.float().amax(-1, keepdim=True)
        return shifted.exp().sum(-1).log()

    (kernel,) = compiled(spread, [x]).kernels
    assert kernel.schedule.reductions.online


def test_reductions_over_other_elements_do_not_wait() -> None:
    graph = capture(Case("two", lambda x: (x.sum(1) * 2).sum(), ((64, 256),)), False)
    first, second = (op for op in graph.ops if op.expr is not None and op.expr.reduction is not None)
    assert not waiting_reductions(graph) & {first, second}
    graph = capture(Case("two", lambda x: (x - x.sum(1, keepdim=True)).exp().sum(1), ((64, 256),)), False)
    assert len(waiting_reductions(graph)) == 2


def test_what_lies_in_another_order_costs_what_it_costs() -> None:
    """Each group's rows are runs of four: a second sum behind pointwise ops reads as badly as the first."""
    x = torch.empty(4, 128, 32, 32, dtype=torch.float16).to(memory_format=torch.channels_last)
    made = compiled(lambda x: torch.nn.functional.group_norm(x, 32), [x])
    assert sum(k.seconds or 0.0 for k in made.kernels) < 2e-5
