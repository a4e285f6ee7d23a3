"""Models that are built again from the graph inside: same results, and nothing outside of their tensors."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.artifacts import PREFIX, Saved, mutated, put_together, same_results, taken_apart
from torch import nn

import tilewright
from tilewright.analysis.runtime_checks import inside_of
from tilewright.artifact.file import container
from tilewright.artifact.foreign import harmless
from tilewright.artifact.text.captured import read_captured
from tilewright.artifact.text.tensors import TensorReader
from tilewright.artifact.way import LoadedGraph
from tilewright.capture.harmless.ops import is_safe_op
from tilewright.errors import ArtifactError, InputError
from tilewright.ir.expr import Expr, integer, make
from tilewright.ir.sizes import dims
from tilewright.ir.text.values import find_op
from tilewright.options import Options
from tilewright.pipeline.compiler import compile_graph


def unsealed(data: bytes) -> bytes:
    """The same without a seal."""
    return data[: PREFIX.size - 32] + bytes(32) + data[PREFIX.size :]


@pytest.mark.parametrize("trusted", [True, False])
def test_it_computes_the_same(trusted: bool, small: Saved, tmp_path: Path) -> None:
    """Trusted, but made with another torch; and not trusted."""
    parts = taken_apart(small.data)
    parts.facts["made"]["torch"] = "1.0"
    path = tmp_path / "x.tw"
    path.write_bytes(put_together(parts, sealed=trusted))
    with pytest.raises(ArtifactError, match="torch 1.0|vouches"):
        tilewright.load(path, rebuild=False)
    with pytest.warns(RuntimeWarning, match="torch 1.0, here|vouches"):
        loaded = tilewright.load(path)
    eager = copy.deepcopy(small.model)
    with torch.no_grad():
        for rows in (4, 6):
            x = torch.randn(rows, 8)
            assert same_results(loaded(x), eager(x))


@pytest.mark.parametrize("trusted", [True, False])
def test_time_and_threads_are_those_of_whoever_loads(trusted: bool, small: Saved, tmp_path: Path) -> None:
    """A file that nobody vouches for says what is computed, and not what is spent on it."""
    parts = taken_apart(small.data)
    parts.facts["made"]["torch"] = "1.0"
    parts.facts["options"] |= {"threads": 3, "tune_seconds": 10**9, "pin_threads": True, "trim": "exact"}
    path = tmp_path / "x.tw"
    path.write_bytes(put_together(parts, sealed=trusted))
    with pytest.warns(RuntimeWarning):
        graph = tilewright.load(path).compilations[0]
    assert isinstance(graph, LoadedGraph)
    options = graph.captured().options
    spent = (options.threads, options.tune_seconds, options.pin_threads)
    assert spent == ((3, 10**9, True) if trusted else (None, Options().tune_seconds, False))
    assert options.trim == "exact"


@pytest.mark.parametrize("fact", ["name", "machine", "system", "libraries", "runtime", "tilewright"])
def test_what_differs_is_named(fact: str, small: Saved, tmp_path: Path) -> None:
    parts = taken_apart(small.data)
    of = parts.facts["made"] if fact in parts.facts["made"] else parts.facts["targets"][0]["facts"]
    of[fact] = "aarch64" if fact == "name" else "another"
    (tmp_path / "x.tw").write_bytes(put_together(parts, sealed=True))
    with pytest.raises(ArtifactError, match="aarch64|another"):
        tilewright.load(tmp_path / "x.tw", rebuild=False)


def _programs() -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    x, i = torch.randn(6, 8), torch.randint(0, 6, (5,))
    pad = nn.functional.pad
    return {
        "pads": (lambda x: pad(x, (1, 2, 3, 0)), (x,)),
        "indices": (lambda x, i: x[i], (x, i)),
        "reductions": (lambda x: (x.softmax(0), x.argmax(1), x.cummax(0)[0], x.var(1)), (x,)),
        "views": (lambda x: x.reshape(2, 3, 8).transpose(0, 2).flatten(1), (x,)),
        "sorts": (lambda x: x.sort(0)[0], (x,)),
    }


@pytest.mark.parametrize("name", _programs())
def test_honest_graphs_are_harmless(name: str, tmp_path: Path) -> None:
    """The same graph after all that is not proved was taken out, op by op."""
    program, args = _programs()[name]
    compiled = tilewright.compile(program, args)
    tilewright.save(compiled, tmp_path / "x.tw")
    (tmp_path / "x.tw").write_bytes(unsealed((tmp_path / "x.tw").read_bytes()))
    with pytest.warns(RuntimeWarning, match="built again"):
        loaded = tilewright.load(tmp_path / "x.tw")
    torch.testing.assert_close(loaded(*args), program(*args))


def _graph_of(data: bytes, folder: Path) -> Any:
    """The captured program of a file's bytes."""
    (folder / "x.tw").write_bytes(data)
    file = container.read(folder / "x.tw")
    return read_captured(file, "g0", TensorReader(file, file.text("tensors")), Options.make())


