"""Loops that hold a team: threads share out what each step does, without a region for each."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.support.loops import lstm

import tilewright
from tilewright.runtime.cpu import native_plan, pool

pytestmark = pytest.mark.usefixtures("unverified_threads")


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize(("units", "batch"), [(128, 1), (64, 8), (48, 9), (96, 3)])
def test_threads_change_no_bit(tmp_path: Path, units: int, batch: int, direction: str) -> None:
    lstm(tmp_path / "m.onnx", units, batch, direction)
    model = tilewright.compile(tmp_path / "m.onnx")
    x = torch.randn(120, batch, units)
    with torch.no_grad():
        shared = [model(x=x) for _ in range(20)]
        torch.set_num_threads(1)
        alone = model(x=x)
    for each in shared:
        assert all(torch.equal(a, b) for a, b in zip(each, alone, strict=True))


def test_a_loop_is_one_region(tmp_path: Path) -> None:
    lstm(tmp_path / "m.onnx", 64, 8)
    model = tilewright.compile(tmp_path / "m.onnx")
    x = torch.randn(120, 8, 64)
    with torch.no_grad():
        model(x=x)
        threads = pool.running()
        assert threads is not None
        before = threads.regions
        for _ in range(10):
            model(x=x)
    assert threads.regions - before <= 10 * 6, "not one for each of 120 steps"


def test_a_short_loop_wakes_nobody(tmp_path: Path) -> None:
    lstm(tmp_path / "m.onnx", 16, 1)
    model = tilewright.compile(tmp_path / "m.onnx")
    x = torch.randn(12, 1, 16)
    with torch.no_grad():
        model(x=x)
        threads = pool.running()
        assert threads is not None
        before = threads.regions
        for _ in range(10):
            model(x=x)
    assert threads.regions == before


def voice(path: Path) -> None:
    """Two convolutions over lines, a layer whose state comes from outside, and a probability."""
    rng = np.random.default_rng(1)
    make, real = helper.make_node, TensorProto.FLOAT
    held = {
        "k1": rng.standard_normal((64, 1, 16)) / 4, "k2": rng.standard_normal((64, 64, 3)) / 14,
        "w": rng.standard_normal((1, 512, 64)) / 8, "r": rng.standard_normal((1, 512, 128)) / 11,
        "b": rng.standard_normal((1, 1024)),
    }  # fmt: skip
    nodes = [
        make("Conv", ["x", "k1"], ["a"], strides=[8]),
        make("Relu", ["a"], ["b1"]),
        make("Conv", ["b1", "k2"], ["c1"], strides=[2], pads=[1, 1]),
        make("Relu", ["c1"], ["d"]),
        make("Transpose", ["d"], ["t"], perm=[2, 0, 1]),
        make("LSTM", ["t", "w", "r", "b", "", "h", "c"], ["", "hn", "cn"], hidden_size=128),
        make("Sigmoid", ["hn"], ["p"]),
    ]
    inputs = [
        helper.make_tensor_value_info(n, real, shape)
        for n, shape in {"x": [1, 1, 576], "h": [1, 1, 128], "c": [1, 1, 128]}.items()
    ]
    outputs = [onnx.ValueInfoProto(name=n) for n in ("p", "hn", "cn")]
    constants = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in held.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the native calls of joined plans."""
    runs: list[int] = []
    call = native_plan.Joined.__call__

    def counted(self: native_plan.Joined, tensors: list[torch.Tensor | None]) -> None:
        runs.append(1)
        call(self, tensors)

    monkeypatch.setattr(native_plan.Joined, "__call__", counted)
    return runs


def test_joined_steps_give_what_single_ones_give(tmp_path: Path, joins: list[int]) -> None:
    voice(tmp_path / "m.onnx")
    model = tilewright.compile(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    sizes = {"x": (1, 1, 576), "h": (1, 1, 128), "c": (1, 1, 128)}
    given = [{n: torch.randn(s) for n, s in sizes.items()} for _ in range(8)]
    with torch.no_grad():
        made = [model(**x) for x in given]
        assert len(joins) == len(given) - 1, "all but the first"
        again = model(**given[0])
    assert all(torch.equal(a, b) for a, b in zip(made[0], again, strict=True))
    for x, results in zip(given, made, strict=True):  # each has memory of its own
        want = session.run(None, {n: t.numpy() for n, t in x.items()})
        for have, expected in zip(results, want, strict=True):
            torch.testing.assert_close(have, torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [32, 256])
def test_products_are_joined_without_a_loop(joins: list[int], rows: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 80), torch.nn.GELU(), torch.nn.Linear(80, 64)).eval()
    given = [torch.randn(rows, 96) for _ in range(4)]
    with torch.no_grad():
        fast = tilewright.compile(model, (given[0],), options={"freeze": True})
        made = [fast(x) for x in given]
        want = [model(x) for x in given]
    assert "routines of our own" in str(fast.coverage) and "library" not in str(fast.coverage)
    assert len(joins) == len(given) - 2, "all but the first and the first that comes the short way"
    for have, expected in zip(made, want, strict=True):
        torch.testing.assert_close(have, expected, rtol=1e-5, atol=1e-5)


