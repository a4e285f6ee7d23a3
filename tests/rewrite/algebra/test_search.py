"""The search over rules on attention and its relatives: what moves, what it saves, and that nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.rewrite.algebra.algebra_cases import agree
from tests.support.library_calls import captured
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.accuracy import compare
from tilewright.interp import REALS, run_graph
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f16, f32
from tilewright.ir.expr import Expr, call, const, integer, walk
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.ops import contract, norm, pointwise, reduce, view
from tilewright.ir.ops.common import pointwise as each
from tilewright.library.select import select
from tilewright.rewrite import interpret
from tilewright.rewrite.algebra.search import Rearranged, Search, program_of, rearrange, regions
from tilewright.rewrite.normal.normalise import normalise

S, H, D = 48, 2, 4
SMALL = Search(least_bytes=1, steps=40)


class Of(nn.Module):
    """A module of a function."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


def product(q: Tensor, k: Tensor) -> Tensor:
    return q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2) / math.sqrt(q.shape[-1])


def causal(s: Tensor) -> Tensor:
    return s + torch.full(s.shape[-2:], -math.inf, dtype=s.dtype).triu(1)


def weighted(p: Tensor, v: Tensor) -> Tensor:
    return (p.to(v.dtype) @ v.transpose(1, 2)).transpose(1, 2)


def softmax(s: Tensor) -> Tensor:
    return torch.softmax(s.float(), -1)


def vanilla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(softmax(causal(product(q, k))), v)


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    return weighted(softmax(product(q, k).masked_fill(future, -math.inf)), v)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = causal(product(q, k)).float()
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return weighted(e / e.sum(-1, keepdim=True), v)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(softmax(causal(torch.tanh(product(q, k) / 50) * 50)), v)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return weighted(softmax(product(q, k) + bias), v)


