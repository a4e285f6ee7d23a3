"""The GPU's executable on memory of the CPU: workspaces per stream, memory that runs out, results of graphs."""

from __future__ import annotations

import ctypes
import gc
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewright.errors import IndexOutOfRange, InputError, OutOfMemory, UnsupportedError, WrongResult
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import symbol
from tilewright.ir.graph import LibraryCall, Operand, Spare
from tilewright.ir.kernel import Cover, Kernel, LibraryStep
from tilewright.ir.ops import pointwise
from tilewright.ir.sizes import dims
from tilewright.plan import Plan
from tilewright.plan.build import build_plan
from tilewright.plan.data import Home
from tilewright.runtime.cuda import driver, executable
from tilewright.runtime.cuda.driver import DriverOutOfMemory
from tilewright.runtime.cuda.executable import CudaExecutable
from tilewright.runtime.cuda.graph import Graphs, _Sizes, refusal
from tilewright.runtime.cuda.replay.exits import exits_of, leave, lent_by
from tilewright.runtime.plan.executable import TRUSTED
from tilewright.runtime.plan.launch import Launching
from tilewright.runtime.plan.verified import checks_of
from tilewright.tuning.input_limits import KEPT_MEMORY

N = symbol("n")


class Doubling:
    """Kernels that double n floats, run when they are launched. `code` is returned by the next run."""

    def __init__(self) -> None:
        self.code = 0
        self.runs = 0

    def prepare(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        alone: Sequence[bool] = (),
    ) -> Callable[[], int]:
        def run() -> int:
            self.runs += 1
            if self.code:
                code, self.code = self.code, 0
                return code
            for _, ((a, i), (b, j)) in launches:
                given = (ctypes.c_float * sizes[0]).from_address(bases[a] + i)
                made = (ctypes.c_float * sizes[0]).from_address(bases[b] + j)
                for k in range(sizes[0]):
                    made[k] = 2 * given[k]
            return 0

        return run


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The current stream, and whether it captures."""
    state = {"stream": 1, "capturing": 0, "released": 0}
    monkeypatch.setattr(executable, "current_stream", lambda ordinal: state["stream"])
    monkeypatch.setattr(driver, "capturing", lambda: bool(state["capturing"]))
    monkeypatch.setattr(executable, "free_bytes", lambda ordinal: 123)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: state.update(released=state["released"] + 1))
    return state


def plan_of(count: int = 2) -> Plan:
    """`count` kernels in a row, each of which reads what the one before has made."""
    b = Builder()
    x = b.value((N,), f32)
    steps: list[Kernel] = []
    v = x
    for _ in range(count):
        call = LibraryCall("stand-in", torch.neg, (Operand(0),), (), ((dims.ONE,),))
        (v,) = b.library(call, (v,), [((N,), f32)])
        steps.append(Kernel((b.ops[-1],), (v,)))
    graph = b.finish((x,), (v,))
    numbered = {s: (0, (*s.ops[0].inputs, *s.outputs)) for s in steps}
    return build_plan(Cover(graph, tuple(steps)), numbered, ("n",))


def made(**rest: object) -> tuple[CudaExecutable, Doubling]:
    unit = Doubling()
    return CudaExecutable(plan_of(), (), unit, **rest), unit  # type: ignore[arg-type]


def spaces(run: CudaExecutable) -> dict[int, int]:
    """How many workspaces wait, by stream."""
    bound = run._recent
    assert isinstance(bound, executable.CudaBound)
    return {stream: len(free) for stream, free in bound.by_stream.items()}


def test_memory_between_kernels_is_kept_per_stream(lines: dict[str, int]) -> None:
    run, _ = made(guards=TRUSTED)
    x = torch.randn(5)
    for stream in (1, 1, 2, 1, 2):
        lines["stream"] = stream
        (y,) = run([x])
        torch.testing.assert_close(y, 4 * x)
    assert spaces(run) == {1: 1, 2: 1}
    first = run._recent
    (y,) = run([torch.ones(7)])
    torch.testing.assert_close(y, torch.full((7,), 4.0))
    assert spaces(run) == {2: 1} and first is not run._recent
    assert not first.by_stream, "other sizes keep nothing"  # type: ignore[union-attr]


def test_a_caller_s_capture_shares_no_memory(lines: dict[str, int]) -> None:
    run, unit = made(guards=TRUSTED)
    run([torch.ones(5)])
    lines["capturing"] = 1
    run([torch.ones(5)])
    assert spaces(run) == {1: 1} and unit.runs == 2


def test_streams_are_bounded(lines: dict[str, int]) -> None:
    run, _ = made(guards=TRUSTED)
    for stream in range(100):
        lines["stream"] = stream
        run([torch.ones(5)])
    assert len(spaces(run)) <= KEPT_MEMORY.max_streams


def test_checks_of_earlier_calls(lines: dict[str, int]) -> None:
    run, unit = made(guards=TRUSTED)
    run([torch.ones(5)])
    unit.code = 1
    with pytest.raises(IndexOutOfRange):
        run([torch.ones(5)])
    (y,) = run([torch.ones(5)])
    assert y.tolist() == [4.0] * 5  # type: ignore[union-attr]


class Bending(Doubling):
    """The same with a wrong last element."""

    def prepare(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        alone: Sequence[bool] = (),
    ) -> Callable[[], int]:
        right = super().prepare(launches, bases, sizes, alone)

        def run() -> int:
            code = right()
            for _, (_, (b, j)) in launches:
                (ctypes.c_float * sizes[0]).from_address(bases[b] + j)[sizes[0] - 1] = 7
            return code

        return run


def looked_at(unit: Doubling, turn: Callable[[Tensor], Tensor] = torch.neg) -> CudaExecutable:
    """A kernel that means doubling, then a call that means turning the sign."""
    b = Builder()
    x = b.value((N,), f32)
    y = pointwise.add(b, x, x)
    call = LibraryCall("turned", turn, (Operand(0),), (), ((dims.ONE,),))
    plain = replace(call, function=torch.neg)
    (z,) = b.library(replace(call, spare=Spare(plain)), (y,), [((N,), f32)])
    kernel = Kernel((b.ops[0],), (y,))
    cover = Cover(b.finish((x,), (z,)), (kernel, LibraryStep(b.ops[1], choice=True)))
    plan = build_plan(cover, {kernel: (0, (x, y))}, ("n",))
    checks = checks_of(cover, plan, True, "inference")
    return CudaExecutable(plan, (), unit, guards=TRUSTED, checks=checks)


def test_under_verify_kernels_and_calls_are_held_against_their_meaning(lines: dict[str, int]) -> None:
    (y,) = looked_at(Doubling())([torch.ones(5)])
    assert y.tolist() == [-2.0] * 5  # type: ignore[union-attr]
    with pytest.raises(WrongResult, match="add gave another result in the inference graph.*kernel 0"):
        looked_at(Bending())([torch.ones(5)])
    with pytest.raises(WrongResult, match="turned gave another result in the inference graph"):
        looked_at(Doubling(), torch.abs)([torch.ones(5)])


def test_what_is_captured_is_not_looked_at(lines: dict[str, int]) -> None:
    run = looked_at(Bending(), torch.abs)
    lines["capturing"] = 1
    (y,) = run([torch.ones(5)])
    assert y.tolist() == [2.0] * 4 + [7.0]  # type: ignore[union-attr]


def test_inputs_are_checked(lines: dict[str, int]) -> None:
    run, _ = made()
    with pytest.raises(InputError, match="meta, this was compiled for cpu"):
        run([torch.ones(5, device="meta")])
    out = torch.zeros(5)
    assert run([torch.ones(5)], [out])[0] is out and out.tolist() == [4.0] * 5


def test_memory_that_runs_out_is_tried_again_once(
    lines: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, unit = made(guards=TRUSTED)
    run([torch.ones(5)])
    run._recent.by_stream.clear()  # type: ignore[union-attr]
    fails = [2]
    real = executable.CudaBound.fresh

    def fresh(self: executable.CudaBound) -> object:
        if fails[0]:
            fails[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot. And more")
        return real(self)

    monkeypatch.setattr(executable.CudaBound, "fresh", fresh)
    given: list[object] = [torch.ones(5)]
    with pytest.raises(OutOfMemory, match="are needed .* 123 are free on cpu") as caught:
        run(given)  # type: ignore[arg-type]
    assert caught.value.needed == 64 + 20 and caught.value.free == 123 and not given
    assert caught.value.__context__ is None, "nothing holds the frames of the failed call"
    assert isinstance(caught.value, torch.OutOfMemoryError) and lines["released"] == 1 and unit.runs == 1
    fails[0] = 1
    assert not any(spaces(run).values())
    (y,) = run([torch.ones(5)])
    assert y.tolist() == [4.0] * 5 and lines["released"] == 2  # type: ignore[union-attr]


def test_a_driver_without_memory_says_the_same(lines: dict[str, int]) -> None:
    """What a launch needs besides (stacks of threads, a graph) may be what is too much. Nothing is kept of the call."""
    run, unit = made(guards=TRUSTED)
    run([torch.ones(5)])
    inner = unit.prepare

    def prepare(*rest: object) -> Callable[[], int]:
        def refuse() -> int:
            raise DriverOutOfMemory("a kernel could not be launched: CUDA_ERROR_OUT_OF_MEMORY", phase="run")

        return refuse

    unit.prepare = prepare  # type: ignore[method-assign, assignment]
    given: list[object] = [torch.ones(6)]
    with pytest.raises(
        OutOfMemory, match="88 bytes are needed .* 123 are free on cpu .*ERROR_OUT_OF"
    ) as caught:
        run(given)  # type: ignore[arg-type]
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, torch.OutOfMemoryError)
    assert caught.value.needed == 64 + 24 and caught.value.free == 123 and not given
    assert not any(spaces(run).values()), "its memory is not kept"
    alive = weakref.ref(caught.value)
    del caught
    gc.collect()
    assert alive() is None
    unit.prepare = inner  # type: ignore[method-assign]
    (y,) = run([torch.ones(7)])
    assert y.tolist() == [4.0] * 7  # type: ignore[union-attr]


def test_released_memory_is_free(lines: dict[str, int]) -> None:
    run, _ = made(guards=TRUSTED)
    run([torch.ones(5)])
    executable.release()
    assert spaces(run) == {} and lines["released"] == 1
    del run
    gc.collect()
    run, _ = made(guards=TRUSTED)
    (y,) = run([torch.ones(5)])
    assert y.tolist() == [4.0] * 5  # type: ignore[union-attr]


def test_host_numbers_are_brought(lines: dict[str, int]) -> None:
    b = Builder()
    x = b.value((), f32)
    call = LibraryCall("a.call", torch.neg, (Operand(0),), (), ((),))
    (y,) = b.library(call, (x,), [((), f32)])
    cover = Cover(b.finish((x,), (y,)), (LibraryStep(b.ops[0], choice=False),))
    run = CudaExecutable(build_plan(cover, {}).on("cpu", host=(0,)), guards=TRUSTED)
    for value in (3.0, 4.0):
        given = torch.tensor(value)
        args: list[object] = [given]
        (got,) = run(args)  # type: ignore[arg-type]
        assert got.item() == -value and not args  # type: ignore[union-attr]


def test_the_short_way_is_of_the_same_kind(lines: dict[str, int]) -> None:
    run, _ = made(graphs=Graphs(plan_of(), None))
    other = run.rebound(run.plan.bindings)
    assert isinstance(other, CudaExecutable) and other.guards.trusted and other.graphs is run.graphs


def test_a_replay_follows_no_tangents(lines: dict[str, int]) -> None:
    graphs = mock.Mock(run=lambda *_: [torch.zeros(5)])
    run, _ = made(guards=TRUSTED, graphs=graphs)
    x = torch.ones(5)
    assert len(run([x])) == 1
    with forward_ad.dual_level():
        assert len(run([x])) == 1
        with pytest.raises(UnsupportedError, match="forward mode"):
            run([forward_ad.make_dual(x, x)])


def test_the_shortest_way_is_of_the_sizes_of_its_call(lines: dict[str, int]) -> None:
    """Another thread may have called with others in between: their graph would read past the end of these."""
    bounds: list[object] = []
    graphs = mock.Mock(run=lambda *_: None, quick=bounds.append, refused="", has=lambda bound: True)
    run, _ = made(guards=TRUSTED, graphs=graphs)
    small, large = torch.ones(5), torch.ones(9)
    run([small])
    own = run._recent
    run([large])
    found = run.shortest([small])
    assert found is not None and found.run is run
    assert bounds == [own] and own is not None and own.sizes["n"] == 5


@pytest.mark.parametrize("refused", ["", "it cannot be captured"])
def test_there_is_no_shortest_way_before_there_is_a_graph(lines: dict[str, int], refused: str) -> None:
    """A known call would never look for the graph that comes later."""
    graphs = mock.Mock(run=lambda *_: None, refused=refused, has=lambda bound: False)
    run, _ = made(guards=TRUSTED, graphs=graphs)
    run([torch.ones(5)])
    found = run.shortest([torch.ones(5)])
    assert (found is None) is not bool(refused)


# --- graphs ---


def library_plan(
    reason: str = "contraction",
    *,
    pure: bool = True,
    segments: bool = False,
    function: Callable[..., object] = torch.neg,
) -> Plan:
    b = Builder()
    x = b.value((N,), f32)
    size = symbol("u") if segments else N
    call = LibraryCall("a.call", function, (Operand(0),), (), ((dims.ONE,),), reason, pure)
    (y,) = b.library(call, (x,), [((size,), f32)])
    graph = b.finish((x,), (y,))
    return build_plan(Cover(graph, tuple(LibraryStep(op, choice=False) for op in graph.ops)), {})


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (plan_of(), ""),
        (library_plan(), ""),
        (library_plan("random"), "a.call (random)"),
        (library_plan("random", pure=False, function=torch.ops.aten.native_dropout.default), ""),
        (library_plan(pure=False), "a.call (has effects)"),
        (
            library_plan(
                "attention", pure=False, function=torch.ops.aten.scaled_dot_product_attention.default
            ),
            "",
        ),
        (library_plan(segments=True), "sizes depend on data"),
    ],
)
def test_plans_that_cannot_be_captured(plan: Plan, reason: str) -> None:
    assert refusal(plan) == reason
    assert reason in Graphs(plan, None).report
    read = replace(plan, buffers=(*plan.buffers, replace(plan.buffers[0], home=Home.NUMBER)))
    assert refusal(read)


def leaving(results: Sequence[object], inputs: Sequence[object], args: Sequence[object]) -> list[object]:
    """What a replay returns for `args`, when the graph has left `results` in its memory and reads `inputs`."""
    exits, copied = exits_of(results, inputs)  # type: ignore[arg-type]
    copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in copied]
    for c, t in zip(copies, copied, strict=True):
        c.copy_(t)
    return [leave(e, args, copies) for e in exits]  # type: ignore[arg-type]


def test_results_are_copied_once_and_keep_their_layout() -> None:
    base = torch.randn(4, 6)
    results = [base.t(), 3, None, torch.randn(1, 1, 5).expand(2, 3, 5), torch.empty(0, 3)]
    got = leaving(results, [], [])
    for r, g in zip(results, got, strict=True):
        if isinstance(r, Tensor):
            assert isinstance(g, Tensor) and torch.equal(g, r) and g.stride() == r.stride()
            assert not r.numel() or g.untyped_storage().data_ptr() != r.untyped_storage().data_ptr()
        else:
            assert g == r


def test_results_that_share_memory_share_their_copy() -> None:
    base = torch.randn(40)
    results = [base[3:20], base[10:30].view(4, 5), torch.randn(3)]
    first, second, third = (t for t in leaving(results, [], []) if isinstance(t, Tensor))
    assert (
        torch.equal(first, results[0]) and torch.equal(second, results[1]) and torch.equal(third, results[2])
    )
    first[7] = 99.0
    assert second[0, 0] == 99.0 and base[10] != 99.0
    with pytest.raises(Exception, match="several types"):
        leaving([base[:4], base.view(torch.int32)[:4]], [], [])


def test_results_that_are_inputs_are_the_caller_s() -> None:
    own, given = torch.randn(4, 6), torch.randn(9, 6)[2:6]
    whole, part = leaving([own, own[1:, ::2]], [7, own], [7, given])
    assert whole is given and isinstance(part, Tensor)
    assert torch.equal(part, given[1:, ::2]) and part.data_ptr() == given[1:].data_ptr()


def test_what_is_saved_is_lent_and_known_to_be_in_use() -> None:
    base, result, own = torch.randn(40), torch.randn(3), torch.randn(5)
    results = [result, base[3:20], base[10:30].view(4, 5), own]
    exits, copied = exits_of(results, [own], range(1, 4))
    assert len(copied) == 1 and torch.equal(copied[0], result)
    del base, results
    (lent,) = lent_by(exits)
    assert not lent.in_use()
    first, second, third = (leave(e, [own], copied) for e in exits[1:])
    assert isinstance(first, Tensor) and isinstance(second, Tensor) and third is own
    assert lent.in_use() and not first._is_view()
    first[7] = 99.0
    assert second[0, 0] == 99.0
    view = second.flatten()[2:]
    del first, second
    assert lent.in_use(), "a view of it is left"
    del view
    assert not lent.in_use()


def test_what_is_saved_in_the_memory_of_a_result_is_copied_with_it() -> None:
    base = torch.randn(40)
    exits, copied = exits_of([base[:20], base[10:30]], [], range(1, 2))
    assert len(copied) == 1 and not lent_by(exits)


def test_a_pass_of_training_waits_until_its_inputs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass gets what its forward pass saved: from the second call on at the graph's places."""
    plan = replace(
        plan_of(), segments=tuple(replace(s, makes=((),) * len(s.steps)) for s in plan_of().segments)
    )
    plan = replace(plan, segments=tuple(replace(s, makes=((0,), *s.makes[1:])) for s in plan.segments))
    graphs, state = Graphs(plan, None), _Sizes()
    monkeypatch.setattr(Tensor, "is_cuda", True)
    saved, kept, tangent = torch.ones(3), torch.ones(4), [torch.ones(2) for _ in range(4)]
    ready = [
        graphs._ready(state, [torch.ones(3), kept, tangent[0]], ()),
        graphs._ready(state, [saved, kept, tangent[1]], ()),
        graphs._ready(state, [saved, kept, tangent[2]], ()),
    ]
    assert ready == [False, False, True] and state.moved == {2}