class Parted(torch.nn.Module):
    """Products, a call of the library that no native stage has, and products that read what stands in front of it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((200, 300), (300, 200), (200, 260), (260, 200))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in sizes)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second, third, last = self.layers
        early = second(torch.relu(first(x)))
        late = torch.sort(early, -1)[0]
        return last(torch.relu(third(late))) + early, early


def test_nothing_is_joined_of_sizes_that_do_not_come_again(
    joins: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(96, 80), torch.nn.GELU(), torch.nn.Linear(80, 64)).eval()
    made, finish = list[int](), native_plan.Joined.finish

    def counted(self: native_plan.Joined, *args: object) -> None:
        made.append(1)
        finish(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(native_plan.Joined, "finish", counted)
    with torch.no_grad():
        fast = tilewright.compile(
            model, (torch.randn(32, 96),), dims={"input": {0: "rows"}}, options={"freeze": True}
        )
        for rows in (40, 41, 42, 43, 44):
            given = torch.randn(rows, 96)
            torch.testing.assert_close(fast(given), model(given), rtol=1e-5, atol=1e-5)
        assert not made and not joins
        for _ in range(4):
            given = torch.randn(44, 96)
            torch.testing.assert_close(fast(given), model(given), rtol=1e-5, atol=1e-5)
        assert len(made) == 1 and joins
        for rows in (45, 44, 45, 45):  # memory goes on to other sizes, and what was joined for these does not
            given = torch.randn(rows, 96)
            torch.testing.assert_close(fast(given), model(given), rtol=1e-5, atol=1e-5)


def test_stretches_between_calls_of_the_library_are_joined(joins: list[int]) -> None:
    torch.manual_seed(0)
    model = Parted().eval()
    given = [torch.randn(300, 200) for _ in range(4)]
    with torch.no_grad():
        fast = tilewright.compile(model, (given[0],), options={"freeze": True})
        made = [fast(x) for x in given]
        want = [model(x) for x in given]
    assert len(joins) == 2 * (len(given) - 2), (
        "in front of the sort and behind it, but in the first two calls"
    )
    for results, expected in zip(made, want, strict=True):  # each has memory of its own
        for have, value in zip(cast(tuple[torch.Tensor, ...], results), expected, strict=True):
            torch.testing.assert_close(have, value, rtol=1e-4, atol=1e-4)


def test_what_is_only_written_has_its_address_in_joined_steps(joins: list[int]) -> None:
    """No kernel reads `last`, and the loop gives its value: a copy of bytes alone knows where it lies."""

    def f(x: torch.Tensor, scale: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        h = x[0]
        for t in range(70):
            last = torch.mul(scale, scale, out=last)
            h = torch.tanh(h * last + x[t])
        return h

    compiled = torch.compile(f, backend="tilewright")
    for _ in range(3):
        given, last = (torch.randn(70, 3, 4), torch.randn(4)), torch.zeros(4)
        torch.testing.assert_close(compiled(*given, last), f(*given, torch.zeros(4)))
        assert torch.equal(last, given[1] * given[1])
    assert joins


def test_joined_plans_of_many_sizes_and_callers(tmp_path: Path, joins: list[int]) -> None:
    lstm(tmp_path / "m.onnx", 48, 3)
    model = tilewright.compile(tmp_path / "m.onnx")
    inputs = [torch.randn(n, 3, 48) for n in (7, 30, 7, 64, 30, 5) for _ in range(4)]
    torch.set_num_threads(1)
    with torch.no_grad():
        want = [model(x=x) for x in inputs]
    torch.set_num_threads(2)
    wrong: list[int] = []

    def caller() -> None:
        with torch.no_grad():
            for k, x in enumerate(inputs):
                if not all(torch.equal(a, b) for a, b in zip(model(x=x), want[k], strict=True)):
                    wrong.append(k)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and joins


def test_directions_are_loops_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    stage = native_plan.beside_stage
    monkeypatch.setattr(
        native_plan, "beside_stage", lambda stages: (made.append(len(stages)), stage(stages))[1]
    )
    lstm(tmp_path / "m.onnx", 64, 4, "bidirectional")
    model = tilewright.compile(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        for _ in range(10):
            x = torch.randn(100, 4, 64)
            for have, want in zip(model(x=x), session.run(None, {"x": x.numpy()}), strict=True):
                torch.testing.assert_close(have, torch.from_numpy(want), rtol=1e-5, atol=1e-5)
    assert made == [2]
