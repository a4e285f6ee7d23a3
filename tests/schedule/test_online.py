"""Cascades in one pass: how many there are, that they mean what the graph means, and what infinities do to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.emit.harness import host_target
from tests.interp.test_lowering import agree, data, execute, mutants
from tests.schedule.corpus import Case, entropy
from tests.schedule.run import capture, one_kernel
from tilewright.analysis.size_hints import NO_HINTS
from tilewright.form.classes import make_form
from tilewright.form.companions import with_companions
from tilewright.interp import EXACT, FLOATS, run_graph
from tilewright.ir.expr import Axis, call
from tilewright.ir.form import Form
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Loop, Stmt, Update, value_of
from tilewright.ir.schedule import ClassPlan, Role, Schedule, Tiling
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.lower.lower import lower
from tilewright.options import Options
from tilewright.schedule.cpu.vectors import vector_schedule
from tilewright.schedule.solver import Solver
from tilewright.target import PRESETS

ROWS, N = 2, 13


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q[:, None, :] * k[None, :, :]).sum(-1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.softmax(scores(q, k), -1)[:, :, None] * v[None, :, :]).sum(1)


def attention_with_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return attention(q, k, v), torch.logsumexp(s, -1)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[0])[:, None] - 1 >= torch.arange(k.shape[0])[None, :]
    s = torch.where(place, scores(q, k), float("-inf"))
    return (torch.softmax(s, -1)[:, :, None] * v[None, :, :]).sum(1)


def causal_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows that see nothing are zero: the first one."""
    place = torch.arange(q.shape[0])[:, None] - 1 >= torch.arange(k.shape[0])[None, :]
    p = torch.softmax(torch.where(place, scores(q, k), float("-inf")), -1)
    p = torch.where(place, p, 0.0)
    return (p[:, :, None] * v[None, :, :]).sum(1)


def sink(x: Tensor, s: Tensor) -> Tensor:
    top = torch.maximum(x.amax(-1), s)
    e = torch.exp(x - top[:, None])
    return (e * x).sum(-1) / (e.sum(-1) + torch.exp(s - top))


def relative_entropy(x: Tensor, y: Tensor) -> Tensor:
    p = torch.log_softmax(x, -1)
    return (p.exp() * (p - y)).sum(-1)


def norm_then_product(x: Tensor, w: Tensor) -> Tensor:
    return (F.layer_norm(x, (x.shape[-1],))[:, :, None] * w[None]).sum(1)


def rms_then_product(x: Tensor, w: Tensor) -> Tensor:
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    return (y[:, :, None] * w[None]).sum(1)


def skewness(x: Tensor) -> Tensor:
    d = x - x.mean(-1, keepdim=True)
    return (d * d * d).mean(-1)


def deviation(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).abs().mean(-1)


def softmax_of_small(x: Tensor) -> Tensor:
    e = torch.exp(x.amin(-1, keepdim=True) - x)
    return e.sum(-1)


ROW = ((ROWS, N),)
QKV = ((ROWS, 4), (N, 4), (N, 5))
LAST = {0: {1: "n"}}
CASES: dict[str, tuple[Case, int]] = {
    "softmax": (Case("softmax", lambda x: torch.softmax(x, -1), ROW, ({1: "n"},)), 2),
    "logsumexp": (Case("lse", lambda x: torch.logsumexp(x, -1), ROW, ({1: "n"},)), 1),
    "entropy": (Case("entropy", entropy, ROW, ({1: "n"},)), 1),
    "relative entropy": (Case("kl", relative_entropy, ROW * 2, ({1: "n"}, {1: "n"})), 1),
    "attention": (Case("attention", attention, QKV), 1),
    "attention and its sizes": (Case("sizes", attention_with_sizes, QKV), 1),
    "causal": (Case("causal", causal, ((6, 4), (6, 4), (6, 5))), 1),
    "causal, zeros": (Case("zeros", causal_zeros, ((6, 4), (6, 4), (6, 5))), 1),
    "sink": (Case("sink", sink, (*ROW, (ROWS,))), 1),
    "minimum": (Case("least", softmax_of_small, ROW), 1),
    "variance": (Case("variance", lambda x: torch.var(x, -1), ROW, ({1: "n"},)), 1),
    "skewness": (Case("skewness", skewness, ROW), 1),
    "layer norm": (Case("norm", lambda x: F.layer_norm(x, (x.shape[-1],)), ROW, ({1: "n"},)), 2),
    "layer norm, product": (Case("product", norm_then_product, (*ROW, (N, 5))), 1),
    "rms norm, product": (Case("rms", rms_then_product, (*ROW, (N, 5))), 1),
    "log softmax, largest": (Case("largest", lambda x: torch.log_softmax(x, -1).amax(-1), ROW), 1),
    "mean absolute deviation": (Case("mad", deviation, ROW), 2),
}


