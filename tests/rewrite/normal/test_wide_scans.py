"""Running sums keep the digits that eager keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.fp64_rule import built, wrong
from tests.support.normal_graph import capture
from torch import Tensor

from tilewright.ir.dtype import f32, f64
from tilewright.ir.graph import Graph
from tilewright.rewrite.normal.wide_scans import widen_scans

RUNNING: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.cumsum(-1),
    "columns": lambda x: x.T.contiguous().cumsum(0),
    "products": lambda x: (1 + x / 1000).cumprod(-1),
    "logarithms": lambda x: x.logcumsumexp(-1),
    "from the end": lambda x: x.flip(-1).cumsum(-1).flip(-1) * 2,
}


@pytest.mark.parametrize("name", RUNNING)
def test_long_rows(name: str) -> None:
    x = torch.rand(4, 65536)
    found = wrong(RUNNING[name], built(RUNNING[name], (x,), "library"), [(x,)])
    assert not found, found


def test_only_states_of_singles_change() -> None:
    def states(graph: Graph) -> list[tuple[object, ...]]:
        return [op.expr.reduction.state for op in graph.ops if op.expr is not None and op.expr.reduction]

    graph = capture(lambda x, i: (x.cumsum(1), x.sum(1), x.cummax(1).values, i.cumsum(1)),
                    [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)])  # fmt: skip
    before, after = states(graph), states(widen_scans(graph))
    assert before[0] == (f32,) and after[0] == (f64,) and after[1:] == before[1:]
    assert [v.dtype for v in widen_scans(graph).outputs] == [v.dtype for v in graph.outputs]  # type: ignore[union-attr]
