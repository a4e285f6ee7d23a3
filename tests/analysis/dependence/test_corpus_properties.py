"""Properties of the programs that lowering is tested with: claims hold, and no class is two loops of one op."""

from __future__ import annotations

import pytest
from tests.analysis.dependence.workloads import check
from tests.support.corpus import CASES, Case
from tests.support.one_kernel import capture, one_kernel, sizes_of

from tilewright.analysis.dependence.properties import Dependency, parallelism, properties
from tilewright.ir.graph import Graph
from tilewright.ir.sizes import dims


def loops_are_apart(graph: Graph) -> None:
    structure = properties(graph.ops).structure
    for op, axes in structure.axes.items():
        found = [c for own in axes.values() for c in own]
        assert len(found) == len(set(found)), (op.name, axes)
        assert op.expr is not None
        for a in (*op.expr.reduce, *([op.expr.scan] if op.expr.scan else [])):
            assert all(structure.kinds[c] is Dependency.NONPARA for c in axes[a])
        for a in op.expr.axes:
            assert dims.equal(dims.prod(structure.extents[c] for c in axes[a]), a.extent)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_hold(case: Case):
    """With symbolic sizes where the case has them."""
    graph = capture(case, bool(case.dynamic))
    loops_are_apart(graph)
    inputs = case.inputs(scale=2 if case.dynamic else 1)
    check(graph, properties(graph.ops), inputs)
    kernel = one_kernel(graph)
    sizes = sizes_of(graph, [t.numpy() for t in inputs])
    assert dims.evaluate(parallelism(kernel.ops, kernel.outputs, 32), sizes) >= 1