def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Padding that the program makes itself and gathers for pairs of places, as general mask functions do."""
    rows, places = torch.arange(q.shape[0], device=q.device), torch.arange(q.shape[1], device=q.device)
    real = (places * rows[:, None]) % 7 != 3
    seen = real[rows[:, None, None, None], places] & (places[:, None] + 4 >= places)
    return weighted(softmax(product(q, k).masked_fill(~seen, -math.inf)), v)


def column_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    p = softmax(causal(product(q, k)))
    return weighted(p, v), p.sum(2)


def moments(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    p = softmax(causal(product(q, k)))
    return weighted(p, v), p.sum(2), (p * p).sum(2)


def pooled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    p = softmax(causal(product(q, k)))
    return weighted(p, v), F.avg_pool1d(p.sum(2), 5, 1, 2)


def thresholds(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    p = softmax(causal(product(q, k)))
    return weighted(p, v), (p >= t).any(2)


def tempered(q: Tensor, k: Tensor, v: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
    z = causal(product(q, k)).float()
    return weighted(softmax(z), v), softmax((z - torch.log(noise)) / 1.5).sum(2)


def _extra(function: Callable[..., object], dtype: torch.dtype) -> list[Tensor]:
    if function is biased:
        return [torch.randn(H, S, S).to(dtype)]
    if function is thresholds:
        return [1.003 / torch.arange(1, S + 1)[:, None].expand(S, S).contiguous()]
    return [1 + torch.randn(1, H, S, S).abs()] if function is tempered else []


WORKLOADS = [vanilla, filled, by_hand, capped, biased, gathered]
WORKLOADS += [column_sums, moments, pooled, thresholds, tempered]


def example(
    function: Callable[..., object], dtype: torch.dtype = torch.float16, seed: int = 0
) -> list[Tensor]:
    torch.manual_seed(seed)
    return [*(torch.randn(1, S, H, D).to(dtype) for _ in range(3)), *_extra(function, dtype)]


def found(function: Callable[..., object], dtype: torch.dtype = torch.float16) -> tuple[Graph, Rearranged]:
    graph = normalise(captured(Of(function), example(function, dtype)), interpret)
    return graph, rearrange(graph, search=SMALL)


def count(v: Value) -> int:
    """Elements of a value; sizes that are symbols count as S."""
    return math.prod(s.value if isinstance(s.value, int) else S for s in v.shape)


def is_large(v: Value) -> bool:
    return count(v) >= H * S * S


def factors_on_the_way(graph: Graph) -> list[Op]:
    """Ops that multiply or divide every score, but for a constant right in an exponent (which exp2 has anyway)."""
    out: list[Op] = []
    for op in graph.ops:
        if op.expr is None or not op.expr.is_pointwise or not is_large(op.output):
            continue
        inside = {n.args[0] for n in walk(op.expr.body[0]) if n.op == "exp"}
        if any(
            n.op in ("mul", "div") and n.dtype.is_float and n not in inside for n in walk(op.expr.body[0])
        ):
            out.append(op)
    return out


def statistics(graph: Graph, op: Op) -> set[str]:
    """Names of the reductions over scores that `op` depends on, other than products."""
    producer = graph.producer()
    names: set[str] = set()
    stack = list(op.inputs)
    while stack:
        p = producer.get(stack.pop())
        if p is not None:
            stack += p.inputs
            if p.expr is not None and p.expr.reduction is not None and any(is_large(v) for v in p.inputs):
                names.add(p.name)
    return names


def products(graph: Graph) -> list[Op]:
    return [
        op
        for op in graph.ops
        if op.expr is not None and op.expr.reduction is not None and op.name == "matmul"
    ]


# --- where factors go ------------------------------------------------------------


def is_scale(x: Expr) -> bool:
    return x.op == "mul" and x.args[-1].op == "const"


@pytest.mark.parametrize("function", WORKLOADS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["half", "single"])
def test_no_factor_is_left_on_the_scores(function: Callable[..., object], dtype: torch.dtype):
    """But for 1 / l where a sum over the queries reads it, of which every query has its own, and squares; and in half
    precision for a scale that cannot go into the exponent: an operand would be rounded anew."""
    graph, got = found(function, dtype)
    assert len(factors_on_the_way(graph)) > len(factors_on_the_way(got.graph))
    left = factors_on_the_way(got.graph)
    scaled = [op for op in left if op.expr is not None and any(map(is_scale, walk(op.expr.body[0])))]
    assert len(scaled) == (dtype is torch.float16 and function in (biased, capped, tempered))
    left = [op for op in left if op not in scaled]
    rows = [op for op in left if op.name == "softmax"]
    squares = [
        op
        for op in left
        if len(op.inputs) == 1 and op.expr is not None and op.expr.body[0].args[0].op == "read"
    ]
    assert len(rows) == (function in (column_sums, moments, pooled, thresholds, tempered))
    assert set(left) <= {*rows, *squares} and len(squares) == (function is moments)


@pytest.mark.parametrize("function", WORKLOADS)
def test_the_product_with_values_waits_for_no_sum(function: Callable[..., object]):
    """1 / l moves behind it."""
    graph, got = found(function)
    assert statistics(graph, products(graph)[-1]) == {"max", "sum"}
    assert statistics(got.graph, products(got.graph)[-1]) == {"max"}


def scales(graph: Graph) -> list[Op]:
    """Scaled copies of operands."""
    return [op for op in graph.ops if op.name == "scale"]


def test_the_scale_goes_into_the_exponent_or_else_into_an_operand():
    """A mask of -inf does not notice a factor; a bias from outside, tanh, and noise do. Operands in half precision
    would be rounded anew."""
    for function in (vanilla, filled, by_hand, column_sums, moments, pooled, thresholds):
        assert not scales(found(function)[1].graph), function
    for function in (biased, capped, tempered):
        assert not scales(found(function, torch.float16)[1].graph), function
        graph = found(function, torch.float32)[1].graph
        (only,) = scales(graph)
        assert only.inputs[0] in graph.inputs and not is_large(only.output)
        # 1 / sqrt(4), and with the cap 1 / 100 as one factor
        assert only.expr is not None
        assert [n.value for n in walk(only.expr.body[0]) if n.op == "const" and n.dtype.is_float] == [
            Fraction(1, 100) if function is capped else 0.5
        ]


def test_what_a_part_knows_of_other_ops_is_not_made_again():
    _, got = found(gathered)
    made = [v for op in got.graph.ops for v in op.outputs]
    assert got.changes and len(set(made)) == len(made)


def test_what_was_applied_is_reported():
    _, got = found(vanilla)
    (change,) = got.changes
    assert [a.rule for a in change.applied].count("factor leaves sum of rounded") == 1
    assert {a.rule for a in change.applied} == {
        "factor leaves sum of rounded", "factor leaves maximum", "factor stands in exp"}  # fmt: skip
    assert change.after < change.before and "factor leaves maximum at max" in str(change)


# --- that it is right ------------------------------------------------------------


def small(function: Callable[..., object], dtype: torch.dtype) -> tuple[Graph, Rearranged]:
    args = [
        a[:, :10] if a.dim() == 4 and a.shape[1] == S else a[..., :10, :10].contiguous()
        for a in example(function)
    ]
    args = [a.to(dtype) if k < 3 or function is biased else a for k, a in enumerate(args)]
    graph = normalise(captured(Of(function), args), interpret)
    return graph, rearrange(graph, search=SMALL)


@pytest.mark.parametrize("function", [f for f in WORKLOADS if f is not thresholds])
def test_the_same_in_exact_arithmetic(function: Callable[..., object]):
    graph, got = small(function, torch.float32)
    assert got.changes and agree(graph, got.graph)


@pytest.mark.parametrize("function", WORKLOADS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_fp64_rule(function: Callable[..., object], dtype: torch.dtype):
    """Also for logits in the hundreds."""
    _, got = found(function, dtype)
    for large in (1.0, 12.0):
        args = example(function, dtype, seed=3)
        args[0] = args[0] * large
        ours = run_graph(got.graph, args)
        with torch.no_grad():
            eager = _listed(function(*args))
        wide = _wide(function, args)
        for y, e, r in zip(ours, eager, wide, strict=True):
            mine = (
                torch.from_numpy(np.asarray(y, np.float32)).to(e.dtype)
                if e.is_floating_point()
                else torch.tensor(y)
            )
            verdict = compare(mine, e, r)
            assert verdict.passed, str(verdict)


def _listed(x: object) -> list[Tensor]:
    return list(x) if isinstance(x, tuple) else [x]  # type: ignore[list-item]


def _wide(function: Callable[..., object], args: Sequence[Tensor]) -> list[Tensor]:
    """The same program in fp64, its conversions included."""
    graph = normalise(captured(Of(function), args), interpret)
    outs = [torch.from_numpy(np.asarray(x)) for x in run_graph(graph, args, REALS)]
    return [o.double() if o.is_floating_point() else o for o in outs]


def test_rows_without_keys_and_infinite_inputs():
    """NaN and infinities stand where they stood."""

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        p = softmax(product(q, k).masked_fill(mask, -math.inf))
        return weighted(p, v), p.sum(2)

    for dtype in (torch.float16, torch.float32):
        args = [*example(vanilla, dtype), torch.rand(S, S) < 0.3]
        args[3][7] = True
        graph = normalise(captured(Of(masked), args), interpret)
        got = rearrange(graph, search=SMALL)
        assert got.changes
        for change in (
            None,
            (0, 5, math.inf),
            (1, 9, -math.inf),
            (2, 11, math.inf),
            (0, 20, math.nan),
            (1, 3, 6e4),
        ):
            trial = [a.clone() for a in args]
            if change is not None:
                which, place, value = change
                trial[which][0, place, 1, 2] = value
            for a, b in zip(run_graph(graph, trial), run_graph(got.graph, trial), strict=True):
                x, y = (torch.from_numpy(np.asarray(t, np.float32)) for t in (a, b))
                assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.isinf(), y.isinf()), change
            assert np.isnan(np.asarray(run_graph(got.graph, args)[0], np.float32)[0, 7]).all()


@pytest.mark.parametrize("how", ["fill", "nan_to_num"])
def test_rows_that_the_program_itself_clears_stay_clear(how: str):
    """A row without keys has the sum NaN; weights are set to 0 there, and what they sum to is not divided by NaN."""

    def cleared(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        p = softmax(product(q, k).masked_fill(mask, -math.inf))
        return weighted(p.masked_fill(mask, 0.0) if how == "fill" else torch.nan_to_num(p), v)

    args = [*example(vanilla, torch.float32), torch.rand(S, S) < 0.3]
    args[3][7] = True
    graph = normalise(captured(Of(cleared), args), interpret)
    got = rearrange(graph, search=SMALL)
    (a,), (b,) = run_graph(graph, args), run_graph(got.graph, args)
    np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6)  # type: ignore[arg-type]
    assert np.isfinite(np.asarray(b)).all() and not np.asarray(b)[0, 7].any()


def safely(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A safe softmax gives 0 for a row without keys."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, -math.inf)
    return torch.ops.aten._safe_softmax(scores, -1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """So does torch's attention."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask)