def roles(form: Form, streamed: Axis, tile: int, **more: object) -> Schedule:
    """All of `streamed` in steps of `tile`, the rest one by one."""
    made = vector_schedule(form, host_target(), NO_HINTS)
    plans = [ClassPlan(c.axis, c.role) for c in made.tiling.classes if c.role is Role.GRID]
    rest = [c.axis for c in made.tiling.classes if c.role is not Role.GRID and c.axis != streamed]
    kept = {a for i in form.items if streamed in i.reduce for a in i.kept}
    plans += [
        ClassPlan(a, Role.RESIDENT, next_power_of_two(NO_HINTS.estimate(a.extent))) for a in rest if a in kept
    ]
    plans += [ClassPlan(streamed, Role.STREAMED, tile)]
    plans += [ClassPlan(a, Role.STREAMED) for a in rest if a not in kept]
    return Schedule(Tiling(tuple(plans), streamed if tile > 1 else None)).changed(online=True, **more)


STYLES: dict[str, Callable[[Form, Axis], Schedule]] = {
    "one by one": lambda form, c: roles(form, c, 1),
    "lanes": lambda form, c: roles(form, c, 4),
    "lanes, masked": lambda form, c: roles(form, c, 8, peel=False),
    "whole blocks": lambda form, c: roles(form, c, 4, peel=False, lane_states=False),
    "levels": lambda form, c: roles(form, c, 1, max_chain=3),
    "levels of lanes": lambda form, c: roles(form, c, 2, max_chain=3),
}


def online_class(form: Form) -> Axis:
    """The class of the cascade: the one that most folds reduce."""
    classes = [c for f in form.folds.values() for c in f.reduce]
    return max(classes, key=classes.count)


@cache
def graph_of(name: str, dynamic: bool = False) -> Graph:
    return capture(CASES[name][0], dynamic)


def scheduled(name: str, style: str, dynamic: bool = False) -> tuple[Graph, Scheduled, Axis]:
    graph = graph_of(name, dynamic)
    kernel = one_kernel(graph)
    form = with_companions(make_form(kernel, graph.layouts))
    streamed = online_class(form)
    schedule = STYLES[style](form, streamed)
    program = lower(form, schedule)
    return graph, Scheduled(kernel, schedule, program, (*kernel.inputs, *kernel.outputs), ()), streamed


@pytest.mark.parametrize("name", CASES)
def test_passes(name: str) -> None:
    _, made, c = scheduled(name, "one by one")
    assert sum(isinstance(s, Loop) and s.axis == c for s in made.program.statements()) == CASES[name][1]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", CASES)
def test_meaning_is_exact(name: str, style: str) -> None:
    graph, made, _ = scheduled(name, style, bool(CASES[name][0].dynamic))
    inputs = data(CASES[name][0], graph, EXACT)
    wanted: list[object] = [*run_graph(graph, inputs, EXACT)]
    assert agree(graph, made, inputs, wanted)


def repairs(s: Stmt) -> list[Stmt] | None:
    """An update that forgets to repair its old state."""
    if not isinstance(s, Update) or len(s.vars) != 1 or s.values[0].op != "add":
        return None
    own, (old, element) = value_of(s.vars[0]), s.values[0].args
    return None if old is own else [replace(s, values=(call("add", own, element),))]


@pytest.mark.parametrize("name", ["logsumexp", "entropy", "attention", "sink", "minimum"])
def test_a_dropped_repair_shows(name: str) -> None:
    graph, made, _ = scheduled(name, "one by one")
    inputs = data(CASES[name][0], graph, EXACT)
    wanted: list[object] = [*run_graph(graph, inputs, EXACT)]
    bodies = list(mutants(made.program.body, repairs))
    assert bodies
    for body in bodies:
        assert not agree(graph, replace(made, program=replace(made.program, body=body)), inputs, wanted)


