"""Regions around contractions, the kernels they may become, and the cheapest set of them."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.attention.regions import SHAPES, graph_of, weights, with_columns, work
from tests.support.corpus import Case
from tests.support.one_kernel import capture
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.errors import IllegalSchedule
from tilewright.interp.graph import run_graph
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Kernel
from tilewright.library.select import select
from tilewright.options import Options
from tilewright.partition import candidates as mapping
from tilewright.partition.candidates import _between, _Paths, candidates
from tilewright.partition.choose_kernels import Prices, RegionPolicy, choose_kernels
from tilewright.partition.cover import partition
from tilewright.partition.covering import rounds
from tilewright.partition.covering.cheapest_sets import Candidate, choices
from tilewright.partition.regions import find_regions
from tilewright.pipeline.prices import kernel_prices
from tilewright.rewrite.normal.normalise import normalise
from tilewright.schedule.solver import Solver
from tilewright.target import MemoryKind, preset
from tilewright.tuning.search_limits import CANDIDATES


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k) @ v


def returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = weights(q, k)
    return p @ v, p


def sorted_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = weights(q, k)
    return torch.where(p >= p.topk(3).values[..., -1:], p, 0.0) @ v


def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.relu(q @ k.transpose(-1, -2)).transpose(-1, -2)


def twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return with_columns(with_columns(q, k, v)[0], k, v)


def _results(graph: Graph) -> list[Value]:
    return [v for v in graph.outputs if isinstance(v, Value)]


def test_a_region_reads_and_leaves_only_small_values() -> None:
    for dynamic in (False, True):
        graph = graph_of(with_columns, dynamic)
        (region,) = find_regions(graph, NO_HINTS)
        assert set(region.inputs) == set(graph.inputs)
        assert set(region.outputs) == set(graph.outputs)
        assert {op.name for op in region.ops if op not in region.own} <= {
            "full",
            "iota",
            "sub",
            "ge",
            "where",
        }


@pytest.mark.parametrize("run", [returned, sorted_scores, products])
def test_no_region_where_the_product_leaves_or_nothing_folds_it(run: Callable[..., Tensor]) -> None:
    assert not find_regions(graph_of(run), NO_HINTS)


def test_behind_a_product_stands_what_folds_it_and_the_next_product() -> None:
    """It reads the result of the library's call, whole."""
    graph = graph_of(attention)
    (whole,) = find_regions(graph, NO_HINTS)
    (behind,) = find_regions(graph, NO_HINTS, behind=True)
    first = next(op for op in graph.ops if op.origin >= 0 and op in whole.own)
    node = {op for op in graph.ops if op.origin == first.origin}
    assert behind.outputs == whole.outputs and behind.own < whole.own and not node & set(behind.ops)
    (product,) = set(behind.inputs) - set(whole.inputs)
    assert product in {v for op in node for v in op.outputs}
    behind.graph(graph).verify()


