"""A cover that was found before is taken as it is, without asking for prices; one that does not fit is found anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.emit.harness import host_target
from tests.schedule.corpus import Case
from tests.schedule.run import capture
from torch import Tensor

from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Cover, Kernel
from tilewright.options import Options
from tilewright.partition.fusion import partition
from tilewright.partition.recall import Grouping, task_of
from tilewright.runtime.cache import Store
from tilewright.runtime.covers import Covers
from tilewright.schedule.solver import Solver


def network(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    hidden = torch.softmax(x * 2 + y, -1)
    return torch.sort(hidden)[0].tanh() + y, (hidden * x).sum(0)


def graph_of(rows: int = 30, dynamic: bool = False) -> Graph:
    case = Case("network", network, ((rows, 40), (rows, 40)), dynamic=({0: "n"}, {0: "n"}))
    return capture(case, dynamic)


def groups(cover: Cover) -> list[tuple[list[str], str]]:
    return [([op.name for op in s.ops], s.reason) for s in cover.steps if isinstance(s, Kernel)]


class Remembered:
    """A memory of one text."""

    def __init__(self) -> None:
        self.known: dict[str, Sequence[Grouping]] = {}

    def recall(self, task: str) -> Sequence[Grouping] | None:
        return self.known.get(task)

    def keep(self, task: str, groupings: Sequence[Grouping]) -> None:
        self.known[task] = groupings


def never(*_: object) -> float:
    raise AssertionError("a price was asked for")


def test_a_known_graph_is_covered_without_prices() -> None:
    memory, solver = Remembered(), Solver(host_target(), Options())
    first = partition(graph_of(), solver.price, memory)
    again = partition(graph_of(), never, memory)
    assert groups(first) == groups(again) == groups(partition(graph_of(), solver.price))
    assert len(groups(first)) >= 2


@pytest.mark.parametrize("other", [{"rows": 31}, {"dynamic": True}])
def test_other_sizes_are_another_task(other: dict[str, Any]) -> None:
    assert task_of(graph_of()) == task_of(graph_of())
    assert task_of(graph_of()) != task_of(graph_of(**other))


def test_groups_that_do_not_fit_are_not_taken() -> None:
    memory, graph = Remembered(), graph_of()
    memory.known[task_of(graph)] = [Grouping((0,), "wrong")]
    solver = Solver(host_target(), Options())
    assert groups(partition(graph, solver.price, memory)) == groups(partition(graph, solver.price))
    assert memory.known[task_of(graph)] != [Grouping((0,), "wrong")]


def test_on_disk(tmp_path: Path) -> None:
    def covers(**options: object) -> Covers:
        return Covers(host_target(), Store(tmp_path), Options().replace(**options), {})

    found = [Grouping((0, 2), "why"), Grouping((1,))]
    covers().keep("task", found)
    assert covers().recall("task") == found
    assert covers().recall("other") is None
    assert covers(round_intermediates=True).recall("task") is None


@pytest.mark.parametrize("text", ["[[1, 2]]", '{"a": 1}', "[[["])
def test_an_entry_of_another_form_is_none(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path)
    covers = Covers(host_target(), store, Options(), {})
    covers.keep("task", [])
    (entry,) = tmp_path.rglob("groups.json")
    key = entry.parent.name
    other = Store(tmp_path / "other")
    other.put(key, {"groups.json": text.encode()})
    assert Covers(host_target(), other, Options(), {}).recall("task") is None
