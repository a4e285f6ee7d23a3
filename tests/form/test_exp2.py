"""Exponentials as powers of two and maxima of unscaled scores: what is computed, and that it means the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.attention.kernels import attention, scores
from tests.support.lowered import execute
from tests.support.one_kernel import capture, one_kernel

from tilewright.form.exp2 import power_of_two
from tilewright.interp import FLOATS
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Expr, call, const, make, walk
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Compute, Dot, Loop, Update, expressions
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import PRESETS


def solved(kind: str, mask: str, size: int, dtype: torch.dtype) -> tuple[Graph, Scheduled]:
    graph = capture(attention(kind, mask, size, size, 64, heads=(1, 1), dtype=dtype), False)
    return graph, Solver(PRESETS["sm_90"], Options()).solve(one_kernel(graph), graph.layouts)


def unmasked(scheduled: Scheduled) -> Loop:
    """The loop over whole tiles."""
    inner = [x for x in scheduled.program.loops() if any(isinstance(y, Dot) for y in x.body)]
    return min(
        inner, key=lambda x: sum(e.op == "where" for s in x.body for r in expressions(s) for e in walk(r))
    )


@pytest.mark.parametrize(("kind", "count"), [("rows", 1), ("columns", 1)])
def test_an_element_takes_one_multiplication_and_one_power(kind: str, count: int) -> None:
    _, scheduled = solved(kind, "causal", 1024, torch.float16)
    roots = [r for s in unmasked(scheduled).body if isinstance(s, (Compute, Update)) for r in expressions(s)]
    found = {x for r in roots for x in walk(r) if x.op == "quick_exp2"}
    assert len(found) == count
    for power in found:
        total = power.args[0]
        assert total.op == "add" and [a.op for a in total.args] == ["mul", "var"]
        assert [a.op for a in total.args[0].args] == ["var", "const"]


def test_a_maximum_is_of_scores_that_are_not_scaled() -> None:
    _, scheduled = solved("rows", "causal", 1024, torch.float16)
    body = unmasked(scheduled).body
    (made,) = {s.acc.id for s in body if isinstance(s, Dot) and len(s.acc.axes) == 2 and s.k.name == "c10"}
    wide = [s for s in body if isinstance(s, Compute) and len(s.var.axes) == 2]
    assert not any(
        e.op == "mul" and e.args[0].value == made for s in wide if s.expr.op != "quick_exp2" for e in [s.expr]
    )


def test_single_precision_keeps_its_exponentials() -> None:
    _, scheduled = solved("rows", "causal", 1024, torch.float32)
    assert not any(
        x.op in ("exp2", "quick_exp2")
        for s in scheduled.program.statements()
        for r in expressions(s)
        for x in walk(r)
    )


@pytest.mark.parametrize("kind", ["rows", "columns"])
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_halves_agree_with_eager(kind: str, size: float) -> None:
    """With scores up to 300 too, and rows that see nothing."""
    case = attention(kind, "aligned", 330, 290, 64, heads=(1, 1))
    graph = capture(case, False)
    scheduled = Solver(PRESETS["sm_90"], Options()).solve(one_kernel(graph), graph.layouts)
    q, k, last = case.inputs()
    q = q * size
    if kind == "columns":
        last = torch.logsumexp(scores(q.float(), k.float(), case.mask), -1)
    inputs = [q, k, last]
    loaded = [
        FLOATS.load(x, v.dtype) for v, x in zip(graph.inputs, inputs, strict=True) if isinstance(v, Value)
    ]
    made = execute(graph, scheduled, loaded, FLOATS)
    wanted = case.run(q.float(), k.float(), last.float())
    assert isinstance(wanted, torch.Tensor)
    (out,) = (v for v in graph.outputs if isinstance(v, Value))
    np.testing.assert_allclose(np.asarray(made[out], dtype=np.float32), wanted.numpy(), rtol=4e-3, atol=4e-3)


def var(k: int, axes: int) -> Expr:
    """A value whose name tells along how many axes it varies."""
    return make("var", (), f32, 10 * axes + k)


def test_each_factor_of_an_exponent_is_one_multiplication() -> None:
    score, noise, row = var(1, 2), var(2, 2), var(3, 1)
    x = call("sub", call("mul", call("sub", score, noise), const(0.5, f32)), row)
    x = call("sub", x, call("mul", noise, const(0.25, f32)))
    made = power_of_two(x, lambda e: e.value // 10, lambda e: e, quick=True)  # type: ignore[operator]
    found = [e for e in walk(made) if e.op == "mul"]
    assert made.op == "quick_exp2" and len(found) == 3, "two factors of blocks and one of rows"
    assert sum(e.op == "sub" for e in walk(made)) == 1, "what has one factor is added up before"


def test_zero_is_not_added() -> None:
    x = call("sub", call("add", var(1, 2), const(0.0, f32)), var(2, 1))
    made = power_of_two(x, lambda e: 0 if e.op == "const" else e.value // 10, lambda e: e)  # type: ignore[operator]
    assert not any(e.op == "const" and e.value == 0 for e in walk(made))
