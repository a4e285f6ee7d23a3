"""The weights of windows by channel, laid with channels innermost: it means the same, and others stay as they are."""

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
from tilewright.ir.graph import Graph
from tilewright.ir.sizes import dims
from tilewright.rewrite.laid_windows import lay_windows
from tilewright.rewrite.prepared_product import PreparedProduct


def halves(*shape: int, last: bool = True) -> Tensor:
    made = torch.empty(shape, dtype=torch.float16)
    return made.to(memory_format=torch.channels_last) if len(shape) == 4 and last else made


def depthwise(*window: int) -> Callable[..., Tensor]:
    """With bias and ReLU; `window` is stride, padding, dilation."""
    return lambda x, w, b: F.relu(F.conv2d(x, w, b, *window, groups=x.shape[1]))


PROGRAMS: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor], tuple[int, ...]]] = {
    "3x3": (depthwise(1, 1), (halves(2, 6, 5, 4), halves(6, 1, 3, 3), halves(6)), (3, 3, 6)),
    "5x2 with strides": (depthwise(2, 1, 2), (halves(1, 3, 11, 9), halves(3, 1, 5, 2), halves(3)), (5, 2, 3)),
    "residual": (
        lambda x, w, b: depthwise(1, 1)(x, w, b) + x, (halves(1, 4, 4, 3), halves(4, 1, 3, 3), halves(4)), (3, 3, 4),
    ),
    "one line": (depthwise(1), (halves(1, 4, 3, 9), halves(4, 1, 1, 5), halves(4)), (5, 4)),
}  # fmt: skip


def laid(run: Callable[..., Tensor], given: Sequence[Tensor]) -> tuple[Graph, PreparedProduct | None]:
    graph = capture(run, given)
    return graph, lay_windows(one_kernel(graph), graph.layouts, graph.fresh_id())


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_means_the_same(name: str) -> None:
    run, given, shape = PROGRAMS[name]
    graph, found = laid(run, given)
    assert found is not None
    (copy,) = found.prepare
    assert tuple(map(dims.static, copy.output.shape)) == shape
    assert found.layouts[copy.output].strides[-1] is dims.ONE
    inputs: list[Array] = [exact_random(tuple(t.shape), 10 + k) for k, t in enumerate(given)]
    other = graph.with_ops([*found.prepare, *found.kernel.ops])
    (made,), (wanted,) = (run_graph(g, inputs, algebra=EXACT) for g in (other, graph))
    assert equal(made, wanted)  # type: ignore[arg-type]


ALONG = halves(4, 1, 3, 3).permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


@pytest.mark.parametrize(
    ("run", "given"),
    [
        (lambda x, w: F.conv2d(x, w, None, 1, 1), (halves(1, 8, 5, 5), halves(2, 8, 3, 3))),
        (lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 2), (halves(1, 4, 5, 5), halves(4, 2, 3, 3))),
        (depthwise(1, 1), (halves(1, 4, 5, 4, last=False), halves(4, 1, 3, 3), halves(4))),
        (depthwise(1, 1), (halves(1, 4, 5, 4), ALONG, halves(4))),
        (lambda x, w: F.conv2d(x, F.relu(w), None, 1, 1, 1, 4), (halves(1, 4, 5, 5), halves(4, 1, 3, 3))),
        (F.linear, (halves(20, 3), halves(40, 3))),
        (F.relu, (halves(20, 64),)),
    ],
    ids=["dense", "groups", "rows innermost", "laid before", "weights that are made", "a product", "no sum"],
)
def test_others_are_not_laid(run: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
    assert laid(run, given)[1] is None
