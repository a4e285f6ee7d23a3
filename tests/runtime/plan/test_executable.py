"""The executable on plans of library calls: sizes, workspaces, foreign layouts, ownership, errors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32, i64
from tilewright.ir.expr import Expr, integer, symbol
from tilewright.ir.graph import Graph, Layout, LibraryCall, Operand, Value, Write
from tilewright.ir.kernel import Cover, LibraryStep
from tilewright.ir.sizes import dims
from tilewright.plan.build import build_plan
from tilewright.runtime.plan.arguments import deliver
from tilewright.runtime.plan.executable import TRUSTED, Executable, Guards
from tilewright.runtime.plan.tensors import lay_out, memory_range, repeats_memory, same_layout
from tilewright.runtime.stats import STATS

aten = torch.ops.aten
N = symbol("n")


def run_of(graph: Graph, **rest: object) -> Executable:
    """An executable of library calls."""
    cover = Cover(graph, tuple(LibraryStep(op, choice=False) for op in graph.ops))
    constants = [t for t in graph.constants.values() if isinstance(t, Tensor)]
    return Executable(build_plan(cover, {}), constants, **rest)  # type: ignore[arg-type]


def call(
    b: Builder, function: object, args: tuple[object, ...], inputs: Sequence[Value], shape: Sequence[Expr]
) -> Value:
    """A library call."""
    made = LibraryCall(str(function), function, args, (), (dims.dense_strides(shape),))  # type: ignore[arg-type]
    return b.library(made, inputs, [(shape, f32)])[0]


def rows(first: int = 0) -> tuple[Builder, Value, Value]:
    """y = x * (n + 1), with n the number of rows."""
    b = Builder()
    x = b.value((N, integer(4)), f32)
    y = call(b, aten.mul.Scalar, (Operand(0), dims.add(N, integer(1))), (x,), (N, integer(4)))
    return b, x, y


def test_host_integers_follow_the_sizes() -> None:
    b, x, y = rows()
    run = run_of(b.finish((x,), (y, N)))
    before = STATS.plan_misses
    for n in (3, 5, 0, 1, 3):
        t = torch.randn(n, 4)
        got, size = run([t])
        torch.testing.assert_close(got, t * (n + 1))
        assert size == n
    assert STATS.plan_misses == before + 4


def test_size_tables_are_bounded() -> None:
    b, x, y = rows()
    run = run_of(b.finish((x,), (y,)))
    for n in range(300):
        run([torch.zeros(n, 4)])
    assert len(run._tables) == 256


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [torch.zeros(3)],
        [torch.zeros(3, 5)],
        [torch.zeros(3, 4, dtype=torch.float64)],
        [torch.zeros(3, 4), torch.zeros(3, 4)],
        [3.0],
        [None],
        [torch.zeros(3, 4, device="meta")],
    ],
)
def test_wrong_inputs(wrong: list[object]) -> None:
    b, x, y = rows()
    run = run_of(b.finish((x,), (y,)))
    with pytest.raises(InputError) as caught:
        run(wrong)  # type: ignore[arg-type]
    assert caught.value.phase == "input"


def test_dims_of_size_one_that_a_kernel_of_torch_left_out_come_back() -> None:
    """The vector norm of torch 2.11 over a dim of size 1, counted from the end, has one dim less than it says."""
    b = Builder()
    x = b.value((integer(1), integer(4)), f32)
    y = call(b, aten.sum.dim_IntList, (Operand(0), [0]), (x,), (integer(4),))
    graph = b.finish((x,), (y,))
    given = torch.randn(4)
    (made,) = run_of(graph, guards=TRUSTED)([given])
    torch.testing.assert_close(made, given)
    with pytest.raises(InputError, match="torch promised 2"):
        run_of(graph, guards=TRUSTED)([torch.randn(8)])
    with pytest.raises(InputError):  # what a user passes has the dims of the program
        run_of(graph)([given])


def test_sizes_must_agree_and_lie_in_their_range() -> None:
    b = Builder()
    n = symbol("n", 2, 8)
    x, y = b.value((n,), f32), b.value((dims.mul(n, integer(2)),), f32)
    z = call(b, aten.relu.default, (Operand(0),), (x,), (n,))
    run = run_of(b.finish((x, y), (z,)), guards=Guards(conditions=(dims.sub(n, integer(5)),)))
    run([torch.zeros(4), torch.zeros(8)])
    for a, c in ((4, 9), (1, 2), (9, 18), (5, 10)):
        assert not run.admits([torch.zeros(a), torch.zeros(c)])
        with pytest.raises(InputError):
            run([torch.zeros(a), torch.zeros(c)])


def test_a_size_that_is_no_multiple() -> None:
    b = Builder()
    x = b.value((dims.mul(N, integer(3)),), f32)
    run = run_of(b.finish((x,), (call(b, aten.relu.default, (Operand(0),), (x,), x.shape),)))
    run([torch.zeros(6)])
    with pytest.raises(InputError, match="must be 3 times"):
        run([torch.zeros(7)])


def test_foreign_strides_are_copied_and_counted() -> None:
    b, x, y = rows()
    run = run_of(b.finish((x,), (y,)))
    before = STATS.input_copies
    t = torch.randn(4, 3).t()
    torch.testing.assert_close(run([t])[0], t * 4)
    assert STATS.input_copies == before + 1
    run([torch.randn(1, 4).as_strided((1, 4), (77, 1))])
    assert STATS.input_copies == before + 1


def test_writes_reach_an_input_of_foreign_strides() -> None:
    b, x, y = rows()
    run = run_of(b.finish((x,), (), writes=(Write(0, y),)))
    t = torch.randn(4, 3).t()
    wanted = t * 4
    run([t])
    torch.testing.assert_close(t, wanted)


def test_arguments_are_released() -> None:
    b, x, y = rows()
    run = run_of(b.finish((x,), (y,)))
    args: list[object] = [torch.zeros(2, 4)]
    run(args)  # type: ignore[arg-type]
    assert args == []


def test_nested_arguments_and_several_results() -> None:
    b = Builder()
    x, y = b.value((N,), f32), b.value((N,), f32)
    total = dims.mul(N, integer(2))
    joined = call(b, aten.cat.default, ([Operand(0), Operand(1)], 0), (x, y), (total,))
    top = LibraryCall("topk", aten.topk.default, (Operand(0), 2), (), ((integer(1),), (integer(1),)))
    values, places = b.library(top, (joined,), [((integer(2),), f32), ((integer(2),), i64)])
    run = run_of(b.finish((x, y), (values, places)))
    a, c = torch.randn(5), torch.randn(5)
    wanted = torch.cat([a, c]).topk(2)
    for got, want in zip(run([a, c]), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_a_result_in_other_strides_than_promised_is_laid_out_anew() -> None:
    b = Builder()
    x = b.value((integer(3), integer(4)), f32)
    y = call(b, lambda t: t.t().contiguous().t(), (Operand(0),), (x,), x.shape)
    got = run_of(b.finish((x,), (y,)))([torch.ones(3, 4)])[0]
    assert isinstance(got, Tensor) and got.stride() == (4, 1)


def test_a_call_without_a_schema_that_returns_its_operand() -> None:
    b = Builder()
    x = b.value((integer(3),), f32)
    y = call(b, lambda t: t, (Operand(0),), (x,), x.shape)
    t = torch.ones(3)
    got = run_of(b.finish((x,), (y,)))([t])[0]
    assert isinstance(got, Tensor) and got.data_ptr() != t.data_ptr()


def test_sizes_from_data() -> None:
    b = Builder()
    x = b.value((N,), f32)
    u = symbol("u0")
    found = LibraryCall("nonzero", aten.nonzero.default, (Operand(0),), (), ((integer(1), integer(1)),))
    (places,) = b.library(found, (x,), [((u, integer(1)), i64)])
    made = LibraryCall("zeros", aten.zeros.default, ([dims.add(u, N)],), (), ((integer(1),),))
    (zeros,) = b.library(made, (), [((dims.add(u, N),), f32)])
    run = run_of(b.finish((x,), (places, zeros, u)))
    for t in (torch.tensor([0.0, 1, 2]), torch.zeros(4), torch.ones(2)):
        got, zeros_made, count = run([t])
        torch.testing.assert_close(got, t.nonzero())
        assert isinstance(zeros_made, Tensor) and zeros_made.shape[0] == t.numel() + count


def test_caller_owned_outputs() -> None:
    b, x, y = rows()
    run = run_of(b.finish((x,), (y,)))
    t, out = torch.randn(3, 4), torch.empty(3, 9)[:, 1:5]
    (got,) = run([t], (out,))
    assert got is out
    torch.testing.assert_close(out, t * 4)
    for bad in (t, torch.empty(4, 4), torch.empty(3, 4, dtype=torch.int32), torch.empty(4).expand(3, 4)):
        with pytest.raises(InputError):
            run([t], (bad,))
    with pytest.raises(InputError, match="there are 1 outputs"):
        run([t], ())


def test_deliver_checks_overlap_of_outputs() -> None:
    base = torch.zeros(6)
    with pytest.raises(InputError, match="overlaps"):
        deliver((torch.ones(4), torch.ones(4)), (base[:4], base[2:]), ())
    got = deliver({"a": torch.ones(2), "n": None}, (base[:2],), ())
    assert isinstance(got, dict) and got["a"] is not None and base[:2].sum() == 2


def test_constants_are_read_in_place() -> None:
    b = Builder()
    x = b.value((integer(2),), f32)
    weight = torch.ones(2)
    w = b.constant(weight, (integer(2),), f32)
    run = run_of(b.finish((x,), (call(b, aten.add.Tensor, (Operand(0), Operand(1)), (x, w), x.shape),)))
    assert torch.equal(run([torch.ones(2)])[0], torch.full((2,), 2.0))  # type: ignore[arg-type]


def test_layout_helpers() -> None:
    assert same_layout((2, 1, 3), (3, 77, 1), (3, 3, 1)) and same_layout((0, 3), (9, 9), (3, 1))
    assert not same_layout((2, 3), (3, 1), (1, 2))
    assert repeats_memory(torch.empty(3).expand(2, 3)) and not repeats_memory(torch.empty(4, 6)[::2, 1:3])
    assert repeats_memory(torch.empty(8).as_strided((3, 3), (2, 1)))
    t = torch.empty(4, 6)[1:3, 2:4]
    low, high = memory_range(t)
    assert (low - t.untyped_storage().data_ptr(), high - low) == (32, 32)
    assert memory_range(torch.empty(0)) == (torch.empty(0).data_ptr(),) * 2
    assert lay_out(torch.randn(3), (0,)).stride() == (0,)


def test_layouts_of_inputs_are_kept() -> None:
    b = Builder()
    x = b.value((integer(3), integer(4)), f32)
    y = call(b, aten.relu.default, (Operand(0),), (x,), x.shape)
    graph = b.finish((x,), (y,), layouts={x: Layout((integer(1), integer(3)))})
    before = STATS.input_copies
    run_of(graph)([torch.randn(4, 3).t()])
    assert STATS.input_copies == before
