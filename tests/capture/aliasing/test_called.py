"""Calls whose inputs lie together in memory in another way than compiled for, which torch does not guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import InputError

Cut = Callable[[Tensor], tuple[Tensor, ...]]
Program = Callable[..., Any]


def write_and_read(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    return b * 2


def write_both(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    b.add_(1)
    return a - b


def by_backend(f: Program) -> Program:
    return torch.compile(f, backend="tilewright")


def by_door(f: Program) -> Program:
    return tilewright.compile(f)


def apart(m: Tensor) -> tuple[Tensor, ...]:
    return m[:-1].clone(), m[:-1].clone()


def down(m: Tensor) -> tuple[Tensor, ...]:
    return m[1:], m[:-1]


def up(m: Tensor) -> tuple[Tensor, ...]:
    return m[:-1], m[1:]


def parts(m: Tensor) -> tuple[Tensor, ...]:
    return m[:-1, :2], m[1:, 2:]


def shifted(m: Tensor) -> tuple[Tensor, ...]:
    return m[:-1, :2], m[1:, 1:3]


def turned(m: Tensor) -> tuple[Tensor, ...]:
    return m[:4], m.t()[:, :4].t()


def one_of_another(m: Tensor) -> tuple[Tensor, ...]:
    other = m.clone()
    return other[1:], other[:-1]


def in_more_memory(m: Tensor) -> tuple[Tensor, ...]:
    more = torch.cat([m, m])
    return more[1 : len(m)], more[: len(m) - 1]


WAYS = [(apart, down), (apart, up), (down, apart), (down, up), (up, down), (parts, shifted), (down, in_more_memory),
        (apart, one_of_another), (down, one_of_another), (parts, down), (apart, turned)]  # fmt: skip


def grid() -> Tensor:
    return torch.arange(20.0).view(5, 4) / 7


def checked(f: Program, run: Program, cut: Cut) -> None:
    ours, eager = grid(), grid()
    given, plain = cut(ours), cut(eager)
    torch.testing.assert_close(run(*given), f(*plain))
    torch.testing.assert_close((ours, *given), (eager, *plain))


@pytest.mark.filterwarnings("ignore:a program was called:RuntimeWarning")
@pytest.mark.parametrize("compiled", [by_backend, by_door])
@pytest.mark.parametrize("f", [write_and_read, write_both])
@pytest.mark.parametrize(("first", "then"), WAYS)
def test_what_eager_mode_writes_and_gives(
    compiled: Callable[[Program], Program], f: Program, first: Cut, then: Cut
) -> None:
    tilewright.reset()
    run = compiled(f)
    for cut in (first, first, then, first):
        checked(f, run, cut)


@pytest.mark.parametrize("cut", [apart, down, parts])
def test_calls_that_lie_as_compiled_for_stay_compiled(cut: Cut) -> None:
    tilewright.reset()
    run = by_backend(write_and_read)
    for _ in range(2):
        checked(write_and_read, run, cut)
    assert tilewright.stats().fallbacks == 0 and tilewright.stats().graphs == 1


def test_with_free_sizes_they_stay_compiled_too() -> None:
    tilewright.reset()
    run = torch.compile(write_and_read, backend="tilewright", dynamic=True)
    for n in (5, 7, 9):
        ours, eager = (torch.arange(4.0 * n).view(n, 4) for _ in range(2))
        torch.testing.assert_close(run(ours[2:-1], ours[3:]), write_and_read(eager[2:-1], eager[3:]))
        assert torch.equal(ours, eager)
    assert tilewright.stats().fallbacks == 0 and tilewright.stats().graphs == 1


def test_it_is_said_once_and_in_the_coverage() -> None:
    tilewright.reset()
    run = tilewright.compile(write_and_read, apart(grid()))
    with pytest.warns(RuntimeWarning, match="run in eager mode") as said:
        for _ in range(2):
            checked(write_and_read, run, down)
    assert len(said) == 1 and tilewright.stats().fallbacks == 1
    assert "lie together in memory" in str(run.coverage)


def test_strict_refuses_it() -> None:
    tilewright.reset()
    run = tilewright.compile(write_and_read, apart(grid()), strict=True)
    m = grid()
    with pytest.raises(InputError, match="lie together in memory"):
        run(*down(m))
    assert torch.equal(m, grid())


@pytest.mark.filterwarnings("ignore:a program was called:RuntimeWarning")
def test_training_writes_what_eager_mode_writes() -> None:
    tilewright.reset()

    def step(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        a.add_(1)
        return (b * w).sum()

    run = by_backend(step)
    for cut in (apart, down, apart):
        found: list[tuple[Tensor, ...]] = []
        programs: list[Program] = [run, step]
        for f in programs:
            m, w = grid(), torch.ones(4, requires_grad=True)
            loss = f(*cut(m), w)
            loss.backward()
            assert w.grad is not None
            found.append((loss.detach(), w.grad, m))
        torch.testing.assert_close(found[0], found[1])


@pytest.mark.filterwarnings("ignore:a program was called:RuntimeWarning")
def test_a_buffer_that_becomes_the_input_is_seen() -> None:
    class Mean(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.add_(1)
            return x * self.mean

    tilewright.reset()
    for compiled in (by_backend, by_door):
        ours, eager = Mean(), Mean()
        run = compiled(ours)
        for given in (
            lambda n: torch.ones(4),
            lambda n: torch.ones(4),
            lambda n: n.mean.detach(),
            lambda n: n.mean,
        ):
            torch.testing.assert_close(run(given(ours)), eager(given(eager)))
            assert torch.equal(ours.mean, eager.mean)
        ours.mean, eager.mean = torch.zeros(4), torch.zeros(4)
        torch.testing.assert_close(run(ours.mean[:].detach()), eager(eager.mean[:].detach()))


def test_preparing_runs_nothing() -> None:
    tilewright.reset()
    run = tilewright.compile(write_and_read, apart(grid()))
    m = grid()
    run.prepare(down(m), {})
    assert torch.equal(m, grid())


def test_programs_that_write_no_input_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def holds(*given: object) -> bool:
        asked.append(given)
        return True

    tilewright.reset()
    monkeypatch.setattr("tilewright.capture.aliasing.called.Relied.holds", holds)
    monkeypatch.setattr("tilewright.capture.aliasing.apart.LieApart.__call__", holds)
    reads, writes = by_backend(lambda a, b: a + b), by_backend(lambda a, b: a.add_(b))
    for given in (apart(grid()), down(grid())):
        assert torch.equal(reads(*given), given[0] + given[1])
    assert not asked
    writes(*apart(grid()))
    assert asked, "those that write are"


def shows_written(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a.add_(1)
    return a.view(-1)[2:6], b * 2


def shows_other(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a.add_(1)
    return a * 2, b[0]


@pytest.mark.parametrize("f", [shows_written, shows_other])
def test_views_of_inputs_that_share_memory_are_at_their_place(
    f: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    """Torch takes the same views of the base."""
    tilewright.reset()
    run, ours, eager = torch.compile(f, backend="tilewright"), grid(), grid()
    for _ in range(2):
        made, wanted = run(*down(ours)), f(*down(eager))
        torch.testing.assert_close(made, wanted)
        assert torch.equal(ours, eager)
        assert [t.storage_offset() for t in made] == [t.storage_offset() for t in wanted]
    assert "shows an input" in str(tilewright.compilations()[0].coverage)


@pytest.mark.parametrize("cut", [
    lambda m: (m, m.view(torch.int32)), lambda m: (m.detach()[1:], m.detach()[:-1]),
    lambda m: ((m * torch.ones((), requires_grad=True)).detach()[1:], m[:-1]),
])  # fmt: skip
def test_inputs_of_which_torch_makes_no_base_run_in_eager_mode(cut: Cut) -> None:
    tilewright.reset()
    run = tilewright.compile(write_and_read)
    for _ in range(2):
        checked(write_and_read, run, cut)


@pytest.mark.filterwarnings("ignore:a program was called:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("then", [lambda g: (g[:, :2], g[:, 2:]), lambda g: (g[1:], g[:-1])])
def test_what_is_saved_counts_its_versions_with_nothing_that_is_written(then: Cut) -> None:
    def step(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return (b * b).sum() + a.sum()

    tilewright.reset()
    run = by_backend(step)
    for cut in (lambda g: (g[:, :2].clone(), g[:, 2:].clone()), then):
        found: list[Tensor] = []
        for f in (run, step):
            leaf = grid().requires_grad_()
            f(*cut(leaf * 1)).backward()
            assert leaf.grad is not None
            found.append(leaf.grad)
        torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_what_torch_asserts_of_inputs_of_one_base_runs_in_eager_mode() -> None:
    def step(a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            a.mul_(3)
        return (b * a.detach().sum()).sum()

    tilewright.reset()
    found: list[Tensor] = []
    for f in (by_backend(step), step):
        leaf = grid().requires_grad_()
        f(*down(leaf * 1)).backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def by_place_behind(a: Tensor) -> Tensor:
    a.as_strided((2,), (1,)).add_(1)
    return a + 0


def by_place_before(a: Tensor) -> Tensor:
    a.add_(1)
    return a.as_strided((2, 2), (12, 1), 3) + 0


def on_the_diagonal(a: Tensor) -> Tensor:
    a.fill_diagonal_(3)
    return a + 1


def shown_repeated(a: Tensor) -> Tensor:
    c = a.expand(2, *a.shape)
    a.add_(1)
    return c


def shown_whole(a: Tensor) -> Tensor:
    v = a.view_as(a)
    v.add_(1)
    return v


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("cut", [lambda g: g[::2, 1::2], lambda g: g[2:], lambda g: g.t()[1:]])
@pytest.mark.parametrize(
    "f", [by_place_behind, by_place_before, on_the_diagonal, shown_repeated, shown_whole]
)
def test_places_of_a_part_of_a_tensor(f: Program, cut: Callable[[Tensor], Tensor], free: bool) -> None:
    """Torch takes them in the value that the program writes, which lies in another way."""
    tilewright.reset()
    ours, eager = (torch.arange(36.0).view(6, 6) for _ in range(2))
    made, wanted = torch.compile(f, backend="tilewright", dynamic=free)(cut(ours)), f(cut(eager))
    torch.testing.assert_close(made, wanted)
    assert made.stride() == wanted.stride() and torch.equal(ours, eager)
