"""Plans: how sizes are bound, who owns which memory, what is freed when, and what coverage counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tilewright.errors import VerifyError
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32, i64
from tilewright.ir.expr import Expr, const, integer, symbol
from tilewright.ir.graph import Graph, Layout, LibraryCall, Op, Operand, Share, Shares, Value, Write
from tilewright.ir.kernel import Cover, LibraryStep, ViewStep
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.host import number, size
from tilewright.plan import CallStep, Copy, Home, Part, Plan, Spec, View
from tilewright.plan.bind import bind_symbols
from tilewright.plan.build import build_plan
from tilewright.plan.coverage import Coverage, Row, coverage_of

N, M = symbol("n"), symbol("m")


def spec(*shape: Expr | int, strides: Sequence[Expr] | None = None) -> Spec:
    """A dense float tensor."""
    exprs = tuple(integer(s) if isinstance(s, int) else s for s in shape)
    return Spec(f32, exprs, tuple(strides) if strides is not None else dims.dense_strides(exprs))


def library(b: Builder, name: str, function: object, inputs: Sequence[Value], shape: Sequence[Expr]) -> Value:
    """A library call on all `inputs`."""
    call = LibraryCall(
        name, function, tuple(Operand(k) for k in range(len(inputs))), (), (dims.dense_strides(shape),)
    )  # type: ignore[arg-type]
    with b.origin(name) as origin:
        (out,) = b.library(call, inputs, [(shape, f32)])
    b.close_origin(origin, call, inputs, (out,))
    return out


def cover_of(graph: Graph) -> Cover:
    """Every op as a library step."""
    return Cover(graph, tuple(LibraryStep(op, choice=False) for op in graph.ops))


def plan_of(graph: Graph, shares: Sequence[Share] | None = None) -> Plan:
    """The plan of library steps only."""
    return build_plan(cover_of(graph), {}, shares=shares)


# --- sizes ---------------------------------------------------------------------------


def test_scalars_and_sizes_bind_before_strides() -> None:
    (b,) = bind_symbols((spec(4, 4, strides=(N, integer(1))), N, spec(N)))
    assert (b.part, b.input) == (Part.SCALAR, 1)
    (b,) = bind_symbols((spec(4, 4, strides=(N, integer(1))), spec(N)))
    assert (b.part, b.input, b.dim) == (Part.SIZE, 1, 0)
    (b,) = bind_symbols((spec(4, 4, strides=(N, integer(1))),))
    assert (b.part, b.input, b.dim) == (Part.STRIDE, 0, 0)


def test_linear_sizes_are_solved() -> None:
    (b,) = bind_symbols((spec(dims.add(dims.mul(N, integer(3)), integer(5))),))
    assert b.scale is integer(3) and b.shift is integer(5)


def test_a_product_binds_once_its_other_factor_is_known() -> None:
    first, second = bind_symbols((spec(dims.mul(N, M)), spec(N)))
    assert (first.symbol, second.symbol) == ("n", "m") and second.scale is N


def test_scalars_can_be_left_out() -> None:
    assert bind_symbols((N,), scalars=False) == ()
    (b,) = bind_symbols((N, spec(N)), scalars=False)
    assert (b.part, b.input) == (Part.SIZE, 1)


def test_an_unbound_size_fails_loudly() -> None:
    b = Builder()
    x = b.value((integer(2),), f32)
    y = library(b, "make", torch.relu, (x,), (dims.mul(N, M),))
    with pytest.raises(VerifyError, match="m, n"):
        plan_of(b.finish((x,), (y,)))


def test_host_numbers() -> None:
    e = dims.add(dims.mul(N, integer(2)), dims.floordiv(M, integer(3)))
    assert size(e, {"n": 5, "m": 7}) == 12
    assert number(const(2.5, f32), {}) == 2.5
    with pytest.raises(KeyError):
        size(N, {})


# --- memory -----------------------------------------------------------------------------


def simple() -> tuple[Builder, Value, Value, Value]:
    """x -> y -> z, by library calls."""
    b = Builder()
    x = b.value((N,), f32)
    y = library(b, "relu", torch.ops.aten.relu.default, (x,), (N,))
    z = library(b, "exp", torch.ops.aten.exp.default, (y,), (N,))
    return b, x, y, z


def test_results_are_freed_after_their_last_reader() -> None:
    b, x, _, z = simple()
    plan = plan_of(b.finish((x,), (z,)))
    (segment,) = plan.segments
    assert segment.frees == ((0,), (1,))
    assert plan.outputs == (2,)
    assert plan.buffers[2].home is Home.LIBRARY


def test_an_input_returned_as_a_fresh_output_is_copied() -> None:
    b, x, _, z = simple()
    plan = plan_of(b.finish((x,), (x, z)))
    assert any(isinstance(s, Copy) and s.source == 0 for s in plan.segments[0].steps)
    kept = plan_of(b.finish((x,), (x, z)), shares=(Share(Shares.INPUT, 0), Share(Shares.NOTHING, 1)))
    assert kept.outputs[0] == 0 and not any(isinstance(s, Copy) for s in kept.segments[0].steps)


def test_one_value_at_two_fresh_outputs_is_copied_once() -> None:
    b, x, _, z = simple()
    graph = b.finish((x,), (z, z))
    copies = [s for s in plan_of(graph).segments[0].steps if isinstance(s, Copy)]
    assert len(copies) == 1
    same = plan_of(graph, shares=(Share(Shares.OUTPUT, 0), Share(Shares.OUTPUT, 0)))
    assert same.outputs == (2, 2)


def test_outputs_get_the_strides_that_the_caller_expects() -> None:
    b = Builder()
    x = b.value((integer(3), integer(4)), f32)
    y = library(b, "relu", torch.ops.aten.relu.default, (x,), x.shape)
    graph = b.finish((x,), (y,), layouts={y: Layout((integer(1), integer(3)))})
    plan = plan_of(graph)
    assert isinstance(plan.outputs[0], int)
    assert plan.buffers[plan.outputs[0]].spec.strides == (integer(1), integer(3))


def test_a_constant_output_is_copied() -> None:
    b = Builder()
    x = b.value((integer(2),), f32)
    c = b.constant(torch.ones(2), (integer(2),), f32)
    plan = plan_of(b.finish((x,), (c,)), shares=(Share(Shares.INPUT, 0),))
    assert any(isinstance(s, Copy) for s in plan.segments[0].steps)


def test_writes_come_last_and_save_what_they_would_overwrite() -> None:
    b = Builder()
    x, y = b.value((N,), f32), b.value((N,), f32)
    z = library(b, "relu", torch.ops.aten.relu.default, (x,), (N,))
    graph = b.finish((x, y), (z,), writes=(Write(0, y), Write(1, x)))
    copies = [s for s in plan_of(graph).segments[0].steps if isinstance(s, Copy)]
    assert [(c.target, c.source) for c in copies] == [(3, 1), (4, 0), (0, 3), (1, 4)]


def test_views_become_tensors_only_for_libraries() -> None:
    b = Builder()
    x = b.value((integer(4), integer(6)), f32)
    v = b.value((integer(6),), f32)
    layout = Layout((integer(1),))
    call = LibraryCall("relu", torch.ops.aten.relu.default, (Operand(0),), (), ((integer(1),),))
    out = b.value((integer(6),), f32)
    op = Op("relu", (v,), (out,), call=call)
    graph = Graph((x,), (), (out,))
    cover = Cover(graph, (ViewStep(v, x, layout, integer(12)), LibraryStep(op, choice=False)))
    plan = build_plan(cover, {})
    assert [type(s) for s in plan.segments[0].steps] == [View, CallStep]
    assert plan.buffers[1].source == 0 and plan.buffers[1].offset is integer(12)


def test_a_view_call_keeps_its_operand() -> None:
    b = Builder()
    x = b.value((integer(4),), f32)
    y = library(b, "relu", torch.ops.aten.relu.default, (x,), (integer(4),))
    v = library(b, "view", torch.ops.aten.alias.default, (y,), (integer(4),))
    plan = plan_of(b.finish((x,), (v,)))
    assert plan.buffers[2].source == 1 and plan.segments[0].frees[-1] == ()


def test_a_size_from_data_starts_a_new_segment() -> None:
    b = Builder()
    x = b.value((integer(4),), f32)
    n = symbol("u0")
    found = library(b, "nonzero", torch.ops.aten.nonzero.default, (x,), (n, integer(1)))
    y = library(b, "relu", torch.ops.aten.relu.default, (found,), (n, integer(1)))
    plan = plan_of(b.finish((x,), (y,)))
    first, second = plan.segments
    assert first.measures[0].symbol == "u0" and len(second.steps) == 1
    assert "measure u0" in plan.show()


def test_a_number_from_data_is_measured() -> None:
    b = Builder()
    x = b.value((), i64)
    n = symbol("u0")
    call = LibraryCall("item", torch.ops.aten._local_scalar_dense.default, (Operand(0),))
    b.library(call, (x,), (), binds=(n,))
    plan = plan_of(b.finish((x,), (n,)))
    assert plan.segments[0].measures[0].dim == -1


def test_a_number_is_not_read_before_the_call_that_tells_it() -> None:
    """A kernel would take it as 0."""
    b = Builder()
    x, n = b.value((integer(4),), f32), symbol("u0")
    tell = LibraryCall("item", torch.sum, (Operand(0),), (), ())
    b.library(tell, (x,), (), binds=(n,))
    use = LibraryCall("times", torch.mul, (Operand(0), n), (), ((integer(1),),))
    (out,) = b.library(use, (x,), [((integer(4),), f32)])
    graph = b.finish((x,), (out,))
    plan_of(graph)
    late = Cover(graph, tuple(LibraryStep(op, choice=False) for op in reversed(graph.ops)))
    with pytest.raises(VerifyError, match="reads u0 before"):
        build_plan(late, {})


# --- coverage -------------------------------------------------------------------------------


def test_coverage_of_library_steps() -> None:
    b, x, _, z = simple()
    covered = coverage_of(cover_of(b.finish((x,), (z,))))
    assert (covered.ops, covered.generated, covered.kernels) == (2, 0, 0)
    assert covered.refused() == ("exp", "relu")
    assert str(covered) == (
        "generated 0 of 2 ops in 0 kernels; "
        "2 as library calls: exp x1 (no declaration), relu x1 (no declaration)"
    )


def test_strict_looks_at_need_only() -> None:
    one = Coverage(3, 1, 1, (Row("mm", "contraction", 1),), (Row("topk", "sort", 1),))
    assert one.refused() == ()
    both = one + Coverage(2, 1, 1, (Row("mm", "contraction", 1),), (Row("fft", "complex", 1),))
    assert both.refused() == ("fft",) and both.choice[0].count == 2
    assert str(both).startswith(
        "generated 2 of 5 ops in 2 kernels of 2 graphs; 2 as library calls by choice: mm x2"
    )
    assert str(one.around(one)).startswith("generated 2 of 6 ops in 2 kernels; "), "a loop's body is no graph"
