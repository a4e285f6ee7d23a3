"""Graphs that somebody else has written, to crash, to hang, to fill the memory or to reach outside: what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.artifacts import PREFIX, Parts, put_together, taken_apart

import tilewright
from tilewright.artifact.file import container
from tilewright.artifact.foreign import harmless, harmless_interface
from tilewright.artifact.text.captured import read_captured
from tilewright.artifact.text.program import read_interface
from tilewright.artifact.text.routines import no_routines
from tilewright.artifact.text.tensors import TensorReader
from tilewright.capture.harmless.ops import is_safe_op
from tilewright.errors import ArtifactError
from tilewright.ir.text.values import find_op
from tilewright.options import Options

Rows = list[list[Any]]
Change = Callable[[dict[str, Any], Rows], object]


@pytest.fixture(scope="module")
def pointwise(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A saved program of two ops of two tensors."""
    folder = tmp_path_factory.mktemp("pointwise")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE_DIR", str(folder))
        compiled = tilewright.compile(lambda x, y: x * y + 1.0, (torch.randn(4, 4), torch.randn(4, 4)))
        tilewright.save(compiled, folder / "x.tw")
    data = (folder / "x.tw").read_bytes()
    return data[: PREFIX.size - 32] + bytes(32) + data[PREFIX.size :]


def _refused(parts: Parts, folder: Path) -> str:
    """What is said of a file when its graph is read and made harmless; fails if nothing is."""
    (folder / "x.tw").write_bytes(put_together(parts))
    file = container.read(folder / "x.tw")
    tensors = TensorReader(file, file.text("tensors"))
    with pytest.raises(ArtifactError) as caught:
        interface = read_interface(file.text("g0.call"), tensors, no_routines(), "here")
        program = harmless(read_captured(file, "g0", tensors, Options.make()), "here")
        harmless_interface(interface, program.graph, "here")
    return str(caught.value)


def _changed(data: bytes, change: Change) -> Parts:
    """With another graph, whose expressions are given apart."""
    parts = taken_apart(data)
    told = parts.text("g0.graph")
    change(told["graph"]["graph"], told["graph"]["expressions"])
    parts.change_text("g0.graph", told)
    return parts


def _body(graph: dict[str, Any], row: int) -> None:
    """Let the first op compute the expression of a row."""
    graph["ops"]["tuple"][0]["expr"]["body"] = {"tuple": [{"expression": row}]}


def _constant(value: Any) -> Change:
    def change(graph: dict[str, Any], rows: Rows) -> None:
        next(r for r in rows if r[0] == "const" and r[1] == "f32")[2] = value

    return change


def _many(op: str, count: int, *, twice: bool) -> Change:
    """An op of its own result again and again, from the product of the two tensors on."""

    def change(graph: dict[str, Any], rows: Rows) -> None:
        last = next(k for k, r in enumerate(rows) if r[0] == "mul" and r[1] == "f32")
        for _ in range(count):
            rows.append([op, "f32", None, [last, last] if twice else [last]])
            last = len(rows) - 1
        _body(graph, last)

    return change


def _argument(value: Any) -> Change:
    def change(graph: dict[str, Any], rows: Rows) -> None:
        graph["origins"]["tuple"][0]["call"]["args"]["tuple"].append(value)

    return change


def _field(name: str, value: Any) -> Change:
    return lambda graph, rows: graph.__setitem__(name, value)


def _step(field: str, value: int) -> Change:
    """Another step from row to row of what is taken or given."""

    def change(graph: dict[str, Any], rows: Rows) -> None:
        rows.append(["const", "i64", value, []])
        given = graph["layouts"]["mapping"][0][1] if field == "layouts" else graph[field]["tuple"][0]
        given["strides"]["tuple"][0] = {"expression": len(rows) - 1}

    return change


_CASES: dict[str, Change] = {
    "a ratio by nothing": _constant({"fraction": "1/0"}),
    "a ratio of a billion digits": _constant({"fraction": "1e1000000000"}),
    "a ratio beyond floats": _constant({"fraction": "1" * 1000 + "/3"}),
    "a tree of 2^60 parts": _many("add", 60, twice=True),
    "a chain of 20000 parts": _many("neg", 20000, twice=False),
    "a chain too deep": _many("neg", 3000, twice=False),
    "a device": _argument({"device": "banana"}),
    "inputs": _field("inputs", 5),
    "ops": _field("ops", {"tuple": [5]}),
    "writes": _field("writes", {"tuple": [5]}),
    "a row of the future": lambda graph, rows: rows[0].__setitem__(3, [-1]),
    "steps backwards": _step("layouts", -4),
    "results backwards": _step("returned", -4),
    "steps without end": _step("layouts", 1 << 62),
}


@pytest.mark.parametrize("name", _CASES)
def test_graphs_are_refused_in_words(name: str, pointwise: bytes, tmp_path: Path) -> None:
    _refused(_changed(pointwise, _CASES[name]), tmp_path)