@pytest.mark.parametrize(("attend", "moves"), [(safely, True), (fused, False)])
def test_softmax_that_may_see_nothing_gives_zeros(attend: Callable[..., Tensor], moves: bool):
    """The sum of such a row is taken as 1, also outside, where fused attention has it anyway."""
    args = [*example(vanilla, torch.float32), torch.rand(S, S) < 0.5]
    args[3][7] = False
    graph = normalise(captured(Of(attend), args), interpret)
    got = rearrange(graph, search=SMALL)
    assert ("factor leaves sum" in str(got.changes[0])) == moves
    (a,), (b,) = run_graph(graph, args), run_graph(got.graph, args)
    np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6)  # type: ignore[arg-type]
    assert not np.asarray(b)[0, :, 7].any()


# --- what it saves ------------------------------------------------------------


def scored(size: int, heads: int, depth: int) -> Graph:
    """Column sums of causal attention in half precision, from q, k and v [heads, size, depth]."""
    b = Builder()
    q, k, v = (b.value((integer(heads), integer(size), integer(depth)), f16) for _ in range(3))
    s = each(
        b,
        "div",
        lambda e: call("div", e, const(11.3125, f16)),
        contract.matmul(b, q, view.transpose(b, k, 1, 2)),
    )
    future = each(b, "ge", lambda c: call("gt", c, const(0, c.dtype)), _offsets(b, size))
    mask = each(b, "where", lambda c: call("where", c, const(-math.inf, f16), const(0, f16)), future)
    p = norm.softmax(b, pointwise.to(b, pointwise.add(b, s, mask), f32), -1)
    out = contract.matmul(b, pointwise.to(b, p, f16), v)
    return normalise(b.finish([q, k, v], [out, reduce.sum_(b, p, [1])]))


