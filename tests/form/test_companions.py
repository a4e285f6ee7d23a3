"""Cascades in one pass: how many there are, that they mean what the graph means, and what infinities do to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.attention.cascades import CASES, N, deviation, graph_of, online_class, roles
from tests.support.corpus import Case, entropy
from tests.support.lowered import agree, data, execute, mutants
from tests.support.one_kernel import capture, one_kernel
from torch import Tensor

from tilewright.form.classes import make_form
from tilewright.form.companions import with_companions
from tilewright.interp import EXACT, FLOATS, run_graph
from tilewright.ir.expr import Axis, call
from tilewright.ir.form import Form
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Loop, Stmt, Update, value_of
from tilewright.ir.schedule import Schedule
from tilewright.lower.lower import lower
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import PRESETS

LAST = {0: {1: "n"}}


STYLES: dict[str, Callable[[Form, Axis], Schedule]] = {
    "one by one": lambda form, c: roles(form, c, 1),
    "lanes": lambda form, c: roles(form, c, 4),
    "lanes, masked": lambda form, c: roles(form, c, 8, peel=False),
    "whole blocks": lambda form, c: roles(form, c, 4, peel=False, lane_states=False),
    "levels": lambda form, c: roles(form, c, 1, max_chain=3),
    "levels of lanes": lambda form, c: roles(form, c, 2, max_chain=3),
}


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


def rescales(s: Stmt) -> list[Stmt] | None:
    """An update that forgets to rescale its old state."""
    if not isinstance(s, Update) or len(s.vars) != 1 or s.values[0].op != "add":
        return None
    own, (old, element) = value_of(s.vars[0]), s.values[0].args
    return None if old is own else [replace(s, values=(call("add", own, element),))]


@pytest.mark.parametrize("name", ["logsumexp", "entropy", "attention", "sink", "minimum"])
def test_a_dropped_repair_shows(name: str) -> None:
    graph, made, _ = scheduled(name, "one by one")
    inputs = data(CASES[name][0], graph, EXACT)
    wanted: list[object] = [*run_graph(graph, inputs, EXACT)]
    bodies = list(mutants(made.program.body, rescales))
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