def test_tensors_take_no_more_memory_than_the_file_has(pointwise: bytes, tmp_path: Path) -> None:
    """One element is told as 2^34 of them."""

    def change(graph: dict[str, Any], rows: Rows) -> None:
        rows.append(["const", "i64", 1 << 17, []])
        graph["constants"] = {"mapping": [[{"value": 4}, {"held": 0}]]}

    parts = _changed(pointwise, change)
    told = parts.text("g0.graph")
    size = {"expression": len(told["graph"]["expressions"]) - 1}
    told["graph"]["values"].append([9, {"tuple": [size, size]}, {"type": "f32"}])
    told["held"], told["graph"]["held"] = [0], ["f32"]
    parts.change_text("g0.graph", told)
    parts.rows.append(["tensor", "t0", 0, 4, hashlib.sha256(bytes(4)).hexdigest(), False])
    parts.bodies.append(bytes(4))
    parts.change_text("tensors", [["t0", "f32", [1 << 17, 1 << 17], [0, 0]]])
    assert "larger than" in _refused(parts, tmp_path)


@pytest.mark.parametrize(
    "rows",
    [
        [["symbol", "i64", {"symbol": "s0) + system(1", "low": 0, "high": None}, []]],
        [["const", "i64", 1, []]],
        [["read", "bool", 0, []]],
        [["system", "bool", None, []]],
    ],
)
def test_conditions_are_of_sizes_alone(rows: Rows, pointwise: bytes, tmp_path: Path) -> None:
    parts = taken_apart(pointwise)
    told = parts.text("g0.call")
    told["expressions"], told["conditions"] = rows, {"tuple": [{"expression": 0}]}
    parts.change_text("g0.call", told)
    _refused(parts, tmp_path)


@pytest.mark.parametrize(
    "op",
    [
        "aten.max_pool2d_with_indices_backward.default", "aten.adaptive_max_pool2d_backward.default",
        "aten.adaptive_max_pool3d_backward.default", "aten.max_pool3d_with_indices_backward.default",
        "aten.segment_reduce.default", "aten.ctc_loss.IntList", "aten.sparse_coo_tensor.indices_size",
        "aten.mkldnn_rnn_layer.default", "aten._reshape_alias.default", "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit_no_training.default", "aten.remainder.int", "aten.floordiv.int",
        "aten.manual_seed.default", "aten.set_grad_enabled.default", "aten.backward.default",
        "aten.factorial.int", "aten.zfill.default", "aten.as_strided.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.empty.memory_format",
    ],
)  # fmt: skip
def test_calls_are_of_ops_that_look_at_what_they_are_given(op: str) -> None:
    """By their schemas these write into nothing. Some crash a process (a signal was seen), some take operands that do
    not fit without a word, some write into operands, and some are TorchScript's: numbers, texts, seeds and modes."""
    found = find_op(op)
    assert found is not None and not is_safe_op(found)


def test_ops_that_address_storages_need_one_of_their_own() -> None:
    found = find_op("aten.as_strided.default")
    assert is_safe_op(found, apart=True) and not is_safe_op(found)


def test_titles_are_plain_text(pointwise: bytes, tmp_path: Path) -> None:
    parts = taken_apart(pointwise)
    parts.facts["title"] = "\ud800\n\x1b[31mX"
    (tmp_path / "x.tw").write_bytes(put_together(parts))
    with pytest.warns(RuntimeWarning, match="built again"):
        loaded = tilewright.load(tmp_path / "x.tw")
    assert repr(loaded).isprintable() and repr(loaded).encode()


def _line(cache: torch.Tensor, at: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(1, at, x * 2)
    return cache.sum(0)


@pytest.mark.parametrize("sealed", [True, False])
def test_lines_that_data_place_are_kept(sealed: bool, tmp_path: Path) -> None:
    """A cache that is written where data say, by its own machine code and built again; no place outside is written."""
    args = (torch.randn(2, 9, 4), torch.tensor([3]), torch.randn(2, 1, 4))
    compiled = tilewright.compile(_line, tuple(t.clone() for t in args))
    path = tmp_path / "x.tw"
    tilewright.save(compiled, path)
    if not sealed:
        data = path.read_bytes()
        path.write_bytes(data[: PREFIX.size - 32] + bytes(32) + data[PREFIX.size :])
    if sealed:
        loaded = tilewright.load(path, rebuild=False)
    else:
        with pytest.warns(RuntimeWarning, match="built again"):
            loaded = tilewright.load(path)
    got, want = [t.clone() for t in args], [t.clone() for t in args]
    torch.testing.assert_close(loaded(*got), _line(*want))
    torch.testing.assert_close(got, want)
    with pytest.raises(IndexError):
        loaded(got[0], torch.tensor([9]), got[2])
    torch.testing.assert_close(got, want)
