"""A cover that was found before is taken as it is, without asking for prices; one that does not fit is found anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.attention.regions import DictCache
from tests.support.corpus import Case
from tests.support.cpp_harness import host_target
from tests.support.one_kernel import capture
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Cover, Kernel
from tilewright.options import Contractions, Options
from tilewright.partition.choose_kernels import ChosenRegions, Prices, RegionPolicy, choose_kernels
from tilewright.partition.cover import partition
from tilewright.partition.memo import Grouping, groupings_of, plain, task_of
from tilewright.runtime.store.cache import ContentStore
from tilewright.runtime.store.decisions import Decisions
from tilewright.schedule.solver import Solver


def network(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    hidden = torch.softmax(x * 2 + y, -1)
    return torch.sort(hidden)[0].tanh() + y, (hidden * x).sum(0)


def graph_of(rows: int = 30, dynamic: bool = False) -> Graph:
    case = Case("network", network, ((rows, 40), (rows, 40)), dynamic=({0: "n"}, {0: "n"}))
    return capture(case, dynamic)


def groups(cover: Cover) -> list[tuple[list[str], str]]:
    return [([op.name for op in s.ops], s.reason) for s in cover.steps if isinstance(s, Kernel)]


def never(*_: object) -> float:
    raise AssertionError("a price was asked for")


def test_a_known_graph_is_covered_without_prices() -> None:
    cache, solver = DictCache(), Solver(host_target(), Options())
    first = partition(graph_of(), solver.price, NO_HINTS, cache)
    again = partition(graph_of(), never, NO_HINTS, cache)
    assert groups(first) == groups(again) == groups(partition(graph_of(), solver.price, NO_HINTS))
    assert len(groups(first)) >= 2


@pytest.mark.parametrize("other", [{"rows": 31}, {"dynamic": True}])
def test_other_sizes_are_another_task(other: dict[str, Any]) -> None:
    assert task_of(graph_of()) == task_of(graph_of())
    assert task_of(graph_of()) != task_of(graph_of(**other))


def test_groups_that_do_not_fit_are_not_taken() -> None:
    cache, graph = DictCache(), graph_of()
    wrong = cache.known[task_of(graph, ())] = plain([Grouping((0,), why="wrong")])
    solver = Solver(host_target(), Options())
    assert groups(partition(graph, solver.price, NO_HINTS, cache)) == groups(
        partition(graph, solver.price, NO_HINTS)
    )
    assert cache.known[task_of(graph, ())] != wrong


def test_on_disk(tmp_path: Path) -> None:
    def covers(**options: object) -> Decisions:
        return Decisions(host_target(), ContentStore(tmp_path), Options().replace(**options), {})

    found = [Grouping((0, 2), (3,), "why"), Grouping((1,))]
    covers().put("task", plain(found))
    assert groupings_of(covers().get("task")) == found
    assert covers().get("other") is None
    assert covers(round_intermediates=True).get("task") is None


@pytest.mark.parametrize("decision", [[[1, 2]], {"a": 1}, [[["x"], [], ""]], 3, None])
def test_data_of_another_form_is_none(decision: object) -> None:
    assert groupings_of(decision) is None


def test_an_entry_that_is_broken_is_none(tmp_path: Path) -> None:
    covers = Decisions(host_target(), ContentStore(tmp_path), Options(), {})
    covers.put("task", [])
    (entry,) = tmp_path.rglob("decision.json")
    other = ContentStore(tmp_path / "other")
    other.put(entry.parent.name, {"decision.json": b"[[["})
    assert Decisions(host_target(), other, Options(), {}).get("task") is None


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v


@pytest.mark.parametrize("mode", ["modelled", "inside"])
def test_a_known_region_is_chosen_without_prices(mode: Contractions) -> None:
    graph, cache = capture(Case("attention", attention, ((2, 64, 8),) * 3), False), DictCache()
    solver = Solver(host_target(), Options())
    library = 0.0 if mode == "modelled" else 1.0

    def decided(prices: Prices) -> ChosenRegions:
        return choose_kernels(graph, prices, lambda region: (region, ()), RegionPolicy(mode, 1), cache)

    first = decided(Prices(NO_HINTS, solver.price, lambda _: library, lambda _: 0.0))
    again = decided(Prices(NO_HINTS, never, never, never))
    assert again.graph.digest() == first.graph.digest()
    assert [op.kernel for op in again.graph.ops] == [op.kernel for op in first.graph.ops]
    assert [(r.seconds, r.library, r.notes) for r in again.regions] == [
        (r.seconds, r.library, r.notes) for r in first.regions
    ]
    assert any(op.kernel >= 0 for op in again.graph.ops) == (mode == "inside")