def mixed() -> Graph:
    """Attention whose heads are mixed between its products, the mixture of a view of scores."""

    def run(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        s = torch.einsum("gh,hij->gij", w, q @ k.transpose(-1, -2) * 0.5)
        return torch.softmax(s, -1) @ v

    shapes = ((4, 64, 8), (4, 64, 8), (4, 64, 8), (4, 4))
    return normalise(capture(Case("case", run, shapes), False))


def test_what_only_a_librarys_call_reads_of_a_first_product_stays() -> None:
    """The view of scores that heads are mixed of is no op of what stands behind the mixture."""
    prices = Prices(NO_HINTS, lambda kernel, layouts: 1.0, lambda region: 9.0, lambda region: 0.1)
    policy = RegionPolicy("modelled", 132, behind=True)
    made = choose_kernels(mixed(), prices, lambda g: (g, ()), policy)
    assert any(r.kernels for r in made.regions)
    called = select(made.graph)
    called.verify()
    assert sum(op.call is not None for op in called.ops) == 2, "scores, and their mixture"


def test_a_product_stays_generated_where_nothing_makes_the_operand_of_its_call() -> None:
    graph = mixed()
    whole = select(graph)
    called = [op.inputs for op in whole.ops if op.call is not None]
    view = next(
        op for op in graph.ops if op.expr is not None and op.expr.is_view() and op.output in called[1]
    )
    made = select(graph.with_ops([op for op in graph.ops if op is not view]))
    made.verify()
    assert sum(op.call is not None for op in made.ops) == len(called) - 1, "the others are calls all the same"
    inputs = [torch.randn(*shape) for shape in ((4, 64, 8), (4, 64, 8), (4, 64, 8), (4, 4))]
    for got, want in zip(run_graph(made, inputs), run_graph(whole, inputs), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-5)


def test_nothing_stands_behind_a_product_that_nothing_folds() -> None:
    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.sigmoid(q @ k.transpose(-1, -2)) @ v

    (region,) = find_regions(graph_of(mixed), NO_HINTS)
    assert region.own and not find_regions(graph_of(mixed), NO_HINTS, behind=True)


def test_a_bias_stays_with_the_product_of_a_library() -> None:
    def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        made = torch.addmm(b, x, w).view(-1, 2, 16).transpose(0, 1)
        return attention(made, made * 2, made)

    graph = capture(Case("case", biased, ((64, 64), (64, 32), (32,))), False)
    (region,) = find_regions(graph, NO_HINTS)
    product = next(op for op in graph.ops if op.origin == graph.ops[0].origin)
    same = [op for op in graph.ops if op.origin == product.origin]
    assert len(same) > 1 and not set(same) & set(region.ops)
    assert any(op.expr is not None and op.expr.is_pointwise for op in set(region.ops) - region.own)


def test_a_product_that_all_layers_read_is_no_region() -> None:
    """Its surroundings would be the whole model, with hundreds of sets of results for kernels to store."""

    def layers(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        places = torch.sin(q @ k.transpose(-1, -2))
        outputs: list[Tensor] = []
        for _ in range(count):
            v = torch.tanh((places @ v) @ v[0, :8])
            outputs.append(v)
        return tuple(outputs)

    count = 3
    (region,) = find_regions(graph_of(layers), NO_HINTS)
    assert len(region.outputs) > count
    count = 6
    assert not find_regions(graph_of(layers), NO_HINTS)


def test_pairs_of_stores_and_cuts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(with_columns)
    freely = candidates(graph, work, 1, NO_HINTS)
    monkeypatch.setattr(mapping, "CANDIDATES", replace(CANDIDATES, max_tried_pairs=freely.tried - 1))
    bounded = candidates(graph, work, 1, NO_HINTS)
    assert 0 < bounded.tried < freely.tried
    assert choices(graph, bounded.kept, 1)


@pytest.mark.parametrize("run", [attention, with_columns, twice])
def test_sets_of_ops_as_bits_are_those_found_one_by_one(run: Callable[..., Tensor]) -> None:
    graph = graph_of(run)
    paths, values = _Paths(graph), [v for op in graph.ops for v in op.outputs]
    draw = random.Random(0)
    for _ in range(200):
        given = frozenset(draw.sample(values, 2))
        stores = frozenset(v for v in draw.sample(values, 3) if v not in given)
        if stores:
            bits, used = paths.between(stores, given)
            assert (frozenset(paths.ops(bits)), used) == _between(stores, given, graph.producer())


def test_ops_are_connected_by_values_of_their_own_set() -> None:
    graph = graph_of(lambda q, k, v: (torch.exp(q), torch.exp(k), torch.exp(q) + v))
    paths = _Paths(graph)
    one, other, reader = (1 << n for n in map(paths.place.__getitem__, _results(graph)))
    assert not paths.connected(one | other)
    assert paths.connected(one | reader)


def test_small_products_are_regions_only_where_asked() -> None:
    graph = capture(Case("case", attention, ((2, 8, 8),) * 3), False)
    assert not find_regions(graph, NO_HINTS)
    assert len(find_regions(graph, NO_HINTS, anywhere=True)) == 1


@pytest.mark.parametrize("run", [attention, with_columns, twice])
def test_what_has_a_kernel_is_in_no_region(run: Callable[..., Tensor]) -> None:
    """Found again, it would be a part of two kernels (seen as a cycle in covers of attention that had one)."""
    graph = graph_of(run)
    assert find_regions(graph, NO_HINTS)
    for chosen in graph.ops:
        marked = graph.with_ops([replace(op, kernel=0) if op is chosen else op for op in graph.ops])
        found = find_regions(marked, NO_HINTS)
        assert all(op.kernel < 0 for region in found for op in (*region.ops, *region.own))
    assert not find_regions(graph.with_ops([replace(op, kernel=0) for op in graph.ops]), NO_HINTS)


def test_kernels_overlap_and_begin_at_small_values() -> None:
    graph = graph_of(with_columns)
    found = candidates(graph, work, 1, NO_HINTS)
    columns = next(v for v in graph.outputs if isinstance(v, Value) and len(v.shape) == 2)
    (best,) = choices(graph, found.kept)
    made = [set(c.kernel.outputs) for c in best.kernels]
    assert any(columns in m for m in made)
    scores = [sum(op.name == "matmul" for op in c.kernel.ops) for c in best.kernels]
    assert min(scores) >= 1
    assert found.tried >= len(found.kept)


def test_the_best_choice_is_that_of_trying_all() -> None:
    graph = graph_of(with_columns)
    found = candidates(graph, work, 1, NO_HINTS).kept
    required = {v for v in graph.outputs if isinstance(v, Value)}
    least = min(
        sum(c.seconds for c in some)
        for n in range(1, 4)
        for some in itertools.permutations(found, n)
        if _runs(some) and required <= {v for c in some for v in c.stores}
    )
    first, *more = choices(graph, found, most=3)
    assert first.seconds == least
    assert all(c.seconds >= least and _runs(c.kernels) for c in more)


def _runs(some: Sequence[Candidate]) -> bool:
    made: set[Value] = set()
    for c in some:
        if not c.cuts <= made:
            return False
        made |= c.stores
    return True


def test_kernels_without_parallelism_are_refused() -> None:
    """Rows and columns in one kernel leave only the batch to run side by side."""
    graph = capture(Case("case", with_columns, ((2, 1024, 8),) * 3), False)
    few, many = candidates(graph, work, 2, NO_HINTS), candidates(graph, work, 16, NO_HINTS)
    assert not any("too few tiles run side by side" in why for why in few.refused)
    assert any("too few tiles run side by side (for " in why for why in many.refused)
    assert choices(graph, many.kept)
    assert all(len(c.stores & {v for v in graph.outputs if isinstance(v, Value)}) <= 1 for c in many.kept)


def many_results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Rows and columns of one length: they look alike but for the dim that they fold."""
    p = weights(q, k) - weights(k, q) / 2
    rows = [(p * v[..., n : n + 1].transpose(-1, -2)).sum(-1) for n in range(3)]
    columns = [(p * v[..., n : n + 1]).sum(1) for n in range(3)]
    return p @ v, *rows, *columns


def test_refused_kernels_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guess takes kernels for the best that have no legal form: others are priced until a set makes all."""
    graph = graph_of(many_results)
    found = candidates(graph, lambda kernel, layouts: work(kernel), 1, NO_HINTS)
    (best,) = choices(graph, found.kept)
    legal = {(c.kernel.ops, c.kernel.outputs) for c in best.kernels}

    def is_legal(kernel: Kernel) -> bool:
        return (kernel.ops, kernel.outputs) in legal

    def price(kernel: Kernel, layouts: object = None) -> float:
        if not is_legal(kernel):
            raise IllegalSchedule("no form", law="none")
        return work(kernel)

    monkeypatch.setattr(rounds, "CANDIDATES", replace(CANDIDATES, max_priced_kernels=4))
    few = candidates(graph, price, 1, NO_HINTS, guess=lambda kernel: 1.0 if is_legal(kernel) else 0.1)
    (again,) = choices(graph, few.kept)
    assert again.seconds == best.seconds


def test_of_many_kernels_few_are_priced() -> None:
    """However many results and cuts there are; the best set is that of pricing all."""
    graph = graph_of(many_results, length=256)
    asked: list[Kernel] = []

    def price(kernel: Kernel, layouts: object = None) -> float:
        asked.append(kernel)
        return work(kernel)

    whole = candidates(graph, price, 1, NO_HINTS)
    assert len(asked) > 2 * CANDIDATES.max_priced_kernels
    asked.clear()
    guessed = candidates(graph, price, 1, NO_HINTS, guess=lambda kernel: work(kernel) / 3)
    assert (
        len(asked) <= CANDIDATES.max_priced_kernels
        and guessed.tried == whole.tried <= CANDIDATES.max_tried_pairs
    )
    (best,), (found,) = choices(graph, whole.kept), choices(graph, guessed.kept)
    assert found.seconds == best.seconds


def test_many_results_along_the_same_dims_are_stored_together() -> None:
    graph = graph_of(many_results)
    ends = {v for v in graph.outputs if isinstance(v, Value)}
    stored = {c.stores & ends for c in candidates(graph, work, 1, NO_HINTS).fit}
    assert {len(some) for some in stored} <= {0, 1, 3, 4, 6, 7}
    rows, columns = (some for some in stored if len(some) == 3)
    assert not rows & columns


@pytest.mark.parametrize("run", [attention, with_columns, twice])
@pytest.mark.parametrize("dynamic", [False, True])
def test_chosen_graphs_mean_the_same(run: Callable[..., Tensor], dynamic: bool) -> None:
    graph = graph_of(run, dynamic)
    prices = Prices(NO_HINTS, work, lambda region: 1e30, lambda region: 0.0)
    mapped = choose_kernels(graph, prices, lambda region: (region, ()), RegionPolicy("modelled", 1))
    mapped.graph.verify()
    assert len(mapped.regions) == (2 if run is twice else 1)
    assert len({op.kernel for op in mapped.graph.ops if op.kernel >= 0}) >= len(mapped.regions)
    inputs = [t.numpy() for t in Case("case", run, SHAPES).inputs()]
    for a, b in zip(run_graph(graph, inputs), run_graph(mapped.graph, inputs), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-9, atol=1e-12
        )


def chained(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The sum is an end of the first region; the second one would compute it again."""
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    p = torch.softmax(q @ k.transpose(-1, -2), -1)
    return torch.relu((p @ v + p @ k) @ q.transpose(-1, -2)).sum(-1)


def crossed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Each region reads a result of the other."""
    one, other = torch.exp(q @ k.transpose(-1, -2)), torch.exp(k @ v.transpose(-1, -2))
    return (one + other.sum(-2, keepdim=True)).sum(-1), (other * one.sum(-2, keepdim=True)).sum(-1)


@pytest.mark.parametrize(("run", "count"), [(chained, 2), (crossed, 1)])
def test_regions_run_one_after_the_other(run: Callable[..., Tensor], count: int) -> None:
    graph = capture(Case("case", run, ((2, 8, 8),) * 3), False)
    regions = find_regions(graph, NO_HINTS, anywhere=True)
    assert len(regions) == count
    own = {v for region in regions for op in region.own for v in op.outputs}
    given = {v for region in regions for v in region.outputs}
    assert not own & {v for region in regions for v in region.inputs} - given
    prices = Prices(NO_HINTS, work, lambda region: 1e30, lambda region: 0.0)
    mapped = choose_kernels(graph, prices, lambda region: (region, ()), RegionPolicy("inside", 1))
    mapped.graph.verify()
    partition(mapped.graph, lambda kernel, layouts=None: 1.0, NO_HINTS)


def test_kernels_that_were_chosen_before_keep_their_order() -> None:
    graph = capture(Case("case", crossed, ((2, 8, 8),) * 3), False)
    (first,) = find_regions(graph, NO_HINTS, anywhere=True)
    marked = graph.with_ops([replace(op, kernel=0) if op in first.own else op for op in graph.ops])
    assert not find_regions(marked, NO_HINTS, anywhere=True)


def projected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A product that the library is to compute reads the region's result through a view."""
    heads = attention(q, k, v).transpose(0, 1).reshape(q.shape[1], -1)
    return torch.mm(heads, torch.ones(heads.shape[1], 24))


def test_views_that_the_library_reads_stay() -> None:
    """Normal form reads past them, but the call that replaces the product does not."""
    graph = graph_of(projected)
    (region,) = find_regions(graph, NO_HINTS)
    called = [o for o in graph.origins if o.call is not None and o.call.name.endswith("mm")][-1]
    views = {v for op in graph.ops if op.expr is not None and op.expr.is_view() for v in op.outputs}
    assert views & set(called.inputs)
    assert not views & set(called.inputs) & {v for op in region.own for v in op.outputs}


def test_equal_regions_are_decided_once() -> None:
    graph = graph_of(lambda q, k, v: (attention(q, k, v), attention(v, q, k)))
    prices = Prices(NO_HINTS, work, lambda region: 1e30, lambda region: 0.0)
    mapped = choose_kernels(graph, prices, lambda region: (region, ()), RegionPolicy("modelled", 1))
    assert len(mapped.regions) == 2
    assert mapped.regions[0] is mapped.regions[1]


def test_the_library_stays_where_it_is_faster() -> None:
    graph = graph_of(attention)
    for prices, mode, kernels in (
        (Prices(NO_HINTS, work, lambda region: 1.0, lambda region: 0.0), "modelled", False),
        (Prices(NO_HINTS, work, lambda region: 1.0, lambda region: 0.0), "inside", True),
        (Prices(NO_HINTS, work, lambda region: 1e30, lambda region: 1e30), "modelled", False),
    ):
        mapped = choose_kernels(graph, prices, lambda region: (region, ()), RegionPolicy(mode, 1))  # type: ignore[arg-type]
        assert bool(mapped.regions[0].kernels) is kernels
        assert (mapped.graph is graph) is not kernels


@pytest.mark.parametrize("capacity", [1 << 12, 1 << 30])
def test_kernels_are_taken_where_calls_would_hold_much_of_the_memory(capacity: int) -> None:
    graph = graph_of(attention, length=256)
    target = preset("sm_90").resized(capacities={MemoryKind.DEVICE: capacity})
    prices = kernel_prices(Solver(target, Options()))
    prices = replace(prices, kernel=work, library=lambda region: 1.0, ideal=lambda region: 0.0)
    mapped = choose_kernels(graph, prices, lambda region: (region, ()), RegionPolicy("modelled", 1))
    little = capacity == 1 << 12
    assert bool(mapped.regions[0].kernels) == little
    assert any("of the device's memory" in note for note in mapped.regions[0].notes) == little


def test_kernels_that_store_what_calls_would_hold_spare_nothing() -> None:
    graph = graph_of(attention)
    target = preset("sm_90").resized(capacities={MemoryKind.DEVICE: 1 << 12})
    spared = kernel_prices(Solver(target, Options())).spared
    each = [Kernel((op,), tuple(op.outputs)) for op in graph.ops]
    assert spared(graph, each[-1:]) > 0 and spared(graph, each) == 0