def floats(name: str, style: str, inputs: list[Tensor]) -> list[np.ndarray]:
    graph, made, _ = scheduled(name, style)
    results = execute(graph, made, [t.numpy() for t in inputs], FLOATS)
    return [results[v].copy() for v in graph.outputs if isinstance(v, Value)]


def eager(name: str, inputs: list[Tensor]) -> list[np.ndarray]:
    wanted = CASES[name][0].run(*inputs)
    return [w.numpy() for w in (wanted if isinstance(wanted, tuple) else (wanted,))]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, style: str) -> None:
    inputs = CASES[name][0].inputs()
    for made, want in zip(floats(name, style, inputs), eager(name, inputs), strict=True):
        np.testing.assert_allclose(made, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "style",
    ["one by one", "lanes, masked", "whole blocks", "levels of lanes"],
)
@pytest.mark.parametrize(
    "name", ["softmax", "logsumexp", "entropy", "attention", "attention and its sizes", "sink"]
)
def test_large_logits(name: str, style: str) -> None:
    inputs = [t * 1e4 if k == 0 else t for k, t in enumerate(CASES[name][0].inputs())]
    inputs[0][0].copy_(inputs[0][0].sort(-1).values)
    for made, want in zip(floats(name, style, inputs), eager(name, inputs), strict=True):
        assert np.isfinite(made).all()
        np.testing.assert_allclose(made, want, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize(
    "style",
    [
        "one by one",
        "lanes",
        "lanes, masked",
        "whole blocks",
        "levels of lanes",
    ],
)
@pytest.mark.parametrize("name", ["causal", "causal, zeros"])
def test_rows_that_see_nothing(name: str, style: str) -> None:
    inputs = CASES[name][0].inputs()
    (want,) = eager(name, inputs)
    assert np.isnan(want[0]).all() == (name == "causal") and np.isfinite(want[1:]).all()
    (made,) = floats(name, style, inputs)
    np.testing.assert_allclose(made, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("style", ["one by one", "lanes", "whole blocks", "levels"])
@pytest.mark.parametrize(
    "name", ["softmax", "logsumexp", "entropy", "variance", "layer norm", "log softmax, largest"]
)
def test_infinities_are_where_eager_has_them(name: str, style: str) -> None:
    x = CASES[name][0].inputs()[0]
    rows = [x[0]] * 6
    x = torch.stack(rows)
    x[0] = -math.inf
    x[1, :8] = -math.inf
    x[2, 5] = math.inf
    x[3, 7] = math.nan
    x[4, 11:] = -math.inf
    case = replace(CASES[name][0], shapes=((6, N),), dynamic=())
    graph = capture(case, False)
    kernel = one_kernel(graph)
    form = with_companions(make_form(kernel, graph.layouts))
    schedule = STYLES[style](form, online_class(form))
    made = Scheduled(kernel, schedule, lower(form, schedule), (*kernel.inputs, *kernel.outputs), ())
    results = execute(graph, made, [x.numpy()], FLOATS)
    (want,) = [case.run(x)]
    assert isinstance(want, Tensor)
    (got,) = [results[v] for v in graph.outputs if isinstance(v, Value)]
    np.testing.assert_allclose(got, want.numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("style", ["one by one", "lanes", "whole blocks", "levels"])
@pytest.mark.parametrize("name", ["variance", "layer norm, product"])
def test_large_means_do_not_cancel(name: str, style: str) -> None:
    inputs = [t + 1000 if k == 0 else t for k, t in enumerate(CASES[name][0].inputs())]
    (made,), (want,) = floats(name, style, inputs), eager(name, inputs)
    exact = CASES[name][0].run(*(t.double() for t in inputs))
    assert isinstance(exact, Tensor)
    error = lambda y: float(np.abs(y - exact.numpy()).max())  # noqa: E731
    assert error(made) <= 8 * error(want) + 1e-6


@pytest.mark.parametrize(("run", "words"), [(deviation, "finite rank"), (entropy, "")])
def test_what_is_refused_says_why(run: Callable[[Tensor], Tensor], words: str) -> None:
    graph = capture(Case("long", run, ((600, 131072),)), False)
    solved = Solver(PRESETS["sm_90"], Options()).solve(one_kernel(graph), graph.layouts)
    assert len(solved.notes) == bool(words) and all(words in n.text for n in solved.notes)
