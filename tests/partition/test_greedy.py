"""Merging asks and searches in proportion to the ops of a graph, decides as an exhaustive search would, and says where
it gave up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.partition.graphs import called
from tests.support.cpp_harness import host_target

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.errors import VerifyError
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import const
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Kernel, LibraryStep, ViewStep
from tilewright.ir.ops import pointwise as p
from tilewright.ir.ops.reduce import mean, sum_
from tilewright.ir.ops.view import stack
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.partition import greedy, topological_order
from tilewright.partition.cover import partition
from tilewright.partition.equal_groups import Likeness
from tilewright.partition.greedy import Merging
from tilewright.partition.kernel_ops import GraphParts
from tilewright.partition.topological_order import Order, Standing
from tilewright.schedule.solver import Solver, kernel_key

Program = Callable[[Builder, Value], tuple[Value, ...]]
SHAPE = (dims.integer(16), dims.integer(24))


def tower(layers: int) -> Program:
    """Layers of a norm, a call, something pointwise and a residual."""

    def run(b: Builder, x: Value) -> tuple[Value, ...]:
        for _ in range(layers):
            y = p.sub(b, x, mean(b, x, (1,), True))
            y = p.div(b, y, p.sqrt(b, mean(b, p.mul(b, y, y), (1,), True)))
            x = p.add(b, x, p.tanh(b, called(b, p.add(b, y, const(1, f32)))))
        return (x,)

    return run


def chain(ops: int) -> Program:
    """Pointwise ops and a mean along rows and columns in turns, of which no two stretches are equal."""

    def run(b: Builder, x: Value) -> tuple[Value, ...]:
        for k in range(ops):
            other = p.mul(b, x, const(k + 1, f32)) if k % 5 else mean(b, x, (k % 2,), True)
            x = p.sub(b, p.sin(b, x), other)
        return (x,)

    return run


def graph_of(run: Program) -> Graph:
    b = Builder()
    x = b.value(SHAPE, f32)
    return b.finish((x,), run(b, x))


def merged(graph: Graph) -> Merging:
    made = Merging(GraphParts(graph, NO_HINTS), Solver(host_target(), Options()).price)
    made.groups()
    return made


def reachable(after: list[list[int]], group_of: list[int], start: int) -> set[int]:
    """Groups to which a path leads from those that follow `start` directly, other than over edges of its own."""
    found: set[int] = set()
    todo = [start]
    while todo:
        group = todo.pop()
        for place, other in enumerate(group_of):
            if other == group:
                new = {group_of[r] for r in after[place]} - found - {start}
                found |= new
                todo += new
    return found


@pytest.mark.parametrize("seed", range(12))
def test_paths_are_found_as_by_a_search_of_everything(seed: int) -> None:
    draw = random.Random(seed)
    n = 40
    after = [sorted(draw.sample(range(k + 1, n), min(n - k - 1, draw.randrange(3)))) for k in range(n)]
    made = Order(after)
    for _ in range(200):
        a, b = (made.group_of[place] for place in draw.sample(range(n), 2))
        if a == b:
            continue
        clear = made.between(a, b)
        between = any(
            end in reachable(after, made.group_of, middle)
            for start, end in ((a, b), (b, a))
            for middle in reachable(after, made.group_of, start) - {end}
        )
        assert (clear is Standing.BETWEEN) == between
        if not isinstance(clear, Standing):
            made.merge(clear)
            for place, later in enumerate(after):
                for one, other in ((made.group_of[place], made.group_of[r]) for r in later):
                    assert one == other or made.label[one] < made.label[other]


def test_labels_are_drawn_anew_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topological_order, "GROUPS", replace(topological_order.GROUPS, label_distance=2))
    for seed in range(6):
        test_paths_are_found_as_by_a_search_of_everything(seed)


def test_groups_chosen_before_stand_where_their_ops_allow() -> None:
    made = Order([[1], [2], [3], [], [3]], [(0, 4), (2, 3)])
    first, second = made.group_of[0], made.group_of[3]
    assert made.label[first] < made.label[1] < made.label[second]
    with pytest.raises(VerifyError, match="cycle"):
        Order([[1], [2], []], [(0, 2)])


def test_work_grows_with_the_layers_and_prices_do_not() -> None:
    found = [merged(graph_of(tower(layers))) for layers in (4, 8, 12)]
    assert len({m.priced for m in found}) == 1
    few, more, most = (m.order.visits for m in found)
    assert most - more <= 1.2 * (more - few)


def test_work_grows_with_a_chain_of_which_nothing_is_alike() -> None:
    found = [merged(graph_of(chain(ops))) for ops in (20, 40, 60)]
    for few, more, most in ([m.priced for m in found], [m.order.visits for m in found]):
        assert most - more <= 1.2 * (more - few)


@pytest.mark.parametrize("run", [tower(4), chain(24)])
def test_groups_that_are_alike_make_equal_kernels(run: Program) -> None:
    parts = GraphParts(graph_of(run), NO_HINTS)
    alike = Likeness(parts.graph, parts.layouts, parts.inlined)
    wanted = sorted(parts.position[op] for op in parts.generated())
    found: dict[object, set[str]] = {}
    for length, start in itertools.product(range(1, 6), range(len(wanted))):
        for gap in (1, 2):
            places = tuple(wanted[start : start + length * gap : gap])
            found.setdefault(alike.key(places), set()).add(kernel_key(parts.kernel(places), parts.layouts))
    assert all(len(texts) == 1 for texts in found.values())
    assert len(found) < 4 * len({text for texts in found.values() for text in texts})


def test_operands_that_change_places_are_not_alike() -> None:
    def run(b: Builder, x: Value) -> tuple[Value, ...]:
        one, two = sum_(b, x, (0,), True), sum_(b, x, (1,), True)
        pairs = ((one, two), (two, one), (one, one), (one, two))
        return tuple(p.mul(b, p.exp(b, first), second) for first, second in pairs)

    parts = GraphParts(graph_of(run), NO_HINTS)
    alike = Likeness(parts.graph, parts.layouts, parts.inlined)
    products = [n for n, op in enumerate(parts.graph.ops) if op.name == "mul"]
    assert len({alike.key(pair) for pair in itertools.pairwise(products)}) == 3


def test_a_search_that_ends_early_keeps_groups_apart_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topological_order, "GROUPS", replace(topological_order.GROUPS, max_path_edges=1))
    graph = graph_of(chain(12))
    cover = partition(graph, Solver(host_target(), Options()).price, NO_HINTS)
    reasons = [s.reason for s in cover.steps if isinstance(s, Kernel)]
    assert any("further apart than a search" in reason for reason in reasons)


def test_prices_end_and_what_is_left_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(chain(40))
    price = Solver(host_target(), Options()).price
    usual = [s for s in partition(graph, price, NO_HINTS).steps if isinstance(s, Kernel)]
    monkeypatch.setattr(greedy, "GROUPS", replace(greedy.GROUPS, max_priced_kernels=60))
    cover = partition(graph, price, NO_HINTS)
    steps = [s for s in cover.steps if isinstance(s, Kernel)]
    assert len(usual) < len(steps) < len(graph.ops)
    assert any("not priced" in s.reason for s in steps)
    assert {op for s in steps for op in s.ops} == set(graph.ops)


def test_scalars_that_others_compute_again_do_not_hide_their_readers() -> None:
    """The sum is stored for the second reader, which computes the scalars in between for itself."""

    def run(b: Builder, x: Value) -> tuple[Value, ...]:
        scale = p.mul(b, p.add(b, sum_(b, x), const(1, f32)), const(2, f32))
        return p.mul(b, called(b, p.mul(b, x, scale)), scale), p.add(b, called(b, p.sub(b, x, scale)), scale)

    cover = partition(graph_of(run), Solver(host_target(), Options()).price, NO_HINTS)
    made = {v for v in cover.graph.inputs if isinstance(v, Value)}
    for step in cover.steps:
        match step:
            case Kernel():
                assert made.issuperset(step.inputs)
                made |= set(step.outputs)
            case LibraryStep():
                made |= set(step.op.outputs)
            case ViewStep():
                made.add(step.value)


def test_a_long_run_of_scalars_is_not_computed_again_by_each_reader() -> None:
    def run(b: Builder, x: Value) -> tuple[Value, ...]:
        count = sum_(b, x)
        for _ in range(120):
            count = p.add(b, count, const(1, f32))
            x = p.mul(b, x, count)
        return x, count

    cover = partition(graph_of(run), Solver(host_target(), Options()).price, NO_HINTS)
    assert sum(len(s.ops) for s in cover.steps if isinstance(s, Kernel)) < 1000


def test_an_op_of_many_operands_stays_alone() -> None:
    def run(b: Builder, x: Value) -> tuple[Value, ...]:
        pieces = stack(b, [p.sin(b, p.add(b, x, const(k, f32))) for k in range(260)], 0)
        return (sum_(b, pieces, (0,)),)

    asked: list[int] = []

    def price(kernel: Kernel, layouts: object) -> float:
        asked.append(max(len(op.inputs) for op in kernel.ops))
        return 1.0

    partition(graph_of(run), price, NO_HINTS)
    assert asked.count(260) == 1
