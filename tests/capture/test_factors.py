"""Sizes that a program was traced as multiples of a number: that number times another size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.one_kernel import one_kernel
from tests.support.triton.harness import Job, interpret
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import tilewright
from tilewright.analysis.size_hints import SizeHints
from tilewright.capture.environment import shape_env, traced_sizes
from tilewright.capture.fx import from_fx
from tilewright.capture.symbols import factors
from tilewright.errors import TilewrightError
from tilewright.ir.graph import Graph, Value
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.host import number
from tilewright.options import Options
from tilewright.rewrite.normal.normalise import normalise
from tilewright.schedule.solver import Solver
from tilewright.target import preset


def grouped(x: Tensor, w: Tensor) -> Tensor:
    h = x.reshape(x.shape[0], 8, -1)
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    return F.silu(h.reshape(x.shape) * w[:, None, None])


def traced(*shapes: tuple[int, ...]) -> torch.fx.GraphModule:
    """With every size unknown."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    contexts = [StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(s)) for s in shapes]
    given = [
        mode.from_tensor(torch.empty(s), symbolic_context=c) for s, c in zip(shapes, contexts, strict=True)
    ]
    return make_fx(grouped, tracing_mode="symbolic")(*given)


def test_groups_of_channels_are_a_dim_of_their_own() -> None:
    gm = traced((5, 24, 7, 6), (24,))
    (factor,) = factors(shape_env(gm)).values()
    graph = from_fx(gm)
    assert factor == 8 and all(op.call is None for op in graph.ops), "views that rely on it are plain"
    x = graph.inputs[0]
    assert isinstance(x, Value)
    (channels,) = dims.symbols_of(x.shape[1])
    assert dims.equal(x.shape[1], dims.mul(channels, dims.integer(8)))
    assert traced_sizes(gm)[repr(channels)] == 3


def test_one_kernel_with_rows_on_chip(tmp_path: Path) -> None:
    """As where channels are known: a program for each range of lengths, others of rows that begin anywhere, and one for
    all."""
    gm = traced((5, 24, 7, 6), (24,))
    graph, sizes = normalise(from_fx(gm)), traced_sizes(gm)
    x, w = torch.randn(5, 24, 7, 6), torch.randn(24)
    solver = Solver(preset("sm_90"), Options(), hints=SizeHints(sizes))
    scheduled = solver.solve(one_kernel(graph), graph.layouts)
    programs = [b.program for b in scheduled.buckets if number(b.condition, sizes)]
    assert len(programs) == 5, "three lengths, two of them with rows that begin anywhere"
    assert not number(scheduled.buckets[0].condition, sizes | sizes_of_groups(graph, 9)), (
        "more than were seen"
    )
    order = tuple(repr(s) for s in graph.symbols())
    arrays = {4: x.numpy(), 1: w.numpy()}
    inputs = [arrays[len(v.shape)] for v in scheduled.kernel.inputs]
    jobs = [
        Job(p, [*inputs, None], {n: sizes[n] for n in order}, order)
        for p in (*programs[:2], scheduled.program)
    ]
    for outcome in interpret(tmp_path, jobs):
        got = torch.from_numpy(outcome.arrays[-1]).reshape(x.shape)
        torch.testing.assert_close(got, grouped(x, w), rtol=1e-4, atol=1e-5)


def sizes_of_groups(graph: Graph, size: int) -> dict[str, int]:
    """`size` channels in each group."""
    x = graph.inputs[0]
    assert isinstance(x, Value)
    return {repr(s): size for s in dims.symbols_of(x.shape[1])}


@pytest.mark.parametrize("channels", [8, 24, 64])
def test_calls_of_other_sizes(channels: int) -> None:
    run = torch.compile(grouped, backend="tilewright", dynamic=True)
    for n, c, h, w in ((3, 16, 5, 4), (2, channels, 7, 3), (4, 32, 6, 6)):
        x, weight = torch.randn(n, c, h, w), torch.randn(c)
        torch.testing.assert_close(run(x, weight), grouped(x, weight), rtol=1e-4, atol=1e-5)


def apart(x: Tensor) -> Tensor:
    return torch.softmax(x.unflatten(1, (8, -1)), 2).flatten(1, 2)


def test_what_is_no_multiple_is_refused_as_eager_does() -> None:
    made = tilewright.compile(apart, (torch.randn(3, 16, 5),), dims={"x": {1: "c", 2: "h"}})
    x = torch.randn(3, 40, 6)
    torch.testing.assert_close(made(x), apart(x))
    for wrong in (12, 4):
        with pytest.raises(
            (RuntimeError, ValueError, TilewrightError), match=r"shape|unflatten|must be 8 times"
        ):
            made(torch.randn(3, wrong, 6))
