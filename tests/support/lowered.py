"""Runs a lowered program beside the graph that it came from, and plants mistakes in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from tests.support.corpus import Case
from tests.support.one_kernel import capture, one_kernel

from tilewright.form.classes import make_form
from tilewright.interp import EXACT, Algebra, equal, exact_random, run_program
from tilewright.interp.algebra import Array
from tilewright.ir.expr import Expr, Symbol
from tilewright.ir.form import Form
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Stmt, rewrite_body
from tilewright.ir.sizes import dims


def data(case: Case, graph: Graph, algebra: Algebra) -> list[Array]:
    """Inputs in general position; indices as the case makes them."""
    made: list[Array] = []
    for k, (v, t) in enumerate(zip(graph.inputs, case.inputs(), strict=True)):
        assert isinstance(v, Value)
        exact = algebra is EXACT and v.dtype.is_float
        made.append(exact_random(tuple(t.shape), 10 + k) if exact else algebra.load(t, v.dtype))
    return made


def sizes(graph: Graph, inputs: list[Array]) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for v, a in zip(graph.inputs, inputs, strict=True):
        assert isinstance(v, Value)
        for e, n in zip(v.shape, a.shape, strict=True):
            if isinstance(e.value, Symbol):
                found[e.value.name] = n
    return found


def execute(graph: Graph, scheduled: Scheduled, inputs: list[Array], algebra: Algebra) -> dict[Value, Array]:
    """Results of the tile program in the shapes of the graph."""
    known = sizes(graph, inputs)
    whole = {name: int(n) for name, n in known.items()}
    number: Callable[[Expr], int] = lambda e: dims.evaluate(e, whole)  # noqa: E731
    of = {v: _in_memory(graph, v, a, number) for v, a in zip(graph.inputs, inputs, strict=True)}
    memory = run_program(scheduled.program, [of.get(v) for v in scheduled.params], known, algebra)
    results: dict[Value, Array] = {}
    for v, flat in zip(scheduled.params, memory, strict=True):
        shape = [number(e) for e in v.shape]
        layout = graph.layouts.get(v)
        steps = [
            number(e) * flat.itemsize for e in (layout.strides if layout else dims.dense_strides(v.shape))
        ]
        results[v] = np.lib.stride_tricks.as_strided(flat, shape, steps)
    return results


def _in_memory(graph: Graph, v: object, a: Array, number: Callable[[Expr], int]) -> Array:
    """An input as its layout has it."""
    layout = graph.layouts.get(v) if isinstance(v, Value) else None
    steps = [number(e) for e in layout.strides] if layout is not None else []
    if layout is None or not a.size or steps == [n // a.itemsize for n in np.ascontiguousarray(a).strides]:
        return a
    flat = np.zeros(1 + sum((n - 1) * step for n, step in zip(a.shape, steps, strict=True)), a.dtype)
    np.lib.stride_tricks.as_strided(flat, a.shape, [n * a.itemsize for n in steps])[...] = a
    return flat


def agree(graph: Graph, scheduled: Scheduled, inputs: list[Array], wanted: list[object]) -> bool:
    """Whether the program gives exactly what the graph gives."""
    results = execute(graph, scheduled, inputs, EXACT)
    pairs = [(results[v], w) for v, w in zip(graph.outputs, wanted, strict=True) if isinstance(v, Value)]
    return all(isinstance(w, np.ndarray) and equal(r.copy(), w) for r, w in pairs)


Mutation = Callable[[Stmt], Sequence[Stmt] | None]


def mutants(body: Sequence[Stmt], change: Mutation) -> Iterator[tuple[Stmt, ...]]:
    """The body with `change` applied to one statement at a time."""
    places = 0

    def count(s: Stmt) -> None:
        nonlocal places
        places += change(s) is not None

    rewrite_body(body, count)
    for chosen in range(places):
        seen = -1

        def only(s: Stmt, chosen: int = chosen) -> Sequence[Stmt] | None:
            nonlocal seen
            new = change(s)
            seen += new is not None
            return new if seen == chosen else None

        yield rewrite_body(body, only)


def form_of(case: Case, dynamic: bool = False) -> Form:
    graph = capture(case, dynamic)
    return make_form(one_kernel(graph), graph.layouts)
