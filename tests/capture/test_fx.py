"""What capture keeps of a program besides its arithmetic: names, layouts, mutation, library calls, bound symbols."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
import pytest
import torch
from tests.support.ops.captured_op import agree, capture, library_calls, same, trace
from tests.support.ops.cases import Case
from tests.support.ops.more_cases import CASES
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from tilewright.capture.aten import decompositions
from tilewright.capture.fx import from_fx
from tilewright.capture.node import mutations
from tilewright.errors import UnsupportedError
from tilewright.interp import run_graph, run_values
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph, LibraryCall, Operand, Value
from tilewright.ir.sizes import dims
from tilewright.runtime.plan.tensors import lay_out


def test_writes() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * 2

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    graph = capture(step, [x, y])
    (write,) = graph.writes
    assert write.input == 0
    values, _ = run_values(graph, [x.numpy(), y.numpy()])
    np.testing.assert_allclose(values[write.value], (x + y).numpy(), rtol=1e-6)
    (out,) = run_graph(graph, [x.numpy(), y.numpy()])
    np.testing.assert_allclose(out, ((x + y) * 2).numpy(), rtol=1e-6)


def test_a_write_of_another_type_is_converted() -> None:
    def step(x: torch.Tensor) -> None:
        x.copy_(torch.arange(4))

    graph = capture(step, [torch.zeros(3, 4)])
    (write,) = graph.writes
    assert write.value.shape == graph.inputs[0].shape  # type: ignore[union-attr]
    assert write.value.dtype == graph.inputs[0].dtype  # type: ignore[union-attr]


def test_aliases_and_copies() -> None:
    """Outputs that are one tensor stay one value; a clone is a value of its own."""
    y = torch.randn(3)
    graph = capture(lambda x: [(z := x + 1), z, z.clone()], [y])
    first, second, third = graph.outputs
    assert first is second and third is not first


def test_layouts() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    graph = capture(lambda x: (x + 1, (x + 1).contiguous(), x.new_ones(3, 4).t() + 0), [image])

    def strides(v: object) -> tuple[int, ...]:
        assert isinstance(v, Value)
        return tuple(dims.static(s) or 0 for s in graph.layouts[v].strides)

    assert strides(graph.inputs[0]) == image.stride()
    assert [strides(v) for v in graph.outputs] == [image.stride(), (60, 20, 5, 1), (1, 4)]


def test_frozen() -> None:
    def affine(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    x, w = torch.randn(2, 3), torch.randn(3, 4)
    gm = trace(affine, [x, w])
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    graph = from_fx(gm, frozen={names[1]: w})
    assert len(graph.inputs) == 1 and len(graph.constants) == 1
    (out,) = run_graph(graph, [x.numpy()])
    np.testing.assert_allclose(out, (x @ w).numpy(), rtol=1e-5)


def test_host_scalars() -> None:
    graph = capture(
        lambda x: (x * x.shape[0], x.shape[0] // 2, x.shape[0] * 1.5), [torch.randn(6, 3)], [[True, False]]
    )
    scaled, half, _ = graph.outputs
    assert isinstance(scaled, Value) and isinstance(half, Expr)
    got = run_graph(graph, [np.ones((8, 3), np.float32)])
    assert np.all(np.asarray(got[0]) == 8) and got[1:] == [4, 12.0]


def test_symbolic_scalar_arguments() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        n = x.shape[0]
        return [
            x / n,
            x.sum(0) / (n - 1) ** 0.5,
            torch.full((2,), n),
            torch.arange(1, n + 1, 2),
            x[n // 2 :] + 0,
        ]

    graph = capture(program, [torch.randn(6, 3)], [[True, False]])
    assert library_calls(graph) == []
    for n in (6, 9):
        agree(graph, program, [torch.randn(n, 3)])


def _captured_with_data_dependence(fn: object, *args: torch.Tensor) -> Graph:
    import torch._dynamo.config

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        gm = make_fx(fn, decomposition_table=decompositions(), tracing_mode="symbolic")(*args)  # type: ignore[arg-type]
    return from_fx(gm)


def test_sizes_from_data_are_bound() -> None:
    x = torch.tensor([0.0, 2.0, 0.0, 5.0])
    graph = _captured_with_data_dependence(lambda x: x.nonzero() * 2, x)
    assert library_calls(graph) == ["aten.nonzero"]
    (out,) = run_graph(graph, [x.numpy()])
    np.testing.assert_array_equal(out, [[2], [6]])


def test_scalars_from_data_are_bound() -> None:
    x = torch.tensor([3, 4])
    graph = _captured_with_data_dependence(lambda x: x * x.max().item(), x)
    (read,) = [op for op in graph.ops if op.call is not None]
    assert len(read.binds) == 1 and read.outputs == ()
    (out,) = run_graph(graph, [x.numpy()])
    np.testing.assert_array_equal(out, [12, 16])


def test_random_calls_keep_their_order() -> None:
    graph = capture(lambda x: x + torch.rand_like(x) + torch.rand_like(x), [torch.zeros(3)])
    calls = [op.call for op in graph.ops if op.call is not None]
    assert len(calls) == 2 and not any(c.pure for c in calls) and calls[0].reason == "random"


def test_reasons() -> None:
    def program(x: torch.Tensor, w: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        image = torch.nn.functional.conv2d(x[None, None], k)
        return [x @ w, image, x.sort(1).values, torch.view_as_real(torch.fft.rfft(x))]

    graph = capture(program, [torch.randn(4, 4), torch.randn(4, 4), torch.randn(1, 1, 3, 3)])
    declared = {o.name: o.call.reason for o in graph.origins if o.call is not None and o.call.reason}
    assert declared["aten.mm"] == "contraction" and declared["aten.convolution"] == "convolution"
    assert declared["aten.sort"] == "sort" and declared["aten._fft_r2c"] == "complex"


def test_origins() -> None:
    """Every op belongs to a captured node, which knows its place in the user's file; views are marked."""
    graph = capture(lambda x: torch.softmax(x.transpose(0, 1), -1), [torch.randn(3, 4)])
    names = {o.name: o for o in graph.origins}
    assert names["aten.transpose"].view and not names["aten._softmax"].view
    assert all(op.origin >= 0 for op in graph.ops)
    assert len([op for op in graph.ops if op.origin == names["aten._softmax"].id]) == 4


