"""Every program of the corpus, lowered to a tile program, means the same as its graph: exactly, and over floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.support.corpus import CASES
from tests.support.lowered import Mutation, agree, data, execute, mutants
from tests.support.one_kernel import solved

from tilewright.errors import VerifyError
from tilewright.interp import EXACT, FLOATS, run_graph
from tilewright.ir.expr import call
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Collapse, Loop, Stmt, Store, Update
from tilewright.ir.reduction import maximum
from tilewright.ir.sizes import dims

# These take too long over exact elements.
HEAVY = {"add_bias_gelu", "column_sum", "softmax", "group_norm_silu", "window_partition", "pixel_shuffle"}
PLAIN = {case.name: case for case in CASES}


@cache
def lowered(name: str, dynamic: bool) -> tuple[Graph, Scheduled]:
    return solved(PLAIN[name], dynamic)


@pytest.mark.parametrize("name", [c.name for c in CASES if c.name not in HEAVY])
def test_lowering_is_exact(name: str) -> None:
    """With symbolic sizes where the case has them."""
    graph, scheduled = lowered(name, bool(PLAIN[name].dynamic))
    inputs = data(PLAIN[name], graph, EXACT)
    assert agree(graph, scheduled, inputs, run_graph(graph, inputs, EXACT))


@pytest.mark.parametrize(
    "name", ["layer_norm", "column_sum", "group_norm_silu", "row_argmax", "pad", "gather"]
)
def test_lowering_over_floats(name: str) -> None:
    graph, scheduled = lowered(name, False)
    inputs = data(PLAIN[name], graph, FLOATS)
    results = execute(graph, scheduled, inputs, FLOATS)
    for v, want in zip(graph.outputs, run_graph(graph, inputs), strict=True):
        assert isinstance(v, Value) and isinstance(want, np.ndarray)
        assert np.allclose(results[v], want, rtol=1e-4, atol=1e-5)


# --- mutants: each mistake in a program must show ------------------------------------------------------------------


def sums(s: Stmt) -> bool:
    return isinstance(s, Update) and any(v.op == "add" for v in s.values)


def lose_loop(s: Stmt) -> Sequence[Stmt] | None:
    """A loop that is never run: a lost tail, or a lost body. (A maximum may lose one: it is only a reference.)"""
    if not isinstance(s, Loop) or not any(sums(x) or isinstance(x, Store) for x in s.body):
        return None
    return [replace(s, stop=s.start)]


def short_mask(s: Stmt) -> Sequence[Stmt] | None:
    """A mask that is off by one."""
    if not isinstance(s, Store) and not sums(s) or s.mask is None or s.mask.op != "lt":  # type: ignore[union-attr]
        return None
    low, high = s.mask.args  # type: ignore[union-attr]
    return [replace(s, mask=call("lt", low, dims.sub(high, dims.ONE)))]  # type: ignore[type-var]


def lose_step(s: Stmt) -> Sequence[Stmt] | None:
    """A sum that forgets what it had: the state is overwritten instead of added to."""
    if not sums(s) or not isinstance(s, Update):
        return None
    return [replace(s, values=tuple(v.args[1] if v.op == "add" else v for v in s.values))]


def wrong_merge(s: Stmt) -> Sequence[Stmt] | None:
    """A sum over lanes that takes their maximum."""
    if not isinstance(s, Collapse) or s.reduction.name != "sum":
        return None
    return [replace(s, reduction=maximum(s.reduction.state[0]))]


MISTAKES: dict[str, Mutation] = {
    "lost loop": lose_loop, "mask off by one": short_mask, "lost sum": lose_step,
    "wrong merge": wrong_merge,
}  # fmt: skip


@pytest.mark.parametrize("name", ["log_softmax", "layer_norm", "cumsum_rows", "cross_entropy", "matmul_bias"])
def test_every_mistake_shows(name: str) -> None:
    graph, scheduled = lowered(name, False)
    inputs = data(PLAIN[name], graph, EXACT)
    wanted = run_graph(graph, inputs, EXACT)
    tried: list[str] = []
    missed: list[str] = []
    for mistake, change in MISTAKES.items():
        for body in mutants(scheduled.program.body, change):
            bad = replace(scheduled, program=replace(scheduled.program, body=body))
            tried.append(mistake)
            try:
                same = agree(graph, bad, inputs, wanted)
            except (VerifyError, ValueError, ArithmeticError):
                same = False
            if same:
                missed.append(f"{mistake}: {bad.program.show()}")
    assert tried and not missed, "\n".join(missed)
