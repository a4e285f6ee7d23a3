"""Roundings to a half type: one that is repeated is done once, and the last one is the store's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.corpus import Case
from tests.support.lowered import execute
from tests.support.one_kernel import capture, one_kernel
from tests.support.triton.harness import print_triton
from torch import Tensor

from tilewright.interp import FLOATS
from tilewright.ir.dtype import f16, f32
from tilewright.ir.expr import Expr, walk
from tilewright.ir.graph import Value
from tilewright.ir.program import Store, TileProgram, expressions
from tilewright.lower.variants import variants
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import PRESETS

DYNAMIC = ({0: "n", 1: "m"},)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.half(), -1)


def by_hand(x: Tensor) -> Tensor:
    """Written with a rounding of what is rounded already."""
    return torch.softmax(x, -1).half().float().half()


def between(x: Tensor) -> Tensor:
    """Roundings that later steps see stay: one of the input, one of the exponential."""
    return (torch.exp(x.half().float()).half().float().half().float() + 0.1).half()


def is_rounded(e: Expr) -> bool:
    """Whether an element is one that fp16 has, held in fp32."""
    return e.op == "cast" and e.dtype is f32 and e.args[0].op == "cast" and e.args[0].dtype is f16


def repeated(program: TileProgram) -> list[Expr]:
    """Roundings to fp16 of what is rounded, by the code or by a store."""
    nodes = [x for s in program.statements() for e in expressions(s) for x in walk(e)]
    stored = [s.value for s in program.statements() if isinstance(s, Store) and s.buffer.dtype is f16]
    return [x for x in nodes if x.op == "cast" and x.dtype is f16 and is_rounded(x.args[0])] + [
        x for x in stored if is_rounded(x)
    ]


@pytest.mark.parametrize("machine", ["sm_90", "x86-64-v3"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("run", "stays"), [(softmax, True), (by_hand, False), (between, True)])
def test_none_is_done_twice(run: Callable[..., Tensor], stays: bool, dynamic: bool, machine: str) -> None:
    case = Case(run.__name__, run, ((9, 70),), DYNAMIC)
    graph = capture(case, dynamic)
    made = Solver(PRESETS[machine], Options()).solve(one_kernel(graph), graph.layouts)
    for program in made.programs:
        assert not repeated(program)
        found = [x for s in program.statements() for e in expressions(s) for x in walk(e) if is_rounded(x)]
        assert bool(found) == stays, "those that later steps see stay"
    (x,) = case.inputs()
    (source,) = (v for v in graph.inputs if isinstance(v, Value))
    results = execute(graph, made, [FLOATS.load(x, source.dtype)], FLOATS)
    (out,) = (v for v in graph.outputs if isinstance(v, Value))
    np.testing.assert_allclose(np.asarray(results[out]), run(x).float().numpy(), rtol=1e-3, atol=1e-6)


def test_printed() -> None:
    graph = capture(Case("softmax", by_hand, ((9, 70),), DYNAMIC), True)
    made = Solver(PRESETS["sm_90"], Options()).solve(one_kernel(graph), graph.layouts)
    symbols = sorted(map(str, graph.symbols()))
    for program in made.programs:
        text = print_triton(program, symbols, PRESETS["sm_90"], variants(program)[0], "k0").text
        stores = [line for line in text.splitlines() if "tl.store" in line]
        assert stores and all(line.count(".to(tl.float16)") == 1 for line in stores)
        assert ".to(tl.float16).to(tl.float32)" not in text
