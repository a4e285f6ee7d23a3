"""Single elements of a graph's values are what the interpreter of whole graphs computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture

from tilewright.errors import UnsupportedError
from tilewright.interp.algebra import Array
from tilewright.interp.graph import run_graph
from tilewright.interp.points import Index, Points
from tilewright.ir.graph import Value

SHAPE = (6, 9, 5)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: torch.softmax(x, 1) * 2 + 1,
        lambda x: (x - x.amax((0, 2), keepdim=True)).exp().sum(1),
        lambda x: x.transpose(0, 1) @ x.permute(1, 2, 0),
        lambda x: x.flatten(0, 1)[:, 1:].prod(-1),
        lambda x: torch.where(torch.arange(9)[:, None] > torch.arange(5), x, -x),
    ],
)
def test_elements(run: object) -> None:
    graph = capture(Case("case", run, (SHAPE,)), False)  # type: ignore[arg-type]
    x = np.random.default_rng(0).standard_normal(SHAPE)
    (whole,) = run_graph(graph, [x.astype(np.float32)])
    (result,) = graph.outputs
    assert isinstance(result, Value)

    def read(v: Value, index: Index) -> Array:
        assert v is graph.inputs[0]
        return x[index]

    places = tuple(np.random.default_rng(1).integers(0, n, (7, 1)) for n in np.shape(whole))
    made = Points(graph, read).at(result, places)
    np.testing.assert_allclose(made, np.asarray(whole)[places], rtol=2e-5, atol=1e-5)


def test_what_has_no_single_elements() -> None:
    graph = capture(Case("case", lambda x: x.cumsum(1), (SHAPE,)), False)
    (result,) = graph.outputs
    assert isinstance(result, Value)
    with pytest.raises(UnsupportedError, match="no single elements"):
        Points(graph, lambda v, index: np.zeros(1)).at(result, (np.zeros((1,), np.int64),) * 3)
