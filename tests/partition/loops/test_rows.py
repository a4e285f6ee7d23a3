"""Loops whose rows go their own ways: which they are, and what runs them by parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.loops import lstm
from torch import Tensor, nn

import tilewright
from tilewright.interp.graph import run_graph
from tilewright.ir.dtype import f32, i64
from tilewright.ir.graph import Graph, Loop, Value
from tilewright.ir.sizes import dims
from tilewright.partition.loops.rows import part_of, parts_for, rows_of
from tilewright.pipeline.backends import cpu
from tilewright.runtime.loops import rows as loop_rows
from tilewright.target import preset

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


pytestmark = pytest.mark.usefixtures("unverified_threads")


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Loop, Graph, int | None]]:
    """Loops that are compiled, their bodies and how many rows they are found to have."""
    found: list[tuple[Loop, Graph, int | None]] = []

    def looked(loop: Loop, body: Graph) -> int | None:
        found.append((loop, body, rows_of(loop, body)))
        return found[-1][2]

    monkeypatch.setattr(cpu, "rows_of", looked)
    return found


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts the loops have that are made ready by rows."""
    found: list[int] = []
    stage = loop_rows.RowParts.stage

    def counted(self: loop_rows.RowParts, *places: object) -> object:
        found.append(len(self.parts))
        return stage(self, *places)  # type: ignore[arg-type]

    monkeypatch.setattr(loop_rows.RowParts, "stage", counted)
    return found


