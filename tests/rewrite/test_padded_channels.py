"""A convolution over few channels as one over four or eight that lie side by side: it means the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

from tilewright.interp import EXACT, equal, exact_random, run_graph
from tilewright.interp.algebra import FLOATS, Array
from tilewright.ir.graph import Graph
from tilewright.ir.sizes import dims
from tilewright.rewrite.padded_channels import pad_channels
from tilewright.rewrite.prepared_product import PreparedProduct


def halves(*shape: int, last: bool = True) -> Tensor:
    made = torch.empty(shape, dtype=torch.float16)
    return made.to(memory_format=torch.channels_last) if len(shape) == 4 and last else made


def stem(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, b, 2, 3))


PROGRAMS: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor], int]] = {
    "stem": (stem, (halves(2, 3, 11, 9), halves(5, 3, 7, 7), halves(5)), 4),
    "rows first": (stem, (halves(2, 3, 11, 9, last=False), halves(5, 3, 7, 7, last=False), halves(5)), 4),
    "five channels, apart": (
        lambda x, w: F.conv2d(x, w, None, (3, 1), 2, (1, 2)), (halves(1, 5, 8, 7), halves(2, 5, 2, 3)), 8,
    ),
    "stride over window": (lambda x, w: F.conv2d(x, w, None, 4), (halves(1, 3, 10, 9), halves(2, 3, 3, 3)), 4),
    "image smaller than window": (
        lambda x, w: F.conv2d(x, w, None, 1, 3), (halves(1, 3, 2, 1), halves(2, 3, 5, 5)), 4,
    ),
    "sequence": (lambda x, w: F.conv1d(x, w, None, 2, 1), (halves(2, 3, 9), halves(4, 3, 3)), 4),
    "volume": (lambda x, w: F.conv3d(x, w, None, 1, 1), (halves(1, 2, 3, 4, 3), halves(2, 2, 2, 2, 3)), 4),
}  # fmt: skip


def padded(run: Callable[..., Tensor], given: Sequence[Tensor]) -> tuple[Graph, PreparedProduct | None]:
    graph = capture(run, given)
    return graph, pad_channels(one_kernel(graph), graph.fresh_id())


def as_graph(graph: Graph, found: PreparedProduct) -> Graph:
    return graph.with_ops([*found.prepare, *found.kernel.ops])


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_means_the_same(name: str) -> None:
    run, given, channels = PROGRAMS[name]
    graph, found = padded(run, given)
    assert found is not None
    assert [dims.static(pad.output.shape[-1]) for pad in found.prepare] == [channels] * 2
    assert all(found.layouts[pad.output].strides[-1] is dims.ONE for pad in found.prepare)
    inputs: list[Array] = [exact_random(tuple(t.shape), 10 + k) for k, t in enumerate(given)]
    (made,), (wanted,) = (run_graph(g, inputs, algebra=EXACT) for g in (as_graph(graph, found), graph))
    assert equal(made, wanted)  # type: ignore[arg-type]


def test_numbers_that_are_none_stay_in_their_windows() -> None:
    """Whatever is multiplied with a zero that was added is a zero that was added."""
    run, given, _ = PROGRAMS["stem"]
    graph, found = padded(run, given)
    assert found is not None
    draw = np.random.default_rng(0)
    x, w, b = (draw.standard_normal(tuple(t.shape)).astype(np.float16) for t in given)
    x[0, 1, 4, 4], x[1, 2, 0, 8] = np.nan, np.inf
    (made,), (wanted,) = (run_graph(g, [x, w, b], algebra=FLOATS) for g in (as_graph(graph, found), graph))
    np.testing.assert_array_equal(np.isnan(made), np.isnan(wanted))  # type: ignore[arg-type]
    assert 0 < np.isnan(made).sum() < np.asarray(made).size / 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "given"),
    [
        (lambda x, w: F.conv2d(x, w, None, 1, 1), (halves(1, 8, 5, 5), halves(2, 8, 3, 3))),
        (lambda x, w: F.conv2d(x, w, None, 1, 1), (halves(1, 4, 5, 5), halves(2, 4, 3, 3))),
        (lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 3), (halves(1, 3, 5, 5), halves(3, 1, 3, 3))),
        (F.linear, (halves(20, 3), halves(40, 3))),
        (lambda x, w: F.conv2d(F.relu(x), w, None, 1, 1), (halves(1, 3, 5, 5), halves(2, 3, 3, 3))),
        (lambda x, w: F.conv2d(x, w, None, 1, 1), (halves(1, 1, 5, 6), halves(3, 1, 3, 3))),
        (F.relu, (halves(20, 64),)),
    ],
    ids=[
        "many channels",
        "four channels",
        "groups",
        "no window",
        "an operand that is made",
        "one channel",
        "no sum",
    ],
)
def test_others_are_not_padded(run: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
    assert padded(run, given)[1] is None
