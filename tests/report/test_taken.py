"""The facts of something compiled are those that its records tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tilewright
from tilewright.errors import InputError
from tilewright.report.facts import ReportFacts
from tilewright.report.stored import from_json, to_json
from tilewright.report.taken import report_facts, reported


def two_kernels(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mm(torch.softmax(x * y, -1), y).relu() + x[:, :1]


@pytest.fixture
def compiled(costs_of_wide_vectors: None) -> tilewright.CompiledModel:
    del costs_of_wide_vectors
    x = torch.randn(80, 80)
    return tilewright.compile(two_kernels, (x, x + 1))


def facts_of(compiled: tilewright.CompiledModel) -> ReportFacts:
    return report_facts("model", reported(compiled.compilations, compiled.signature))


def test_steps_are_kernels_and_calls_in_order(compiled: tilewright.CompiledModel) -> None:
    (graph,) = facts_of(compiled).graphs
    assert [s.how for s in graph.steps] == ["generated", "choice", "generated"]
    first, call, last = graph.steps
    assert [first.name, last.name] == [k.name for k in compiled.kernels]  # type: ignore[attr-defined]
    assert (call.name, call.reason) == ("aten.mm", "contraction")
    record = compiled.kernels[0]
    assert first.bytes_moved == record.bytes_moved and first.flops == record.flops  # type: ignore[attr-defined]
    assert first.schedule == record.schedule and first.reason == record.reason  # type: ignore[attr-defined]
    assert facts_of(compiled).sources[first.source or 0] == record.source  # type: ignore[attr-defined]
    assert graph.machine is not None and graph.machine.flops > 0
    assert graph.coverage == str(compiled.coverage) and "partition" in [p.name for p in graph.phases]


def test_edges_join_steps_and_the_caller(compiled: tilewright.CompiledModel) -> None:
    (graph,) = facts_of(compiled).graphs
    between = {(e.start, e.end): e for e in graph.edges}
    assert {(0, 1), (1, 2), (None, 0), (None, 1), (None, 2), (2, None)} <= between.keys()
    assert between[0, 1].bytes == 4 * 80 * 80 and between[0, 1].level == "device"
    assert between[None, 0].tensor.startswith("input ")
    assert graph.steps[0].kept > 0, "what softmax reads stays on chip"
    assert {x.name for x in graph.levels} >= {"DEVICE", "REGISTER"}


def test_memory_rises_and_falls(compiled: tilewright.CompiledModel) -> None:
    (graph,) = facts_of(compiled).graphs
    size = 4 * 80 * 80
    assert graph.live_bytes[1] >= 2 * size and len(graph.live_bytes) == 3
    assert graph.intermediate_bytes is not None and graph.intermediate_bytes >= size


def test_facts_of_something_compiled_come_back(compiled: tilewright.CompiledModel) -> None:
    facts = facts_of(compiled)
    assert from_json(json.loads(json.dumps(to_json(facts))), "here") == facts


def test_a_model_writes_its_page(compiled: tilewright.CompiledModel, tmp_path: Path) -> None:
    text = compiled.report(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == text and "two_kernels" in text
    with pytest.raises(InputError, match="cannot write"):
        compiled.report(tmp_path / "absent" / "report.html")
    with pytest.raises(InputError, match="nothing is compiled"):
        tilewright.compile(two_kernels).report()


def test_forward_and_backward_are_graphs_of_one_report() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    compiled = tilewright.compile(layer)
    compiled(torch.randn(2, 4)).sum().backward()  # type: ignore[attr-defined]
    facts = facts_of(compiled)
    assert [g.title for g in facts.graphs] == ["forward", "backward"]
    assert "graph-choice" in compiled.report()


def test_sizes_of_data_are_told() -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        kept = x[x > 0] * 2
        return torch.sort(kept).values + 1

    compiled = tilewright.compile(positive, (torch.randn(50),))
    (graph,) = facts_of(compiled).graphs
    assert graph.live_bytes == () and graph.intermediate_bytes is None
    assert "Sizes come from data." in compiled.report()


def test_what_runs_in_a_loop_is_told() -> None:
    def steps(x: torch.Tensor) -> torch.Tensor:
        for k in range(120):
            x = torch.softmax(x * (1 + k / 100), -1) @ x
        return x

    (graph,) = facts_of(tilewright.compile(steps, (torch.randn(80, 80),))).graphs
    looped = [s.looped for s in graph.steps]
    assert any(looped) and looped == sorted(looped) and not looped[0]
    assert len(graph.live_bytes) == looped.count(False)
