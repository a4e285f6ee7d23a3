"""Loops replayed some steps at a time. What a GPU does from a graph, a recorder here does by running it again."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.loops import check, feed, loop
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import tilewright
from tilewright.options import Options
from tilewright.pipeline.backends import cpu, cuda
from tilewright.target import Target

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Again:
    """Records by keeping the function; counts what it recorded and replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.captures, self.checked = True, False

        self.stream: int | None = 1
        self.asked: list[int] = []

    def ready(self, before: int) -> int | None:
        self.asked.append(before)
        return self.stream

    def rehearsal(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng([])

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Generator[Again]:
    """Loops that run through graphs."""
    made = Again()

    monkeypatch.setattr(cpu.CpuBackend, "loop_runner", cuda.CudaBackend.loop_runner)
    monkeypatch.setattr(cuda, "recorder", lambda unit, ordinal: made)
    tilewright.reset()
    yield made
    tilewright.reset()


def walked(x: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    def step(h: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(part + h @ w)
        return h, h * 2

    return scan(step, h, x)


def test_a_few_graphs_serve_every_number_of_steps(again: Again) -> None:
    compiled = torch.compile(walked, backend="tilewright", dynamic=True)
    w = torch.randn(16, 16) / 4
    with torch.no_grad():
        for n in (80, 80, 7, 300, 5, 127):
            x, h = torch.randn(n, 3, 16), torch.randn(3, 16)
            torch.testing.assert_close(compiled(x, h, w), walked(x, h, w))
    assert again.recorded == 7  # 1, 2, 4, .. 64 steps
    assert again.replayed == 2 + 3 + (4 + 3) + 2 + 7


@pytest.mark.parametrize("trips", ["size", "none"])
def test_steps_behind_the_end_change_nothing(trips: str, again: Again, tmp_path: Path) -> None:
    check(loop("data", trips), tmp_path / "m.onnx", *(feed(90) for _ in range(6)))
    assert again.replayed >= 5


def test_random_numbers_are_those_of_eager_at_each_call(again: Again) -> None:
    """What runs once before it is recorded draws numbers that nobody sees."""

    def disturbed(h: Tensor) -> Tensor:
        for _ in range(80):
            h = torch.dropout(torch.tanh(h), 0.3, True) + 0.1 * torch.rand_like(h)
        return h

    found: list[list[Tensor]] = []
    compiled = torch.compile(disturbed, backend="tilewright")
    with torch.no_grad():
        for f in (compiled, disturbed):
            torch.manual_seed(5)
            found.append([*(f(torch.ones(3, 8)) for _ in range(4)), torch.rand(4)])
    torch.testing.assert_close(found[0], found[1])
    assert again.replayed >= 2


def test_both_directions(again: Again) -> None:
    module = torch.nn.GRU(4, 8, bidirectional=True)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(module, backend="tilewright")
        with torch.no_grad():
            for _ in range(3):
                x = torch.randn(100, 2, 4)
                torch.testing.assert_close(compiled(x), module(x))
    assert again.recorded == 2 and again.replayed == 2 * 2


def test_carried_values_may_change_places(again: Again) -> None:
    def swapped(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def goes(i: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return i < 7

        def step(i: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return i + 1, b.clone(), a * 1.5

        return while_loop(goes, step, (torch.tensor(0), a, b))

    compiled = torch.compile(swapped, backend="tilewright")
    with torch.no_grad():
        for _ in range(3):
            a, b = torch.randn(3), torch.randn(3)
            torch.testing.assert_close(compiled(a, b), swapped(a, b))
    assert again.replayed >= 2 * 3  # 1, 2 and 4 steps, twice


def test_what_moves_is_copied_and_what_stays_is_read_in_place(again: Again) -> None:
    class Held(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return scan(lambda h, part: (h @ w + part, h.sum()), torch.zeros(2, 8), x)[1]

    compiled = tilewright.compile(Held(), (torch.randn(6, 2, 8), torch.randn(8, 8)))
    first = torch.randn(8, 8) / 3
    for k in range(7):
        w = first if k < 3 else torch.randn(8, 8) / 3
        first[0, 0] = k  # written in place: read at the next call
        x = torch.randn(6, 2, 8)
        torch.testing.assert_close(compiled(x, w), Held()(x, w))
    assert again.recorded == 2  # and again once w has moved


def test_a_device_that_refuses_costs_nothing_but_speed(again: Again, tmp_path: Path) -> None:
    again.captures = False
    check(loop("none", "size"), tmp_path / "m.onnx", *(feed(n) for n in (80, 80, 7)))
    assert again.recorded == again.replayed == 0


def test_what_could_find_a_bad_index_behind_the_end_runs_step_by_step(again: Again) -> None:
    table = torch.randn(10, 4)
    again.checked = True

    def looked(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, x + table.index_select(0, i.reshape(1))[0]

        return while_loop(lambda i, x: i < 10, step, (i, x))

    compiled = torch.compile(looked, backend="tilewright")
    with torch.no_grad():
        for _ in range(3):
            i, x = torch.tensor(2), torch.randn(4)
            torch.testing.assert_close(compiled(i, x), looked(i, x))
    assert again.replayed == 0


def test_each_set_of_sizes_waits_for_the_stream_that_used_its_memory(again: Again) -> None:
    """Not for the one that the loop used last with other sizes; and nothing runs while the caller captures."""
    compiled = torch.compile(walked, backend="tilewright", dynamic=True)
    w = torch.randn(16, 16) / 4
    with torch.no_grad():
        for batch, stream in ((3, 1), (3, 1), (5, 2), (5, 2), (3, 2), (3, 1), (3, None)):
            again.stream = stream
            x, h = torch.randn(4, batch, 16), torch.randn(batch, 16)
            torch.testing.assert_close(compiled(x, h, w), walked(x, h, w))
    assert again.asked[1:] == [-1, -1, -1, 1, 2, 1]
    assert again.replayed == 4


def drifting(x: Tensor, h: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two carried values that change places now and then, two sliced ones, one that is the same; what is carried is
    stacked as well."""
    g = h.flip(0)
    hs: list[Tensor] = []
    sums: list[Tensor] = []
    for t in range(x.shape[0]):
        h, g = g * k + x[t], (h - t) * 0.5
        hs.append(h)
        sums.append((h + g).amax(-1))
    return torch.stack(hs), torch.stack(sums, 1), h, g


@pytest.fixture(params=[1, 4, 16])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many steps are one body."""
    target = cpu.CpuBackend.target
    count = request.param

    def machine(self: cpu.CpuBackend, device: str, options: Options) -> Target:
        return replace(target(self, device, options), loop_steps=count)

    monkeypatch.setattr(cpu.CpuBackend, "target", machine)
    return count


def test_several_steps_are_one_body(again: Again, together: int) -> None:
    compiled = torch.compile(drifting, backend="tilewright", dynamic=False)
    with torch.no_grad():
        for _ in range(4):
            x, h, k = torch.randn(102, 3, 8), torch.randn(3, 8), torch.rand(8)
            torch.testing.assert_close(compiled(x, h, k), drifting(x, h, k))
    assert again.recorded == 1 and again.replayed == 3
    (made,) = tilewright.compilations()
    assert len(made.kernels) > (3 if together > 1 else 0)
    assert str(made).count("tilewright_loop") == 1


def test_several_steps_backwards_and_in_one_call(again: Again, together: int) -> None:
    """Also where the device cannot record: then from Python, a few at once."""

    def back(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return scan(lambda h, part: (h * 0.5 + part, (h + part).sum(-1)), h, x, reverse=True)

    compiled = torch.compile(back, backend="tilewright", dynamic=True)
    with torch.no_grad():
        for n in (70, 70, 35, 35, 3, 1):
            x, h = torch.randn(n, 2, 6), torch.randn(2, 6)
            torch.testing.assert_close(compiled(x, h), back(x, h))
            again.captures = n != 35
