"""Cascades over long rows, part by part: how often memory is read, and that the results stay."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.corpus import Case
from tests.support.cpp_harness import host_target
from tests.support.lowered import agree, data, execute, form_of
from tests.support.one_kernel import capture, one_kernel
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.form.row_parts import in_row_parts
from tilewright.interp import EXACT, FLOATS, run_graph
from tilewright.ir.form import Form
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Load, Loop, Stmt
from tilewright.lower.lower import lower
from tilewright.options import Options
from tilewright.schedule.cpu.vectors import vector_schedule
from tilewright.schedule.solver import Solver
from tilewright.target import MemoryKind, Target


def as_written(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(((x - mean) * (x - mean)).mean(-1, keepdim=True) + 1e-5)


def entropy(x: Tensor) -> Tensor:
    return -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1)


N = 1024
CASCADES = {
    "layer norm": Case("layer_norm", lambda x: F.layer_norm(x, (x.shape[-1],)), ((3, 1200),)),
    "as written": Case("as_written", as_written, ((3, N),)),
    "variance": Case("variance", lambda x: torch.var_mean(x, -1), ((3, N),)),
    "softmax": Case("softmax", lambda x: torch.softmax(x, -1), ((3, N),)),
    "log softmax": Case("log_softmax", lambda x: torch.log_softmax(x, -1), ((3, N),)),
    "logsumexp": Case("logsumexp", lambda x: torch.logsumexp(x, -1), ((3, N),)),
}


def small() -> Target:
    """This machine with a core cache that holds no row."""
    return host_target().resized(capacities={MemoryKind.SHARED: 2048})


def solved(case: Case, target: Target) -> tuple[Graph, Scheduled]:
    graph = capture(case, False)
    return graph, Solver(target, Options()).solve(one_kernel(graph), graph.layouts)


def sweeps(form: Form) -> int:
    """Outermost loops of a grid point that read the input."""
    program = lower(form, vector_schedule(form, small(), NO_HINTS))
    loops = [s for s in program.body if isinstance(s, Loop)]
    return sum(any(isinstance(x, Load) and x.buffer.name == "p0" for x in below(s)) for s in loops)


def below(s: Loop) -> list[Stmt]:
    """Every statement inside a loop."""
    return [y for x in s.body for y in (below(x) if isinstance(x, Loop) else [x])]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("as written", 3, 2),
        ("variance", 2, 1),
        ("softmax", 3, 2),
        ("log softmax", 3, 2),
        ("logsumexp", 2, 1),
    ],
)
def test_a_row_is_read_once_less(name: str, before: int, after: int) -> None:
    form = form_of(CASCADES[name])
    assert sweeps(form) == before
    assert sweeps(in_row_parts(form, small())) == after


@pytest.mark.parametrize("name", CASCADES)
def test_results_stay(name: str) -> None:
    case = CASCADES[name]
    graph, scheduled = solved(case, small())
    inputs = data(case, graph, FLOATS)
    made = execute(graph, scheduled, inputs, FLOATS)
    wanted = case.run(*case.inputs())
    for v, want in zip(graph.outputs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert isinstance(v, Value)
        np.testing.assert_allclose(made[v], want.numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["as written", "variance"])
def test_moments_are_exact(name: str) -> None:
    case = replace(CASCADES[name], shapes=((1, N),))
    graph, scheduled = solved(case, small())
    inputs = data(case, graph, EXACT)
    assert agree(graph, scheduled, inputs, list(run_graph(graph, inputs, EXACT)))


def test_infinite_elements() -> None:
    x = torch.randn(4, N)
    x[0] = -math.inf
    x[1, :700] = -math.inf  # whole parts
    x[2, 5] = math.inf
    x[3, 900] = math.nan
    for name in ("softmax", "log softmax", "logsumexp"):
        case = replace(CASCADES[name], shapes=((4, N),))
        graph, scheduled = solved(case, small())
        (made,) = (execute(graph, scheduled, [x.numpy()], FLOATS)[v] for v in graph.outputs)  # type: ignore[index]
        np.testing.assert_allclose(made, case.run(x).numpy(), rtol=1e-5, atol=1e-6)


def test_large_means_do_not_overflow() -> None:
    x = torch.randn(2, N) + 1e20
    case = replace(CASCADES["variance"], shapes=((2, N),))
    graph, scheduled = solved(case, small())
    made = execute(graph, scheduled, [x.numpy()], FLOATS)
    assert all(np.isfinite(made[v]).all() for v in graph.outputs if isinstance(v, Value))


@pytest.mark.parametrize(
    "case",
    [
        Case("short", lambda x: torch.softmax(x, -1), ((3, 200),)),
        Case("prime", lambda x: torch.softmax(x, -1), ((3, 1031),)),
        Case("one fold", lambda x: x.sum(-1), ((3, N),)),
        Case("sum wanted", lambda x: (as_written(x), x.sum(-1)), ((3, N),)),
        Case("symbolic", lambda x: torch.softmax(x, -1), ((3, N),), ({1: "n"},)),
    ],
    ids=lambda c: c.name,
)
def test_what_stays_as_it_is(case: Case) -> None:
    form = form_of(case, dynamic=bool(case.dynamic))
    assert in_row_parts(form, small()) is form


def test_sums_beside_a_cascade_follow_its_maximum() -> None:
    """A fold of rank two reads the merged maximum in a sweep of its own."""
    case = Case("entropy", entropy, ((3, N),))
    graph, scheduled = solved(case, small())
    (made,) = (execute(graph, scheduled, data(case, graph, FLOATS), FLOATS)[v] for v in graph.outputs)  # type: ignore[index]
    np.testing.assert_allclose(made, case.run(*case.inputs()).numpy(), rtol=2e-5)