def _offsets(b: Builder, size: int) -> Value:
    """Key minus query."""
    from tilewright.ir.ops.common import position
    from tilewright.ir.tensor import TensorExpr, output_axes

    axes = output_axes((integer(size), integer(size)))
    i, j = (position(a) for a in axes)
    body: Expr = call("sub", j, i)
    (out,) = b.emit("offsets", (), TensorExpr(axes, (body,)))
    return out


def behind_rows(graph: Graph) -> int:
    """Bytes of what the reductions over keys are computed from, as one kernel shares it."""
    program, values = program_of(graph, graph.ops, graph.ops, {})
    found = [op for op in graph.ops if op.expr is not None and op.expr.reduction is not None]
    rows = [op.output for op in found if len(op.output.shape) == 3 and count(op.output) < 32 * 4096 * 4096]
    assert len(found) == 5 and len(rows) == 3
    return program.bytes_behind([values.index(v) for v in rows])


def test_what_broadcasting_costs():
    """Table 4 and section 6 of FlashTensor: about 3 GiB less at 4096 tokens and 32 heads, and a division that is 97 %
    smaller. (A division of fp32 weights, 2 GiB, and a scale of fp16 scores, 1 GiB.)"""
    graph = scored(4096, 32, 128)
    got = rearrange(graph)
    saved = behind_rows(graph) - behind_rows(got.graph)
    assert 2.9 * 2**30 <= saved <= 3.1 * 2**30
    (before,) = [op for op in graph.ops if op.name == "softmax"]
    (after,) = [op for op in got.graph.ops if op.name == "outside"]
    assert round(1 - count(after.output) / count(before.output), 4) == 0.9688
    assert got.changes[0].before - got.changes[0].after > saved