class Scanned(nn.Module):
    """A step over the first dim of what it is given."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, h: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.weight

        def step(carried: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.step(carried @ weight, x)

        return torch._higher_order_ops.scan(step, h, xs)


def stacked(change: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        made = 0.3 * change(h, x).tanh()
        return made, made * 2

    return step


GOOD: dict[str, Step] = {
    "cell": stacked(lambda h, x: h + x),
    "slices and a sum of each row": stacked(
        lambda h, x: torch.cat((h[:, 8:], x[:, :8]), 1) + h.sum(1, keepdim=True)
    ),
    "softmax of each row": stacked(lambda h, x: (h + x).softmax(1)),
}
BAD: dict[str, Step] = {
    "softmax over the rows": stacked(lambda h, x: (h + x).softmax(0)),
    "rows from above": stacked(lambda h, x: h.roll(1, 0) + x),
    "rows turned round": stacked(lambda h, x: h.flip(0) + x),
    "the number of a row": stacked(lambda h, x: h + x * torch.arange(8)[:, None]),
    "the first row for all": stacked(lambda h, x: h[:1] + x),
    "running sums over rows": stacked(lambda h, x: h.cumsum(0) + x),
    "rows that are left out": lambda h, x: ((h + x).tanh() * 0.3, h[:4].sum(1)[:, None] + x[:4]),
    "a stack that is turned": lambda h, x: ((h + x).tanh() * 0.3, (h + x).mT.contiguous()),
}


def given() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 16), torch.randn(700, 8, 16)


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_rows_are_found_where_each_is_made_of_itself(
    name: str, bodies: list[tuple[Loop, Graph, int | None]], by_rows: list[int]
) -> None:
    model, inputs = Scanned((GOOD | BAD)[name]).eval(), given()
    with torch.no_grad():
        compiled = tilewright.compile(model, inputs)
        made = [compiled(*inputs) for _ in range(3)]
        wanted = model(*inputs)
    assert [rows for _, _, rows in bodies][:1] == [8 if name in GOOD else None]
    assert bool(by_rows) == (name in GOOD)
    for each in made:
        for ours, theirs in zip(each, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def sixteenths(shape: list[int]) -> Tensor:
    """Random numbers of which sums of 16 products are exact in singles, whatever their order.

    A library's product of 3 rows may add in another order than that of 8, as on machines without AVX-512:
    multiples of 1/16 below 8 are 7 bits, their products 14, and sums of 16 of these 18 of the 24.
    """
    return (16 * torch.randn(shape).clamp(-7, 7)).round() / 16


@pytest.mark.parametrize("name", list(GOOD))
def test_a_part_makes_the_rows_that_the_whole_makes(
    name: str, bodies: list[tuple[Loop, Graph, int | None]]
) -> None:
    with torch.no_grad():
        tilewright.compile(Scanned(GOOD[name]).eval(), given())
    loop, body, rows = bodies[0]
    assert rows == 8
    part = part_of(loop, body, 3)
    part.verify()
    tensors = [v for v in body.inputs if isinstance(v, Value)]
    own = tensors[1 : 1 + loop.carried + loop.sliced]
    values = {v: sixteenths([int(n.value) for n in v.shape]) for v in tensors[1:]}  # type: ignore[arg-type]
    whole = [torch.zeros((), dtype=torch.int64), *values.values()]
    first = [values[v][2:5] if v in own else x for v, x in zip(tensors, whole, strict=True)]
    for ours, all_rows in zip(run_graph(part, first), run_graph(body, whole), strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(all_rows)[2:5], rtol=0, atol=0)


@pytest.mark.parametrize("batch", [8, 16])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_parts_change_no_bit(
    tmp_path: Path, direction: str, batch: int, by_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lstm(tmp_path / "m.onnx", 64, batch, direction)
    x = torch.randn(120, batch, 64)
    with torch.no_grad():
        parts = tilewright.compile(tmp_path / "m.onnx")
        made = [parts(x=x * s) for s in (1, 2, 3)]
        assert by_rows
        assert set(by_rows) == {2}
        monkeypatch.setattr(cpu, "rows_of", lambda *_: None)
        whole = tilewright.compile(tmp_path / "m.onnx")
        for s, each in zip((1, 2, 3), made, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(each, whole(x=x * s), strict=True))


def test_other_numbers_of_steps_and_threads(tmp_path: Path) -> None:
    lstm(tmp_path / "m.onnx", 64, 8, "reverse")
    model = tilewright.compile(tmp_path / "m.onnx")
    with torch.no_grad():
        for steps in (120, 3, 200, 1):
            x = torch.randn(steps, 8, 64)
            torch.set_num_threads(2)
            made = [model(x=x) for _ in range(3)]
            torch.set_num_threads(1)
            alone = model(x=x)
            assert all(torch.equal(a, b) for each in made for a, b in zip(each, alone, strict=True))


def test_parts_are_equal_and_not_too_small() -> None:
    body, target = Graph((), (), ()), preset("x86-64-v4")
    loop = Loop(body, None, 0, 0, 0)
    assert target.loop_rows == 4
    parts = lambda rows, threads: parts_for(loop, body, rows, threads, target)  # noqa: E731
    assert [parts(rows, 2) for rows in (1, 4, 6, 8, 9, 32)] == [1, 1, 1, 2, 1, 2]
    assert [parts(rows, 16) for rows in (8, 12, 32, 96, 97)] == [2, 3, 8, 16, 1]
    assert parts(64, 1) == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_no_cache_holds_are_read_by_all_threads_together(frozen: bool) -> None:
    counter = Value(0, (), i64)

    def parts(columns: int) -> int:
        weight = Value(1, (dims.integer(1024), dims.integer(columns)), f32)
        held = {weight: torch.zeros(1024, columns)} if frozen else {}
        body = Graph((counter,) if frozen else (counter, weight), (), (), constants=held)
        return parts_for(Loop(body, None, 0, 0, 0), body, 32, 2, preset("x86-64-v4"))

    assert [parts(256), parts(257)] == [2, 1]


def test_results_that_are_one_value(by_rows: list[int]) -> None:
    """What a step stacks twice, once for the caller and once for the backward pass, say."""

    def gated(a: Tensor, x: Tensor, h: Tensor) -> Tensor:
        made: list[Tensor] = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            made.append(h)
        return torch.stack(made, 1)

    found: list[list[Tensor]] = []
    inputs = [torch.rand(8, 80, 256), torch.randn(8, 80, 256), torch.randn(8, 256)]
    for f in (torch.compile(gated, backend="tilewright"), gated):
        given = [t.clone().requires_grad_() for t in inputs]
        made = f(*given)
        found.append([made.detach(), *torch.autograd.grad(made.square().sum(), given)])
    assert by_rows
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
