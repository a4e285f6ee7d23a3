"""At which level edges are: by hand for small covers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.support.corpus import CASES
from tests.support.library_calls import captured, fast
from tests.support.one_kernel import capture
from tests.tilegraph.covers import case, covered, scheduled
from torch import Tensor, nn

from tilewright.errors import VerifyError
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Cover, Kernel
from tilewright.target import MemoryKind
from tilewright.tilegraph.connect import connect

DEVICE, SHARED, REGISTER = MemoryKind.DEVICE, MemoryKind.SHARED, MemoryKind.REGISTER


def matmul(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu((x[:, :, None] * w[None]).sum(1) + b)


def test_a_product_with_bias_and_relu_is_one_kernel() -> None:
    found = case(matmul, (9, 20), (20, 33), (33,))
    assert [e.level for e in found.tiles.edges if e.producer is None] == [DEVICE] * 3
    assert {found.level(name) for name in ("mul", "sum", "add")} == {REGISTER}
    (out,) = found.of("relu")
    assert (out.level, out.consumer, out.on_chip) == (DEVICE, None, False)
    assert found.tiles.levels() == (DEVICE, REGISTER)


def test_a_softmax_keeps_its_exponentials_in_scratch() -> None:
    found = case(lambda x: torch.softmax(x, -1), (33, 200), dynamic=True)
    assert found.level("exp") is SHARED and found.level("max") is REGISTER
    assert {e.consumer.op.name for e in found.of("exp") if e.consumer} == {"sum", "softmax"}
    assert [e.value for e in found.tiles.at(SHARED)] == [found.op("exp").output] * 2


SOFTMAXES = {"softmax", "softmax_small", "softmax_middle", "flatten_softmax"}
KEPT = SOFTMAXES | {"entropy", "causal_softmax", "softmax_plus_transpose"}


@pytest.mark.parametrize("name", sorted(KEPT | {"layer_norm", "attention", "max_pool", "cumsum_plus"}))
def test_scratch_is_told_by_the_value_that_it_holds(name: str) -> None:
    """Also where a mask is left out of the parts of a loop that it does not touch."""
    (found,) = (covered(capture(c, False)) for c in CASES if c.name == name)
    kept = {e.value for e in found.tiles.at(SHARED)}
    assert len(kept) == sum(len(s.program.scratch) for s in found.schedules) == (name in KEPT)
    assert kept <= {node.op.output for node in found.tiles.ops if node.op.name == "exp"}


def test_what_a_kernel_reads_and_stores_is_at_both_levels() -> None:
    found = case(lambda x: (x.exp(), x.exp().sum(-1)), (13, 40))
    assert [(e.level, e.consumer is None) for e in found.of("exp")] == [(DEVICE, True), (REGISTER, False)]


def test_a_value_that_two_kernels_compute_is_an_edge_in_each() -> None:
    graph = case(lambda x: (x.exp().sum(0), x.exp().sum(1)), (13, 40)).cover.graph
    exp, *sums = graph.ops
    kernels = tuple(Kernel((exp, op), op.outputs) for op in sums)
    cover = Cover(graph, kernels)
    edges = [e for e in connect(cover, scheduled(cover)).edges if e.value is exp.output]
    assert [e.level for e in edges] == [REGISTER] * 2
    assert [e.producer.step for e in edges if e.producer] == list(kernels)
    assert all(e.producer and e.consumer and e.producer.step is e.consumer.step for e in edges)


def test_between_kernels_values_go_through_memory() -> None:
    graph = case(lambda x: x.exp().sum(1), (13, 40)).cover.graph
    cover = Cover(graph, tuple(Kernel((op,), op.outputs) for op in graph.ops))
    tiles = connect(cover, scheduled(cover))
    assert [e.level for e in tiles.edges] == [DEVICE] * 3
    assert "exp@0 -> sum@1    DEVICE  2080" in tiles.show()


def test_calls_read_views_of_memory() -> None:
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).eval()
    found = covered(fast(captured(net, [torch.randn(96, 64)], frozen=False)))
    views = [node for node in found.tiles.ops if node.is_view]
    assert len(views) == 2 and found.tiles.levels() == (DEVICE,)
    for view in views:
        (reads,) = (e for e in found.tiles.edges if e.consumer == view)
        (makes,) = (e for e in found.tiles.edges if e.producer == view)
        assert reads.producer is None and makes.value.shape == reads.value.shape[::-1]
        assert makes.consumer is not None and makes.consumer.op.call is not None


def test_results_that_nobody_reads_go_to_nobody() -> None:
    found = case(lambda x: torch.topk(x, 2).values, (3, 5))
    assert [(e.level, e.consumer) for e in found.of("aten.topk")] == [(DEVICE, None)] * 2


def test_inputs_may_lie_on_the_host() -> None:
    found = case(lambda x, y: (x + y).sum(1) * y[:, 0], (6, 8), (6, 8))
    tiles = connect(found.cover, found.schedules, host=[1])
    x, y = found.cover.graph.inputs
    assert isinstance(x, Value) and isinstance(y, Value)
    assert {e.value for e in tiles.at(MemoryKind.HOST)} == {y}
    assert x in {e.value for e in tiles.at(DEVICE)} and y not in {e.value for e in tiles.at(DEVICE)}


def test_a_kernel_without_a_schedule_is_refused() -> None:
    found = case(lambda x: x.exp(), (3, 5))
    with pytest.raises(VerifyError, match="1 kernels have no schedule"):
        connect(found.cover, ())


def test_the_printed_form() -> None:
    found = case(lambda x: torch.softmax(x, -1), (33, 200))
    assert found.tiles.show().splitlines() == [
        "%0:f32[33, 200]  outside -> max@0, exp@0    DEVICE    26400",
        "%1:f32[33, 1]    max@0 -> exp@0             REGISTER  132",
        "%2:f32[33, 200]  exp@0 -> sum@0, softmax@0  SHARED    26400",
        "%3:f32[33, 1]    sum@0 -> softmax@0         REGISTER  132",
        "%4:f32[33, 200]  softmax@0 -> outside       DEVICE    26400",
    ]
    nothing = Cover(found.cover.graph, ())
    assert connect(nothing, ()).show() == ""
