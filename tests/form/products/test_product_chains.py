"""Sums of products that a program adds up itself err no more than eager's, which adds them up in levels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import build_cases, capture, one_kernel, run
from torch import Tensor

from tilewright.ir.graph import Value
from tilewright.ir.program import Dot
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import preset


def folded(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `y` in a product with a value that is stored too."""
    v = 1 / (x.abs() + 1)
    return (v.unsqueeze(-1) * y.unsqueeze(-2)).sum((0, 1, 2)), v * v


FOLDED = Case(
    "gradient of a sum",
    folded,
    ((3, 4, 17, 13), (3, 4, 17, 17)),
    ({0: "b", 2: "n", 3: "m"}, {0: "b", 2: "n"}),
)


@pytest.mark.parametrize("name", ["x86-64-v4", "x86-64-v3"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_are_cut_in_chains_however_many_blocks_they_take(name: str, *, dynamic: bool) -> None:
    graph = capture(FOLDED, dynamic)
    made = Solver(preset(name), Options()).solve(one_kernel(graph), graph.layouts)
    dots = [s for s in made.program.statements() if isinstance(s, Dot)]
    assert dots and {s.chain for s in dots} == {32}


def test_their_errors_are_those_of_eager(tmp_path: Path) -> None:
    unit, ((graph, made),) = build_cases(tmp_path, [(FOLDED, True)])
    x, y = FOLDED.inputs(scale=2)
    results = run(unit, 0, graph, made, [x, y.abs_()])
    first = graph.outputs[0]
    assert isinstance(first, Value)
    ours, eager = torch.from_numpy(results[made.kernel.outputs.index(first)]), folded(x, y)[0]
    exact = folded(x.double(), y.double())[0]
    errors = [float((z.reshape(exact.shape) - exact).square().mean().sqrt()) for z in (ours, eager)]
    assert errors[0] < 1.5 * errors[1]
