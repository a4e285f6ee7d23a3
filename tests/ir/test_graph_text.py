"""Graphs as JSON: what is read back is the same graph, here and in another process."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.corpus import CASES, Case
from tests.support.library_calls import captured, fast, products
from tests.support.one_kernel import capture
from torch import nn

import tilewright
from tilewright.errors import InputError
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import integer
from tilewright.ir.graph import Graph, LibraryCall, Operand, Routine
from tilewright.ir.text.graph import read_graph, write_graph
from tilewright.library.fused import FusedAttention
from tilewright.pipeline.phases import check_phases

DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
ROOT = Path(__file__).parents[2]


def again(graph: Graph) -> tuple[Graph, list[object]]:
    data, held = write_graph(graph)
    return read_graph(json.loads(json.dumps(data)), held), held


@DYNAMIC
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_graph_of_the_corpus_is_read_back(case: Case, dynamic: bool) -> None:
    graph = capture(case, dynamic)
    found, held = again(graph)
    found.verify()
    assert found.digest() == graph.digest() and found.show() == graph.show()
    assert not any(callable(x) for x in held)


SCRIPT = """
import json, sys
from tilewright.ir.text.graph import read_graph
for line in sys.stdin:
    print(read_graph(json.loads(line)).digest())
"""


def test_a_graph_has_one_digest_in_every_process() -> None:
    graphs = [capture(case, True) for case in CASES]
    written = [(g, write_graph(g)) for g in graphs]
    sent = [(g, json.dumps(data)) for g, (data, held) in written if not held]
    assert len(sent) > len(CASES) // 2
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONHASHSEED": "7"}
    shown = subprocess.run(
        [sys.executable, "-c", SCRIPT], input="\n".join(text for _, text in sent), check=True,
        capture_output=True, text=True, env=environment,
    ).stdout  # fmt: skip
    assert shown.split() == [g.digest() for g, _ in sent]


def calling(function: object, count: int = 1) -> Graph:
    b = Builder()
    x = b.value((integer(4), integer(4)), f32)
    made = LibraryCall("call", function, tuple(map(Operand, range(count))))  # type: ignore[arg-type]
    return b.finish((x,), b.library(made, (x,) * count, ((x.shape, f32),)))


@pytest.mark.parametrize(
    "function",
    [
        torch.ops.aten.sort.stable, operator.neg, FusedAttention(True, None, (0, 2, 1, 3), (1, 8, 2, 4)),
    ],
    ids=["op", "operator", "routine"],
)  # fmt: skip
def test_what_has_a_name_is_written_by_it(function: object) -> None:
    graph = calling(function)
    found, held = again(graph)
    assert not held and found.digest() == graph.digest()


@pytest.mark.parametrize("function", [torch.get_rng_state, eval, os.system, torch.load, calling])
def test_other_functions_are_held(function: object) -> None:
    graph = calling(function)
    found, held = again(graph)
    assert held == [function] and found.digest() == graph.digest()


def test_what_exists_only_here_is_held_and_told_of() -> None:
    m = nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 96)).eval()
    graph = fast(captured(m, [torch.randn(200, 96)]), products())
    data, held = write_graph(graph)
    assert len(held) == 2 and set(data["held"]) <= {"Form", "FusedProduct"}, "whichever a clock prefers"
    assert read_graph(json.loads(json.dumps(data)), held).digest() == graph.digest()
    with pytest.raises(InputError, match="holds 2 objects, 0 are given"):
        read_graph(data)


def test_constants_are_held_as_tensors() -> None:
    graph = captured(nn.Linear(8, 8).eval(), [torch.randn(3, 8)])
    data, held = write_graph(graph)
    assert set(map(str, data["held"])) == {"float32 [8, 8] on cpu", "float32 [8] on cpu"}  # type: ignore[arg-type]
    found = read_graph(data, [torch.zeros_like(t) for t in held if isinstance(t, torch.Tensor)])
    assert found.digest() == graph.digest()  # what constants hold is no program


def test_nonsense_is_refused() -> None:
    data, _ = write_graph(calling(operator.neg))
    with pytest.raises(InputError, match="another version"):
        read_graph({**data, "format": 0})
    for damaged in ({"values": [[0]]}, {"graph": {"is": "Nobody"}}, {"held": 3}, {"expressions": [["add"]]}):
        with pytest.raises(InputError, match="damaged"):
            read_graph({**data, **damaged})
    with pytest.raises(InputError, match="no graph"):
        read_graph({**data, "graph": 3})
    text = json.dumps(data)
    for other in (
        '{"operator": "no such thing"}', '{"operator": "attrgetter"}', '{"operator": "_abs"}',
        '{"operator": "__builtins__"}', '{"function": "builtins:eval"}', '{"function": "torch:os.system"}',
        '{"routine": "builtins:eval"}', '{"routine": "torch:os.system"}', '{"routine": "os:system"}',
        '{"routine": "tilewright.ir.graph:Graph"}', '{"routine": "tilewright.library.fused:Routine"}',
    ):  # fmt: skip
        assert text != text.replace('{"operator": "neg"}', other)
        with pytest.raises(InputError, match="no such function"):
            read_graph(json.loads(text.replace('{"operator": "neg"}', other)))


def test_the_fields_of_a_call_are_kept() -> None:
    graph = calling(operator.neg)
    (op,) = graph.ops
    assert op.call is not None
    changed = replace(graph, ops=(replace(op, call=replace(op.call, places=(0,), reuses=-1)),))
    found, _ = again(changed)
    assert found.digest() == changed.digest() != graph.digest()


def test_a_loop_is_written_by_its_fields() -> None:
    def sums(x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x)
        for _ in range(80):
            h = torch.tanh(h + x)
        return h

    made: list[Graph] = []
    with check_phases(lambda name, state: made.append(state.graph) if name == "select" else None):
        tilewright.compile(sums, (torch.randn(4),))
    (op,) = (op for g in made for op in g.ops if op.call is not None and op.call.loop is not None)
    assert op.call is not None and isinstance(op.call.function, Routine)
    (graph,) = (g for g in made if op in g.ops)
    data, held = write_graph(graph)
    assert '"routine": "tilewright.capture.loops.body:TracedLoop"' in json.dumps(data)
    assert [type(x).__name__ for x in held] == ["GraphModule"]
    assert read_graph(json.loads(json.dumps(data)), held).digest() == graph.digest()