# --- what is searched ------------------------------------------------------------


class Layer(nn.Module):
    """Attention and an MLP around a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.norm = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(vanilla(q, k, v).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


def test_equal_parts_are_searched_once_and_the_rest_is_left_alone():
    torch.manual_seed(0)
    net = nn.Sequential(*[Layer(8) for _ in range(3)])
    x = torch.randn(1, 64, 8)
    graph = normalise(captured(net, [x]), interpret)
    parts = regions(graph, {}, 1 << 12)
    attention = [part for part in parts if any(op.name == "exp" for op in part)]
    assert len(attention) == 3
    got = rearrange(graph, search=Search(least_bytes=1 << 12))
    (change,) = got.changes
    assert change.repeats == 3 and "in 3 equal parts" in str(change)
    touched = {op for part in attention for op in part}
    now = {(op.inputs, op.outputs, op.expr) for op in got.graph.ops}
    assert all((op.inputs, op.outputs, op.expr) in now for op in graph.ops if op not in touched)
    (a,), (b,) = run_graph(graph, [x]), run_graph(got.graph, [x])
    np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6)  # type: ignore[arg-type]


def test_ordinary_networks_are_not_touched():
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64), nn.Softmax(-1))
    graph = normalise(captured(net, [torch.randn(32, 64)]), interpret)
    got = rearrange(graph)
    assert got.graph is graph and not got.changes


def test_the_search_is_seeded_and_bounded():
    graph = normalise(captured(Of(tempered), example(tempered)), interpret)
    first, second = (rearrange(graph, search=SMALL) for _ in range(2))
    assert first.graph.digest() == second.graph.digest() and first.changes == second.changes
    assert not rearrange(graph, search=Search(least_bytes=1, rules=())).changes


def test_sizes_may_be_symbols():
    args = example(vanilla)
    marks = [[False, True, False, False]] * 3
    graph = normalise(captured(Of(vanilla), args, dynamic=marks), interpret)
    names = sorted(str(s) for s in graph.symbols())
    got = rearrange(graph, dict.fromkeys(names, 4096))
    assert got.changes and not factors_on_the_way(got.graph)
    for places in (5, 48):
        short = [a[:, :places] for a in args]
        (a,), (b,) = run_graph(graph, short), run_graph(got.graph, short)
        np.testing.assert_allclose(np.asarray(b, np.float32), np.asarray(a, np.float32), atol=4e-3)


# --- library calls ------------------------------------------------------------


def test_library_calls_stay_where_their_node_is_whole():
    """The product with values changes and loses its call; the scores do not. What remains can still be called."""
    graph, got = found(vanilla)
    first, last = products(graph)
    assert graph.origins[first.origin].call is not None and graph.origins[last.origin].call is not None
    assert got.graph.origins[first.origin].call is not None and got.graph.origins[last.origin].call is None
    chosen = normalise(select(got.graph), interpret)
    chosen.verify()
    assert [op.call.reason for op in chosen.ops if op.call] == ["contraction"]
    args = example(vanilla)
    (a,), (b,) = run_graph(graph, args), run_graph(chosen, args)
    np.testing.assert_allclose(np.asarray(b, np.float32), np.asarray(a, np.float32), atol=4e-3)


def test_a_call_keeps_the_views_that_it_reads():
    """Only the scale moves here: both products stay whole, and with them the reshaped weights."""
    graph = normalise(captured(Of(vanilla), example(vanilla)), interpret)
    rules = tuple(r for r in Search().rules if r.name in ("factor leaves maximum", "factor stands in exp"))
    got = rearrange(graph, search=Search(least_bytes=1, rules=rules))
    assert got.changes and all(got.graph.origins[op.origin].call for op in products(got.graph))
    chosen = normalise(select(got.graph), interpret)
    args = example(vanilla)
    (a,), (b,) = run_graph(graph, args), run_graph(chosen, args)
    np.testing.assert_allclose(np.asarray(b, np.float32), np.asarray(a, np.float32), atol=4e-3)
