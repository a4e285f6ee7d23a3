"""Loops in files: kept with the plan of a step, built again from the graph, and harmless whoever wrote them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.artifact.conftest import put_key
from tests.support.artifacts import PREFIX, Parts, mutated, put_together, taken_apart
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

import tilewright
from tilewright.artifact.file import container
from tilewright.artifact.foreign import harmless
from tilewright.artifact.text.captured import read_captured
from tilewright.artifact.text.tensors import TensorReader
from tilewright.errors import ArtifactError, TilewrightError, UnsupportedError
from tilewright.options import Options


class Doubles(nn.Module):
    """Data end it."""

    def forward(self, n: Tensor, x: Tensor) -> Any:
        return while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, x * 2), (n, x))


class Steps(nn.Module):
    """Many equal steps, each with a part of the input, and a result of each."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        made: list[Tensor] = []
        for t in range(x.shape[1]):
            h = torch.tanh(self.turn(h) + x[:, t])
            made.append(h)
        return torch.stack(made, 1)


class Recurrent(nn.Module):
    """Both directions of torch's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 5, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def _unsealed(data: bytes) -> bytes:
    return data[: PREFIX.size - 32] + bytes(32) + data[PREFIX.size :]


def _file(model: nn.Module, args: tuple[Tensor, ...], folder: Path, **given: Any) -> bytes:
    with torch.no_grad():
        tilewright.save(tilewright.compile(model.eval(), args, **given), folder / "x.tw")
    return (folder / "x.tw").read_bytes()


def _has_loop(data: bytes) -> bool:
    return any(".loop0" in name for name in taken_apart(data).names())


def _check(model: nn.Module, data: bytes, folder: Path, *calls: tuple[Tensor, ...]) -> None:
    """The file by its own code, and built again as one of somebody else."""
    (folder / "x.tw").write_bytes(data)
    (folder / "y.tw").write_bytes(_unsealed(data))
    ours = tilewright.load(folder / "x.tw", rebuild=False)
    with pytest.warns(RuntimeWarning, match="built again"):
        again = tilewright.load(folder / "y.tw")
    for args in calls:
        with torch.no_grad():
            wanted = model(*args)
            for loaded in (ours, again, ours.way.eager()):  # pyright: ignore[reportAttributeAccessIssue]
                torch.testing.assert_close(loaded(*args), wanted)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, bytes]:
    """The many steps, saved."""
    folder = tmp_path_factory.mktemp("steps")
    torch.manual_seed(0)
    model = Steps()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE_DIR", str(folder))
        patch.setenv("TILEWRIGHT_MEASURE", "0")
        put_key()
        return model, _file(model, (torch.randn(2, 70, 4),), folder, dims={"x": {0: "batch"}})


def test_many_steps_are_kept_as_a_loop(steps: tuple[nn.Module, bytes], tmp_path: Path) -> None:
    model, data = steps
    assert _has_loop(data)
    _check(model, data, tmp_path, (torch.randn(3, 70, 4),), (torch.randn(2, 70, 4),))


def test_loops_that_data_end_are_kept(tmp_path: Path) -> None:
    model, args = Doubles(), (torch.tensor(5), torch.randn(2, 3))
    tilewright.save(tilewright.compile(torch.export.export(model, args)), tmp_path / "x.tw")
    data = (tmp_path / "x.tw").read_bytes()
    assert _has_loop(data)
    _check(model, data, tmp_path, args, (torch.tensor(0), torch.randn(2, 3)), (torch.tensor(70), args[1]))


def test_recurrent_layers_are_kept_as_loops(tmp_path: Path) -> None:
    model = Recurrent()
    data = _file(model, (torch.randn(2, 70, 4),), tmp_path)
    assert _has_loop(data) and len(data) < 1 << 20
    _check(model, data, tmp_path, (torch.randn(2, 70, 4),))


def _graph_changed(
    data: bytes, change: Callable[[dict[str, Any], dict[str, Any], list[Any]], object]
) -> Parts:
    """With another call of its loop: the op, its loop, and the expressions."""
    parts = taken_apart(data)
    told = parts.text("g0.graph")
    ops = told["graph"]["graph"]["ops"]["tuple"]
    op = next(o for o in ops if o["call"] is not None and o["call"].get("loop"))
    change(op["call"], op["call"]["loop"], told["graph"]["expressions"])
    parts.change_text("g0.graph", told)
    return parts


def _row(rows: list[Any], number: int) -> dict[str, int]:
    rows.append(["const", "i64", number, []])
    return {"expression": len(rows) - 1}


_LIES: dict[str, Callable[[dict[str, Any], dict[str, Any], list[Any]], object]] = {
    "more steps than there are slices": lambda call, loop, rows: loop.update(steps=_row(rows, 71)),
    "no end": lambda call, loop, rows: loop.update(steps=None),
    "data end it": lambda call, loop, rows: loop.update(conditional=True, carried=0),
    "a carried value less": lambda call, loop, rows: loop.update(carried=0),
    "more slices": lambda call, loop, rows: loop.update(sliced=2),
    "a negative count": lambda call, loop, rows: loop.update(stacked=-1),
    "a gate": lambda call, loop, rows: loop.update(gated=True),
    "no counter": lambda call, loop, rows: loop["body"]["inputs"]["tuple"].pop(0),
    "other processes": lambda call, loop, rows: call.update(group="x") or call.update(loop=None),
    "no loop": lambda call, loop, rows: call.update(loop=None),
    "a body of ops that are none": lambda call, loop, rows: loop["body"].update(ops={"tuple": [5]}),
    "a step that writes": lambda call, loop, rows: loop["body"].update(
        writes={"tuple": [{"is": "Write", "input": 1, "value": loop["body"]["inputs"]["tuple"][1]}]}
    ),
}


@pytest.mark.parametrize("lie", _LIES)
def test_loops_that_would_reach_outside_are_refused(
    lie: str, steps: tuple[nn.Module, bytes], tmp_path: Path
) -> None:
    (tmp_path / "x.tw").write_bytes(put_together(_graph_changed(steps[1], _LIES[lie])))
    file = container.read(tmp_path / "x.tw")
    with pytest.raises(ArtifactError):
        tensors = TensorReader(file, file.text("tensors"))
        harmless(read_captured(file, "g0", tensors, Options.make()), "here")


def test_what_a_loop_says_of_its_call_is_not_believed(steps: tuple[nn.Module, bytes], tmp_path: Path) -> None:
    """Other steps in the call than in the loop, promises of strides, and of where steps find what they read."""

    def change(call: dict[str, Any], loop: dict[str, Any], rows: list[Any]) -> None:
        call["args"]["tuple"][0] = _row(rows, 1 << 40)
        call["pure"], call["reuses"] = True, 0
        for pair in loop["body"]["layouts"]["mapping"]:
            strides = pair[1]["strides"]["tuple"]
            strides[:] = [_row(rows, 1 << 20) for _ in strides]

    (tmp_path / "x.tw").write_bytes(put_together(_graph_changed(steps[1], change)))
    with pytest.warns(RuntimeWarning, match="built again"):
        loaded = tilewright.load(tmp_path / "x.tw")
    x = torch.randn(2, 70, 4)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), steps[0](x))


@pytest.mark.parametrize("section", ["g0.plan", "weights"])
def test_sections_that_say_something_else_are_refused(
    section: str, steps: tuple[nn.Module, bytes], tmp_path: Path
) -> None:
    """With right hashes and a right seal. Not run: what a user seals, runs."""
    draw, refused = random.Random(2), 0
    names = [n for n in taken_apart(steps[1]).names() if n.startswith(section)]
    for k in range(40):
        parts = taken_apart(steps[1])
        name = next(n for n in names if ("loop" in n) == (k % 4 > 0)) if section == "g0.plan" else section
        parts.change_text(name, mutated(parts.text(name), draw))
        (tmp_path / "x.tw").write_bytes(put_together(parts, sealed=True))
        try:
            tilewright.load(tmp_path / "x.tw", rebuild=False)
        except ArtifactError:
            refused += 1
    assert refused >= 10


def test_a_loop_inside_itself_is_refused(steps: tuple[nn.Module, bytes], tmp_path: Path) -> None:
    parts = taken_apart(steps[1])
    name = next(n for n in parts.names() if n.endswith("loop0"))
    outer = parts.text(name.removesuffix(".loop0"))
    told = parts.text(name)
    told["body"]["plan"] = outer
    parts.change_text(name, told)
    (tmp_path / "x.tw").write_bytes(put_together(parts, sealed=True))
    with pytest.raises(ArtifactError, match="inside itself|other"):
        tilewright.load(tmp_path / "x.tw", rebuild=False)


@pytest.mark.parametrize("seed", range(2))
def test_changed_graphs_are_refused_or_run_harmlessly(
    seed: int, steps: tuple[nn.Module, bytes], tmp_path: Path
) -> None:
    draw = random.Random(seed)
    x = torch.randn(2, 70, 4)
    for _ in range(15):

        def change(call: dict[str, Any], loop: dict[str, Any], rows: list[Any]) -> None:
            made = mutated(loop, draw)
            loop.clear()
            loop.update(made)

        (tmp_path / "x.tw").write_bytes(put_together(_graph_changed(steps[1], change)))
        file = container.read(tmp_path / "x.tw")
        try:
            program = read_captured(file, "g0", TensorReader(file, file.text("tensors")), Options.make())
            harmless(program, "here").graph.verify()
        except ArtifactError:
            continue
        with torch.no_grad(), pytest.warns(RuntimeWarning, match="built again"):
            try:
                tilewright.load(tmp_path / "x.tw")(x)
            except (TilewrightError, RuntimeError, IndexError):
                continue


def test_loops_of_gpus_are_refused_in_words(steps: tuple[nn.Module, bytes], tmp_path: Path) -> None:
    model = Steps().eval()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="loop"):
        compiled = tilewright.compile(model, (torch.randn(2, 70, 4),))
        tilewright.save(compiled, tmp_path / "x.tw", targets=["sm_90"])