def test_place() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)

    exported = torch.export.export(Model(), (torch.randn(3),), strict=False).run_decompositions(
        decompositions()
    )
    graph = from_fx(exported.graph_module)
    assert "test_fx.py:" in graph.origins[0].place


def test_tensors_inside_the_graph_are_constants() -> None:
    table = torch.tensor([1.0, 2.0, 4.0])
    gm = make_fx(lambda x: x * table, decomposition_table=decompositions(), tracing_mode="real")(
        torch.ones(3)
    )
    for node in gm.graph.nodes:
        node.meta.setdefault("val", node.meta.get("tensor_meta") and torch.ones(3, device="cpu"))
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = table
    graph = from_fx(gm)
    (kept,) = graph.constants.values()
    assert isinstance(kept, torch.Tensor) and torch.equal(kept, table)


def test_an_unknown_node_is_refused() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    graph.output(graph.call_method("relu", (x,)))
    with pytest.raises(UnsupportedError, match="call_method"):
        from_fx(torch.fx.GraphModule({}, graph))


def test_a_write_into_an_intermediate_is_refused() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[0].copy_(x[1])
        return y

    gm = make_fx(program, tracing_mode="fake")(torch.randn(3, 4))
    assert [n.target for n in mutations(gm)] == [torch.ops.aten.copy_.default]
    with pytest.raises(UnsupportedError, match="intermediate"):
        from_fx(gm)


def _operands(call: LibraryCall, given: list[torch.Tensor]) -> tuple[object, dict[str, object]]:
    def fill(a: object) -> object:
        if isinstance(a, Operand):
            return given[a.index]
        if isinstance(a, (list, tuple)):
            return type(a)(fill(x) for x in a)
        return a

    return fill(call.args), {k: fill(a) for k, a in call.kwargs}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_library_calls_mean_the_same(case: Case) -> None:
    """The library call that each origin remembers computes what its declaration does."""
    args = [a.make({"a": 3, "b": 5, "c": 4, "d": 2}, case.dtypes[0]) for a in case.args]
    graph = capture(case.fn, args)
    with np.errstate(all="ignore"):
        values, _ = run_values(graph, [t if t.dtype is torch.bfloat16 else t.numpy() for t in args])
    for origin in graph.origins:
        if origin.call is None or "empty" in origin.name:
            continue
        lies = zip_longest(origin.inputs, origin.call.lies)
        held = [_laid(_tensor(values[v]), strides) for v, strides in lies]
        given, named = _operands(origin.call, held)
        assert isinstance(given, tuple)
        result = [
            r for r in tree_leaves(origin.call.function(*given, **named)) if isinstance(r, torch.Tensor)
        ]
        for v, r in zip(origin.outputs, result, strict=False):
            same(np.asarray(values[v]), r)
        assert len(origin.outputs) <= len(result)


def _laid(t: torch.Tensor, strides: tuple[Expr, ...] | None) -> torch.Tensor:
    return t if strides is None else lay_out(t, [dims.evaluate(s, {}) for s in strides])


def _tensor(x: object) -> torch.Tensor:
    array = np.asarray(x)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.ascontiguousarray(array).copy()).reshape(array.shape)


def test_composites_that_are_registered_late_are_taken_apart() -> None:
    known = decompositions()
    known.clear()  # whoever asks gets a table of his own
    with torch.library._scoped_library("tilewright_late", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
        assert torch.ops.tilewright_late.twice.default in decompositions()
    assert len(decompositions()) > 500