@pytest.fixture(scope="module")
def pointwise(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A saved program of one pointwise op of two tensors."""
    folder = tmp_path_factory.mktemp("pointwise")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE_DIR", str(folder))
        compiled = tilewright.compile(lambda x, y: x * y + 1.0, (torch.randn(4, 4), torch.randn(4, 4)))
        tilewright.save(compiled, folder / "x.tw")
    return unsealed((folder / "x.tw").read_bytes())


def _changed(data: bytes, change: Callable[[list[Any]], object]) -> bytes:
    """With other expressions in the graph."""
    parts = taken_apart(data)
    graph = parts.text("g0.graph")
    change(graph["graph"]["expressions"])
    parts.change_text("g0.graph", graph)
    return put_together(parts)


def _constant(rows: list[Any], value: Any) -> None:
    """Put `value` where the program has 1.0."""
    row = next(r for r in rows if r[0] == "const" and r[1] == "f32")
    row[2] = value


@pytest.mark.parametrize(
    "value", ['1.0f; system("touch ran")', None, {"pair": [1, 2]}, {"slot": "e", "index": 0}, True, 1]
)
def test_constants_are_numbers(value: Any, pointwise: bytes, tmp_path: Path) -> None:
    data = _changed(pointwise, lambda rows: _constant(rows, value))
    with pytest.raises(ArtifactError):
        harmless(_graph_of(data, tmp_path), "here")


@pytest.mark.parametrize("op", ["system", "checked", "implied", "var", "value", "add;", "slot", ""])
def test_operations_are_those_of_the_language(op: str, pointwise: bytes, tmp_path: Path) -> None:
    def change(rows: list[Any]) -> None:
        next(r for r in rows if r[0] == "mul")[0] = op

    with pytest.raises(ArtifactError):
        harmless(_graph_of(_changed(pointwise, change), tmp_path), "here")


def test_places_outside_are_held_inside(pointwise: bytes, tmp_path: Path) -> None:
    """Reads far in front of and behind their tensors: what is built reads inside, and computes something or other."""
    program = _graph_of(pointwise, tmp_path)
    for distance in (1 << 40, -(1 << 40), 1, -1):

        def far(x: Expr, by: int = distance) -> Expr:
            return make("read", (dims.add(x.args[0], integer(by)), *x.args[1:]), x.dtype, x.value)

        ops = [replace(op, expr=op.expr and op.expr.map_reads(far)) for op in program.graph.ops]
        safe = harmless(replace(program, graph=program.graph.with_ops(ops)), "here")
        for op in safe.graph.ops:
            assert op.expr is not None
            for x in op.expr.reads():
                assert isinstance(x.value, int)
                places = zip(x.args, op.inputs[x.value].shape, strict=True)
                assert all(inside_of(i, n) is None for i, n in places)
        runs = compile_graph(safe).executable
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        assert runs([x, y])[0].shape == (4, 4)  # type: ignore[union-attr]


def test_sizes_are_what_inputs_have(small: Saved, tmp_path: Path) -> None:
    """A size that says of itself that it is large is no proof of anything."""
    parts = taken_apart(small.data)
    graph = parts.text("g0.graph")
    symbols = [r[2] for r in graph["graph"]["expressions"] if r[0] == "symbol"]
    assert symbols
    for s in symbols:
        s["low"] = 1000
    parts.change_text("g0.graph", graph)
    (tmp_path / "x.tw").write_bytes(unsealed(put_together(parts)))
    with pytest.warns(RuntimeWarning, match="built again"):
        loaded = tilewright.load(tmp_path / "x.tw")
    with pytest.raises(InputError, match="range"):
        loaded(small.x)


@pytest.mark.parametrize("name", ["s0;", "system(1)", "", "s-1", "x", "s1 ", "S0", "s" + "1" * 50])
def test_names_are_those_of_sizes(name: str, small: Saved, tmp_path: Path) -> None:
    parts = taken_apart(small.data)
    text = parts.body("g0.graph").decode()
    old = next(r[2]["symbol"] for r in parts.text("g0.graph")["graph"]["expressions"] if r[0] == "symbol")
    parts.change("g0.graph", text.replace(json.dumps(old), json.dumps(name)).encode())
    with pytest.raises(ArtifactError):
        harmless(_graph_of(put_together(parts), tmp_path), "here")


@pytest.mark.parametrize(
    "op",
    [
        "aten.from_file.default",
        "aten.resize_.default",
        "aten.set_.source_Storage",
        "aten.add_.Tensor",
        "mkldnn._linear_pointwise.default",
    ],
)
def test_calls_are_of_functional_ops_of_torch(op: str) -> None:
    found = find_op(op)
    assert found is not None and not is_safe_op(found)
    assert is_safe_op(torch.ops.aten.sort.default) and not is_safe_op(print)


def test_mutated_graphs_are_refused_or_harmless(small: Saved, tmp_path: Path) -> None:
    """Whatever a graph says: it is refused in words, or what is left of it obeys the laws of graphs."""
    draw, refused = random.Random(2), 0
    for _ in range(60):
        parts = taken_apart(small.data)
        parts.change_text("g0.graph", mutated(parts.text("g0.graph"), draw))
        try:
            harmless(_graph_of(put_together(parts), tmp_path), "here").graph.verify()
        except ArtifactError:
            refused += 1
    assert refused > 20
