"""Calls under sizes that nobody has seen: what they take over from the sizes before, and what they must not."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import Function
from torch import Tensor

from tilewright.capture.trace import trace
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import integer, symbol
from tilewright.ir.graph import LibraryCall, Operand
from tilewright.ir.kernel import Cover, LibraryStep
from tilewright.options import Options
from tilewright.pipeline.compiler import compile_fx
from tilewright.plan.build import build_plan
from tilewright.runtime.plan.bound import Workspace
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.layouts import Layouts
from tilewright.tuning.input_limits import KEPT_MEMORY

Program = Callable[..., tuple[Tensor, ...]]


def kernels(q: Tensor, keys: Tensor, new: Tensor) -> tuple[Tensor, ...]:
    """Kernels alone, over a cache that grows."""
    cache = torch.cat([keys, new], 1)
    weights = torch.softmax((q * cache).sum(-1), -1)
    return (weights.unsqueeze(-1) * cache).sum(1), cache


def calls(q: Tensor, keys: Tensor, new: Tensor) -> tuple[Tensor, ...]:
    """The same with calls between the kernels."""
    cache = torch.cat([keys, new], 1)
    order = torch.sort((q * cache).sum(-1) + 1, -1)[0]
    weights = torch.softmax(torch.sort(order * 2 - 1, -1, True)[0].sin(), -1)
    return (weights.unsqueeze(-1) * cache).sum(1), cache


def padded(q: Tensor, keys: Tensor, new: Tensor) -> tuple[Tensor, ...]:
    """Copies and views of several sizes."""
    wide = F.pad(keys.cumsum(1), (0, 0, 1, 2))[:, : keys.shape[1] + 1] * q
    return wide, torch.sort(wide.flatten(1), -1)[0].view(wide.shape) + new, new.exp()


PROGRAMS: dict[str, Program] = {"kernels": kernels, "calls": calls, "padded": padded}


def inputs(rows: int, length: int) -> Sequence[Tensor]:
    return torch.randn(rows, 1, 16), torch.randn(rows, length, 16), torch.randn(rows, 1, 16)


def compiled(program: Program, *, trusted: bool = True) -> Executable:
    """The program for any number of rows and any length, called by those who have checked the sizes."""
    given = inputs(3, 5)
    rows = [[(k, 0) for k in range(len(given))]]
    gm = trace(Function(program), given, [[0], [0, 1], [0]], rows).gm
    made = compile_fx(gm, Options(), trusted=trusted).executable
    assert isinstance(made, Executable)
    return made


def check(run: Executable, program: Program, rows: int, length: int) -> None:
    given = inputs(rows, length)
    for got, want in zip(run(list(given)), program(*given), strict=True):
        torch.testing.assert_close(got, want)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Workspace]:
    """The workspaces that are made."""
    found: list[Workspace] = []
    begin = Workspace.__init__

    def counted(self: Workspace, *args: object) -> None:
        found.append(self)
        begin(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Workspace, "__init__", counted)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_workspace_serves_one_size_after_the_other(name: str, made: list[Workspace]) -> None:
    run = compiled(PROGRAMS[name])
    for length in (64, 65):  # the second has room to grow in
        check(run, PROGRAMS[name], 3, length)
    made.clear()
    for length in (66, 67, 68, 66, 67, 65):
        check(run, PROGRAMS[name], 3, length)
    recent = run._recent  # pyright: ignore[reportPrivateUsage]
    native = recent is not None and recent.quick and not recent.divided  # its workspace is never lent
    assert native or not made
    assert sum(len(b.free) for b in run._tables.values()) <= 1  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_of_the_sizes_before_is_left(name: str) -> None:
    run = compiled(PROGRAMS[name])
    for rows, length in (
        (3, 5), (3, 6), (4, 6), (4, 7), (2, 2), (2, 300), (2, 301), (64, 301), (2, 3), (3, 6), (5, 5), (2, 300),
    ):  # fmt: skip
        check(run, PROGRAMS[name], rows, length)
        check(run, PROGRAMS[name], rows, length)


def test_sizes_that_become_none_or_one() -> None:
    n, m = symbol("n"), symbol("m")
    b = Builder()
    x, y = b.value((n, integer(4)), f32), b.value((m, integer(4)), f32)
    doubled = [
        b.library(
            LibraryCall("mul", torch.ops.aten.mul.Scalar, (Operand(0), s), (), ((integer(4), integer(1)),)),
            (v,),
            [((s, integer(4)), f32)],
        )[0]
        for v, s in ((x, n), (y, m))
    ]
    graph = b.finish((x, y), (*doubled, n, m))
    cover = Cover(graph, tuple(LibraryStep(op, choice=False) for op in graph.ops))
    run = Executable(build_plan(cover, {}))
    for a, c in ((3, 2), (0, 2), (1, 2), (1, 0), (0, 0), (1, 1), (3, 2), (4, 1), (0, 1)):
        p, q = torch.randn(a, 4), torch.randn(c, 4)
        made_p, made_q, *sizes = run([p, q])
        torch.testing.assert_close(made_p, p * a)
        torch.testing.assert_close(made_q, q * c)
        assert sizes == [a, c]


def test_sizes_from_data_between_sizes_that_grow() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        found = torch.nonzero(x)
        return found * 2 + 1, torch.sort(y * 3)[0] + 1, (x + 1).cumsum(0)

    given = torch.randn(5), torch.randn(7)
    gm = trace(Function(program), given, [[0], [0]]).gm
    run = compile_fx(gm, Options(), trusted=True).executable
    assert isinstance(run, Executable)
    for n, m, none in ((5, 7, 0), (6, 7, 3), (6, 8, 6), (7, 9, 1), (5, 7, 2), (8, 9, 0), (9, 10, 9)):
        x, y = torch.rand(n) + 1, torch.randn(m)
        x[:none] = 0
        for _ in range(2):
            for got, want in zip(run([x, y]), program(x, y), strict=True):
                torch.testing.assert_close(got, want)


def test_a_call_that_raises_leaves_nothing_behind(made: list[Workspace]) -> None:
    n, wrong = symbol("n"), {7, 9}
    b = Builder()

    def fails(t: Tensor, count: int) -> Tensor:
        if count in wrong:
            raise RuntimeError("not this one")
        return t * count

    x = b.value((n, integer(4)), f32)
    call = LibraryCall("fails", fails, (Operand(0), n), (), ((integer(4), integer(1)),))
    (y,) = b.library(call, (x,), [((n, integer(4)), f32)])
    graph = b.finish((x,), (y,))
    run = Executable(build_plan(Cover(graph, (LibraryStep(graph.ops[0], choice=False),)), {}))
    for count in (5, 6, 7, 8, 9, 7, 10, 5):
        t = torch.randn(count, 4)
        if count in wrong:
            with pytest.raises(RuntimeError, match="not this one"):
                run([t])
        else:
            torch.testing.assert_close(run([t])[0], t * count)
    assert len(made) == 1 + 3, "one at first, and one for each call that raised"


@pytest.mark.parametrize("name", PROGRAMS)
def test_threads_that_grow_at_once(name: str) -> None:
    run, wrong = compiled(PROGRAMS[name]), list[BaseException]()
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        try:
            start.wait()
            for k in range(40):
                check(run, PROGRAMS[name], 2 + (k + seed) % 3, 60 + (k * (1 + seed % 2)) % 23)
        except BaseException as error:  # noqa: BLE001  told by the test
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_no_size_keeps_what_others_have_taken(made: list[Workspace]) -> None:
    run = compiled(calls)
    kept: list[weakref.ref[Workspace]] = []
    for length in range(40, 140):
        check(run, calls, 3, length)
    kept = [weakref.ref(w) for w in made]
    made.clear()
    gc.collect()
    assert sum(w() is not None for w in kept) <= 1


def test_sets_of_sizes_that_change_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compiled(padded)
    rules = run.bound_for(list(inputs(3, 5))).first.layouts.rules
    monkeypatch.setattr(type(KEPT_MEMORY), "max_size_changes", 3, raising=False)
    for rows, length in ((3, 6), (4, 6), (5, 7), (5, 7), (6, 7), (6, 8), (7, 9)):
        layouts = run.bound_for(list(inputs(rows, length))).first.layouts
        fresh = Layouts(run.plan, layouts.sizes)
        assert (layouts.shapes, layouts.strides, layouts.offsets) == (
            fresh.shapes,
            fresh.strides,
            fresh.offsets,
        )
        assert layouts.rules is rules
    assert len(rules._changes) <= 64  # pyright: ignore[reportPrivateUsage]


def test_a_weight_that_is_another_one_later() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (torch.sort(x * w, -1)[0] + 1,)

    gm = trace(Function(program), (torch.randn(5, 8), torch.randn(8)), [[0], []]).gm
    run = compile_fx(gm, Options(), trusted=True).executable
    for n in (5, 6, 7, 6, 8):
        x, w = torch.randn(n, 8), torch.randn(8)
        torch.testing.assert_close(run([x, w])[0], program(x, w)[0])
        w.data = torch.randn(8)
        torch.testing.assert_close(run([x, w])[0], program(x, w)[0])
