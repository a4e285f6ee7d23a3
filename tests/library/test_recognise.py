"""Regions that a routine of the library computes: found however they are written, and nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import Function
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.capture.aten import decompositions
from tilewright.capture.fx import from_fx
from tilewright.interp.graph import run_graph
from tilewright.ir.graph import Graph, Value
from tilewright.ir.sizes import dims
from tilewright.library.library_graph import without_operand_makers
from tilewright.library.recognise import AttentionRegion, as_call, routine_of, routine_seconds
from tilewright.partition.choose_kernels import Prices, RegionPolicy, choose_kernels
from tilewright.partition.regions import find_regions
from tilewright.rewrite.normal.normalise import normalise
from tilewright.target import preset

HOPPER = preset("sm_90")
S, D = 256, 32
SHAPE = (1, 2, S, D)
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def hidden(q: Tensor, k: Tensor, first: int = 1) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(first)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k).float(), -1).to(v.dtype) @ v


def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.full((q.shape[-2], k.shape[-2]), -torch.inf, dtype=q.dtype).triu(1)
    return torch.softmax((scores(q, k) + mask).float(), -1).to(v.dtype) @ v


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k).masked_fill(hidden(q, k), -torch.inf), -1) @ v


def compared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return torch.softmax(torch.where(rows >= columns, scores(q, k), -torch.inf), -1) @ v


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = (q @ k.transpose(-1, -2)).float() * 0.37
    e = torch.exp(z - z.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(v.dtype) @ v


def places_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return added(q, k, v).transpose(1, 2).contiguous()


def with_scores(change: Callable[[Tensor], Tensor]) -> Run:
    return lambda q, k, v: torch.softmax(change(scores(q, k)).float(), -1).to(v.dtype) @ v


def position(change: Callable[[Tensor, Tensor], Tensor]) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return torch.softmax(scores(q, k).masked_fill(change(i, j), -torch.inf), -1) @ v

    return run


def slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    slope = torch.arange(q.shape[1])[:, None, None] * 0.01
    return torch.softmax(scores(q, k).float() + slope * distance, -1).to(v.dtype) @ v


def graph_of(run: Run, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float16) -> Graph:
    return graph_of_inputs(run, [torch.zeros(shape, dtype=dtype) for shape in shapes])


def graph_of_inputs(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Graph:
    inputs = tuple(inputs)
    program = torch.export.export(Function(run), inputs, strict=False)
    return normalise(from_fx(program.run_decompositions(decompositions()).graph_module))


def windows(x: Tensor, m: int) -> Tensor:
    b, h, s, d = x.shape
    return x.reshape(b, h, -1, 2, 2, m, d).transpose(3, 4).reshape(b, h, s, d)


def region_of(run: Run, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float16) -> Graph:
    graph = graph_of(run, shapes, dtype)
    (region,) = find_regions(graph, NO_HINTS, anywhere=True)
    return region.graph(graph)


def found(run: Run, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> AttentionRegion | None:
    return routine_of(region_of(run, shapes or (SHAPE,) * 3, dtype), HOPPER)


@pytest.mark.parametrize(
    ("run", "causal", "scale"),
    [(plain, False, D**-0.5), (added, True, D**-0.5), (filled, True, D**-0.5), (compared, True, D**-0.5),
     (by_hand, False, 0.37), (places_first, True, D**-0.5)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_is_found_however_it_is_written(
    run: Run, causal: bool, scale: float, dtype: torch.dtype
) -> None:
    shape = (1, S, 2, D) if run is places_first else SHAPE
    routine = found(run, *(shape,) * 3, dtype=dtype)
    assert routine is not None and routine.causal == causal
    assert routine.scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("run", [plain, added, by_hand, places_first])
def test_the_call_computes_the_region(run: Run) -> None:
    shape = (1, S, 2, D) if run is places_first else SHAPE
    region = region_of(run, (shape,) * 3)
    routine = routine_of(region, HOPPER)
    assert routine is not None
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(np.float16) for _ in range(3)]
    (wanted,), (made,) = (run_graph(g, inputs) for g in (region, as_call(region, routine, region.fresh_id())))
    np.testing.assert_allclose(
        np.asarray(made, np.float32), np.asarray(wanted, np.float32), atol=5e-3
    )  # scores of 8 that are rounded move weights so much


def test_heads_and_batches_may_lie_anywhere() -> None:
    assert found(added, *((3, 2, S, D),) * 3) is not None
    assert found(added, *((2, S, D),) * 3) is not None
    assert found(added, *((S, D),) * 3) is not None
    wide = found(plain, SHAPE, SHAPE, (1, 2, S, 48))
    assert wide is not None and wide.flops() == 2 * 2 * S * S * (D + 48)


@pytest.mark.parametrize(
    "run",
    [
        with_scores(lambda s: 50 * torch.tanh(s / 50)),
        with_scores(lambda s: s.clamp(max=90)),
        with_scores(lambda s: s + 1e-3 * s * s),
        position(lambda i, j: (j > i) | (j <= i - 100)),
        position(lambda i, j: (j > i) & (j >= 17)),
        position(lambda i, j: j > i + 1),
        position(lambda i, j: (i == 77) & (j == 3)),
        position(lambda i, j: j < i),
        position(lambda i, j: i // 64 != j // 64),
        slopes,
        lambda q, k, v: torch.sigmoid(scores(q, k)) @ v,
        lambda q, k, v: torch.softmax(scores(q, k), -2) @ v,
        lambda q, k, v: torch.softmax(scores(q, k), -1).square() @ v,
        lambda q, k, v: torch.softmax(scores(q, k.flip(-2)), -1) @ v,
        lambda q, k, v: F.dropout(torch.softmax(scores(q, k), -1), 0.0) @ v * 2,
        lambda q, k, v: added(q, k, v).clamp(-2, 2),
        lambda q, k, v: torch.where(plain(q, k, v).abs() > 2, 0, plain(q, k, v)),
        lambda q, k, v: torch.nan_to_num(added(q, k, v)),
        with_scores(lambda s: s.clamp(-1e4, 1e4)),
        with_scores(lambda s: torch.where(s > 2e4, 0, s)),
        lambda q, k, v: added(windows(q, 8), k, v),
        lambda q, k, v: plain(q.flip(1), k.flip(1), v.flip(1)),
    ],
)
def test_other_functions_are_not(run: Run) -> None:
    assert found(run) is None


def test_what_the_library_would_not_do_better() -> None:
    assert found(added, *((1, 2, 64, D),) * 3) is None, "few queries"
    assert found(added, *(SHAPE,) * 3, dtype=torch.float32) is None
    assert routine_of(region_of(added, (SHAPE,) * 3), preset("sm_80")) is None, "nobody has measured it"
    assert found(added, SHAPE, (1, 2, 2 * S, D), (1, 2, 2 * S, D)) is not None
    aligned = position(lambda i, j: j > i + S)
    assert found(aligned, SHAPE, (1, 2, 2 * S, D), (1, 2, 2 * S, D)) is None, (
        "its mask starts at the first key"
    )


def test_a_region_becomes_the_call_where_that_is_the_fastest() -> None:
    graph = graph_of(added, (SHAPE,) * 3)

    def prices(library: float) -> Prices:
        def routine(region: Graph) -> tuple[float, Graph] | None:
            r = routine_of(region, HOPPER)
            return None if r is None else (routine_seconds(r, HOPPER), as_call(region, r, region.fresh_id()))

        return Prices(
            NO_HINTS, lambda k, layouts: 1.0, lambda region: library, lambda region: library, routine=routine
        )

    unchanged = lambda g: (g, ())  # noqa: E731
    mapped = choose_kernels(graph, prices(1.0), unchanged, RegionPolicy("modelled", 132))
    calls = [op for op in mapped.graph.ops if op.call is not None]
    assert [op.name for op in calls] == ["scaled_dot_product_attention"] and calls[0].absorbed
    assert "one library call" in str(mapped.regions[0])
    for mode, library in (("modelled", 1e-9), ("library", 1.0), ("inside", 1.0)):
        other = choose_kernels(graph, prices(library), unchanged, RegionPolicy(mode, 132))  # type: ignore[arg-type]
        assert all(op.call is None for op in other.graph.ops)


def unpacked(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return plain(q, k.to(q.dtype) * scale, v)


def test_operands_may_be_made_before_the_call() -> None:
    """Keys of bytes are unpacked by what stands beside the routine, which reads them as they are then."""
    inputs = [torch.empty(SHAPE).half(), torch.empty(SHAPE, dtype=torch.int8), torch.empty(SHAPE).half()]
    graph = graph_of_inputs(unpacked, [*inputs, torch.empty(1, 2, S, 1).half()])
    (region,) = (r.graph(graph) for r in find_regions(graph, NO_HINTS, anywhere=True))
    assert routine_of(region, HOPPER) is None
    apart = without_operand_makers(region)
    assert apart is not None
    makers, core = apart
    assert {op.name for op in makers} >= {"mul"} and len(core.inputs) == 3
    routine = routine_of(core, HOPPER)
    assert routine is not None
    whole = region.with_ops((*makers, *as_call(core, routine, region.fresh_id()).ops))
    whole.verify()
    rng = np.random.default_rng(0)
    given = [
        (rng.standard_normal([dims.static(n) or 1 for n in v.shape])).astype(
            np.float16 if v.dtype.is_float else np.int8
        )
        for v in region.inputs
        if isinstance(v, Value)
    ]
    (wanted,), (made,) = (run_graph(g, given) for g in (region, whole))
    np.testing.assert_allclose(np.asarray(made, np.float32), np.asarray(wanted, np.float32), atol=5e-3)


def test_a_region_whose_operands_are_given_has_nothing_before_it() -> None:
    assert without_operand_makers(region_of(plain, (SHAPE,) * 3)) is None


def test_a_machine_without_the_routine() -> None:
    slow = replace(HOPPER, fused_attention=0.0)
    assert routine_of(region_of(added, (SHAPE,) * 3), slow) is None
