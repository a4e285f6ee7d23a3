"""Means, and the squares of the distances from them, hold the digits that eager's do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from torch import Tensor

import tilewright
from tilewright.accuracy import compare
from tilewright.interp import run_graph
from tilewright.ir.dtype import f32, f64
from tilewright.ir.graph import Graph
from tilewright.rewrite.normal.wide_moments import widen_moments

SEEDS = range(4)

MOMENTS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "rows": (lambda x: x.var(-1), (7, 33)),
    "columns": (lambda x: x.std(0), (33, 7)),
    "layer norm of three": (lambda x: F.layer_norm(x, x.shape[-1:]), (7, 3)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), (4, 6, 33)),
    "statistics": (lambda x: torch.cat(torch.var_mean(x, (0, 2))), (4, 6, 33)),
    "by hand": (lambda x: (x - x.mean(-1, keepdim=True)) * 100, (7, 33)),
}


def _judged(f: Callable[[Tensor], Tensor], compiled: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    """What departs of the result and of the gradient."""
    sides = [x.clone().requires_grad_(), x.clone().requires_grad_(), x.double().requires_grad_()]
    results = [g(s) for g, s in zip((compiled, f, f), sides, strict=True)]
    draw = torch.Generator().manual_seed(1)
    cotangent = torch.randint(-8, 9, results[1].shape, generator=draw) / 8
    for r in results:
        r.backward(cotangent.to(r.dtype))
    grads = [s.grad for s in sides]
    assert all(g is not None for g in grads)
    verdicts = (compare(*(r.detach() for r in results)), compare(*grads))  # type: ignore[arg-type]
    return [str(v) for v in verdicts if not v.passed]


@pytest.mark.parametrize("name", MOMENTS)
def test_far_from_zero(name: str) -> None:
    f, shape = MOMENTS[name]
    compiled = tilewright.compile(f)
    for seed in SEEDS:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        equal = x.flatten()[0].expand(shape).contiguous()
        for given in (x, x + 10, x + 100, equal, equal + 100):
            assert not _judged(f, compiled, given), (seed, float(given.mean()))


def test_a_mean_far_below_its_elements() -> None:
    """Half a unit in its own last place, as of a sum in doubles, not in that of the elements."""
    compiled = tilewright.compile(lambda x: torch.var_mean(x, -1))
    x = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    x -= x.mean(-1, keepdim=True)
    assert torch.equal(compiled(x)[1], x.double().mean(-1).float())


def test_equal_elements_have_no_variance() -> None:
    x = (torch.rand(64, 1, generator=torch.Generator().manual_seed(0)) * 1000).expand(64, 999).contiguous()
    assert not tilewright.compile(lambda x: x.var(-1), (x,))(x).any()


def _kept(x: Tensor, buffer: Tensor) -> Tensor:
    buffer.copy_(x.var(-1))
    return x + 1


LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.var(-1),
    "columns": lambda x: x.var(0),
    "roots": lambda x: x.std(-1),
    "as large as the elements": lambda x: x.var(-1, keepdim=True).expand_as(x) * 1,
    "beside them": lambda x: x * 0 + x.var(-1, keepdim=True),
    "of all pairs": lambda x: (lambda v: v[:, None] * v[None, :])(x[:70].var(-1)),
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("equal", [33, 63])
def test_mostly_equal_elements(equal: int, name: str) -> None:
    """Their squares are equal, and round alike in a chain of singles."""
    f, x = LEAVES[name], torch.randn(256, 70, generator=torch.Generator().manual_seed(0))
    x[:, :equal] = 0.1
    for given in (x, x.T.contiguous()):
        verdict = compare(tilewright.compile(f, (given,))(given), f(given), f(given.double()))
        assert verdict.passed, str(verdict)


def test_a_variance_that_is_written() -> None:
    x = torch.randn(256, 70, generator=torch.Generator().manual_seed(0))
    x[:, :63] = 0.1
    ours, eager, exact = torch.zeros(256), torch.zeros(256), torch.zeros(256).double()
    tilewright.compile(_kept)(x, ours)
    _kept(x, eager)
    _kept(x.double(), exact)
    verdict = compare(ours, eager, exact)
    assert verdict.passed, str(verdict)


def test_many_steps_between_the_squares_and_what_they_scale() -> None:
    def f(x: Tensor) -> Tensor:
        v = x.var(-1, keepdim=True) + 1
        for _ in range(40):
            v = v + v.sqrt() * 0.1
        return x / v

    graph = capture(f, [torch.zeros(3, 5)])
    assert _states(widen_moments(graph)) == [str(f32)] * 3  # ends: each value is looked at once


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = torch.zeros(3), torch.ones(3)
    F.batch_norm(x, mean, variance, training=True, momentum=1.0)
    return mean, variance


def test_means_that_are_not_finite() -> None:
    x = torch.tensor(
        [[1.0, torch.inf, 2.0], [torch.nan, 1.0, 2.0], [-torch.inf, torch.inf, 0.0]]
    ).T.contiguous()
    for ours, eager in zip(tilewright.compile(_statistics, (x,))(x), _statistics(x), strict=True):
        assert torch.equal(ours.nan_to_num(7, 8, 9), eager.nan_to_num(7, 8, 9))


def test_stored_statistics_move_as_doubles() -> None:
    x = torch.randn(1, 96, 1, generator=torch.Generator().manual_seed(0)).expand(6, 96, 5)
    ours, eager, exact = (torch.nn.BatchNorm1d(96) for _ in range(3))
    for net, given in ((tilewright.compile(ours), x), (eager, x), (exact.double(), x.double())):
        for _ in range(2):
            net(given)
    for name, y in ours.named_buffers():
        verdict = compare(y, eager.get_buffer(name), exact.get_buffer(name))
        assert verdict.passed, (name, str(verdict))


def _states(graph: Graph) -> list[str]:
    return [str(op.expr.reduction.state[0]) for op in graph.ops if op.expr is not None and op.expr.reduction]


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: F.layer_norm(x, (5,)),
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * 3 + 1,
        lambda x: x * (x.var(-1, keepdim=True) + 1).rsqrt(),
    ],
)
def test_squares_that_scale_stay_sums_of_singles(norm: Callable[[Tensor], Tensor]) -> None:
    graph = widen_moments(capture(norm, [torch.zeros(3, 5)]))
    graph.verify()
    assert set(_states(graph)[1:]) == {str(f32)}


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.var(-1),
        lambda x: torch.var_mean(x, -1),
        lambda x: x - x.mean(-1, keepdim=True),
        lambda x: torch.where(x.var(-1, keepdim=True) > 1, x, -x),
        lambda x: (x / x.std(-1, keepdim=True), x.std(-1)),
        lambda x: x - x.var(-1, keepdim=True),
    ],
)
def test_what_leaves_is_of_doubles(f: Callable[[Tensor], Tensor]) -> None:
    graph = widen_moments(capture(f, [torch.zeros(3, 5)]))
    graph.verify()
    assert set(_states(graph)) == {str(f64)}


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.mean(-1),
        lambda x: x / x.sum(-1, keepdim=True),
        lambda x: x.half() - x.half().mean(-1, keepdim=True),
        lambda x: x.half().var(-1),
        lambda x: x.double().var(-1),
    ],
)
def test_others_stay(f: Callable[[Tensor], Tensor]) -> None:
    graph = capture(f, [torch.zeros(3, 5)])
    assert widen_moments(graph) is graph


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: ((x - y.mean(-1, keepdim=True)) * (x - y.mean(-1, keepdim=True))).sum(-1),
        lambda x, y: ((x - x.mean(0)) * (x - x.mean(0))).sum(-1),
        lambda x, y: (x - x.sum(-1, keepdim=True) / 7).square().sum(-1),
        lambda x, y: (lambda d: d * d)(x - x.mean(-1, keepdim=True)).sum(),
        lambda x, y: (x - x.mean(1, keepdim=True)).square().sum(1).sqrt() + x.mean(1),
    ],
)
def test_what_is_no_pair_keeps_its_value(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-8, 9, (4, 4), generator=draw) / 4 for _ in range(2))
    graph = widen_moments(capture(f, [x, y]))
    torch.testing.assert_close(torch.as_tensor(run_graph(graph, [x, y])[0]), f(x, y))


def test_a_mean_read_by_calls_of_several_results() -> None:
    x = torch.randint(-8, 9, (6, 5), generator=torch.Generator().manual_seed(0)) * 5.0

    def ranked(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(x.mean(-1), 2)

    graph = capture(ranked, [x])
    assert any(len(op.outputs) == 2 for op in graph.ops)
    for y, e in zip(run_graph(widen_moments(graph), [x]), ranked(x), strict=True):
        torch.testing.assert_close(torch.as_tensor(y), e)


def test_ops_of_a_chosen_kernel_stay_as_they_are() -> None:
    """A rounding between two of them would be in no kernel: it would wait for theirs, and theirs for it."""

    def f(x: Tensor) -> Tensor:
        s = x.std(-1, keepdim=True)
        return (s * 2 + 1).sqrt() * s

    graph = capture(f, [torch.randn(7, 33)])
    free = widen_moments(graph)
    last = [op for op in graph.ops if op.name == "sqrt"][-1]
    start = graph.ops.index(last) - 2
    chosen = graph.with_ops([replace(op, kernel=0) if k >= start else op for k, op in enumerate(graph.ops)])
    held = [op for op in chosen.ops if op.kernel == 0]
    assert len(held) == 4
    assert [op for op in widen_moments(chosen).ops if op.kernel == 0] == held
    assert sum(op.output.dtype is f64 for op in free.ops) > sum(
        op.output.dtype is f64 for op in widen_moments(chosen).ops
    )
    moments = graph.with_ops([replace(op, kernel=0) for op in graph.ops])
    assert widen_moments(moments) is moments


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_over_deviations(dynamic: bool) -> None:
    def f(x: Tensor) -> Tensor:
        s = x.std(-1, correction=0, keepdim=True)
        return (s @ s.mT / 4).sigmoid() @ s

    compiled = torch.compile(f, backend="tilewright", dynamic=dynamic, options={"contractions": "inside"})
    for shape in ((2, 3, 16), (5, 8, 16)):
        x = torch.randn(shape)
        with torch.no_grad():
            assert compare(compiled(x), f(x), f(x.double())).passed


@pytest.mark.parametrize("follow", [F.elu, torch.abs, lambda v: torch.maximum(v, v * 0.5)])
@pytest.mark.parametrize("fusion", ["cover", "full"])
def test_a_value_less_itself_is_nothing(follow: Callable[[Tensor], Tensor], fusion: str) -> None:
    """What is made of a deviation in singles is not compared with its doubles."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        v = torch.deg2rad(x.std(-1, correction=0, keepdim=True))
        return (v - follow(v)).abs().max(), (v - follow(v)).square().sum()

    x = torch.randn(64, 8)
    made = tilewright.compile(run, (x,), options={"fusion": fusion})(x)
    assert [float(t) for t in made] == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_root_of_a_variance_beyond_singles(dtype: torch.dtype) -> None:
    x = (torch.randn(64, 33, generator=torch.Generator().manual_seed(0)) * 1e30).to(dtype)
    ours = tilewright.compile(lambda x: x.std(-1), (x,))(x)
    assert isinstance(ours, Tensor)
    verdict = compare(ours, x.std(-1), x.double().std(-1))
    assert verdict.passed, str(verdict)
