"""A sum of products in parts: two kernels that mean what one did, of which the first is a product again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

from tilewright.interp import EXACT, equal, exact_random, run_graph
from tilewright.interp.algebra import Array
from tilewright.ir.dtype import f32
from tilewright.options import Options
from tilewright.rewrite.split.products import even_part_counts, split_product
from tilewright.schedule.solver import Solver
from tilewright.target import preset


def halves(*shape: int) -> Tensor:
    made = torch.empty(shape, dtype=torch.float16)
    return made.to(memory_format=torch.channels_last) if len(shape) == 4 else made


def convolved(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, b, 1, 1) + y)


def two_results(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.relu(x)
    return y, F.linear(y, w)


PROGRAMS: dict[str, tuple[Callable[..., object], Sequence[Tensor]]] = {
    "convolution": (convolved, (halves(1, 32, 3, 4), halves(20, 32, 3, 3), halves(20), halves(1, 20, 3, 4))),
    "what both need": (two_results, (halves(20, 64), halves(40, 64))),
}


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_kernels_mean_the_same(name: str, count: int) -> None:
    run, given = PROGRAMS[name]
    graph = capture(run, given)
    found = split_product(one_kernel(graph), graph.layouts, count, graph.fresh_id())
    assert found is not None and found.between.dtype is f32
    inputs: list[Array] = [exact_random(tuple(t.shape), 10 + k) for k, t in enumerate(given)]
    parted = graph.with_ops(list(dict.fromkeys((*found.parts.ops, *found.merge.ops))))
    results = zip(
        run_graph(parted, inputs, algebra=EXACT), run_graph(graph, inputs, algebra=EXACT), strict=True
    )
    assert all(equal(made, wanted) for made, wanted in results)  # type: ignore[arg-type]
    layouts = {**graph.layouts, found.between: found.layout}
    solver = Solver(preset("sm_90"), Options())
    (first, *_) = solver.proposals(found.parts, layouts)
    grid = [c.axis.extent for c in first.schedule.tiling.classes if c.role.value == "grid" and c.tile == 1]
    assert [str(e) for e in grid] == [str(count)], "a part is a batch of the product"
    assert solver.solve(found.merge, layouts).kernel is found.merge


def test_channels_and_taps_are_cut_together() -> None:
    """A sum over 3 x 3 places of 1024 channels in 72 parts: eight times nine (OpenPPL's 2SPK has 8 or 72)."""
    run = lambda x, w: F.conv2d(x, w, None, 1, 1)  # noqa: E731
    graph = capture(run, (halves(1, 1024, 3, 3), halves(4, 1024, 3, 3)))
    found = split_product(one_kernel(graph), graph.layouts, 72, graph.fresh_id())
    assert found is not None
    partial = found.parts.ops[-1].expr
    assert partial is not None and [str(a.extent) for a in partial.reduce] == ["128"]
    assert [str(n) for n in found.between.shape[:1]] == ["72"]


@pytest.mark.parametrize("count", [3, 9, 36])
def test_parts_of_taps_mean_the_same(count: int) -> None:
    run, given = PROGRAMS["convolution"]
    graph = capture(run, given)
    found = split_product(one_kernel(graph), graph.layouts, count, graph.fresh_id())
    assert found is not None
    inputs: list[Array] = [exact_random(tuple(t.shape), 10 + k) for k, t in enumerate(given)]
    parted = graph.with_ops(list(dict.fromkeys((*found.parts.ops, *found.merge.ops))))
    (made,), (wanted,) = (run_graph(g, inputs, algebra=EXACT) for g in (parted, graph))
    assert equal(made, wanted)  # type: ignore[arg-type]


def test_a_part_lies_as_the_result_does() -> None:
    run, given = PROGRAMS["convolution"]
    graph = capture(run, given)
    found = split_product(one_kernel(graph), graph.layouts, 2, graph.fresh_id())
    assert found is not None
    assert [str(s) for s in found.layout.strides] == ["240", "240", "1", "80", "20"]


@pytest.mark.parametrize(
    ("run", "given"),
    [
        (F.linear, (halves(20, 3), halves(40, 3))),
        (lambda x, w, v: F.linear(F.linear(x, w), v), (halves(20, 64), halves(40, 64), halves(8, 40))),
        (lambda x: x.amax(-1), (halves(20, 64),)),
        (F.relu, (halves(20, 64),)),
    ],
    ids=["short", "two sums", "a maximum", "no sum"],
)
def test_others_are_not_parted(run: Callable[..., object], given: Sequence[Tensor]) -> None:
    graph = capture(run, given)
    assert even_part_counts(one_kernel(graph), 16) == []
    assert split_product(one_kernel(graph), graph.layouts, 2, graph.fresh_id()) is None


def test_even_parts_alone() -> None:
    graph = capture(F.linear, (halves(20, 24), halves(40, 24)))
    assert even_part_counts(one_kernel(graph), 64) == [2, 4, 8]
