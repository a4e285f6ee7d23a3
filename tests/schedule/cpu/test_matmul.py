"""Attention-like kernels on a CPU: products of blocks in one kernel, against eager, float64 and the exact type."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.schedule.attention_parts import CAUSAL, PLAIN, attended, causal, columns, masked, qkv, score
from tests.support.corpus import Case
from tests.support.cpp_harness import Unit, build
from tests.support.one_kernel import build_cases, run, sizes_of, solved
from torch import Tensor

from tilewright.accuracy import compare
from tilewright.interp.algebra import STORAGE
from tilewright.interp.exact import ELEMENT, EXACT, equal, exact_random
from tilewright.interp.graph import run_graph
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Dot
from tilewright.ir.sizes import dims


def row_and_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = masked(score(q, k), causal)
    top = s.amax(-1, keepdim=True)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    return (e @ v) / total, (top + torch.log(total))[..., 0]


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, heads, s, d = q.shape
    shared = [t[:, :, None].expand(b, t.shape[1], heads // t.shape[1], -1, -1) for t in (k, v)]
    wide = q.reshape(b, k.shape[1], heads // k.shape[1], s, d)
    return attended(masked(score(wide, shared[0]), causal), shared[1]).reshape(b, heads, s, -1)


def noisy(q: Tensor, k: Tensor, noise: Tensor) -> Tensor:
    return torch.logsumexp(masked(score(q, k) + noise, causal), -1)


class Half(Case):
    """A case with inputs in fp16."""

    def inputs(self, scale: int = 1, seed: int = 0) -> list[Tensor]:
        return [t.half() for t in super().inputs(scale, seed)]


ROWS = ({0: "b", 1: "s"}, {0: "b", 1: "t"}, {0: "b", 1: "t"})
WINDOW = lambda q, k, v: attended(masked(score(q, k), lambda i, j: (i >= j) & (i - j < 20)), v)  # noqa: E731
CAPPED = lambda q, k, v: attended(masked(5 * torch.tanh(score(q, k) / 5), causal), v)  # noqa: E731
WRITTEN = lambda q, k, v: torch.softmax(score(q, k), -1) @ v  # noqa: E731


CASES = (
    Case("plain", PLAIN, qkv(2, 70, 131, 24, 40), ROWS),
    Case("whole tiles", PLAIN, qkv(2, 64, 128, 64, 64)),
    Case("causal", CAUSAL, qkv(2, 150, 150, 64, 64), ({1: "s"}, {1: "s"}, {1: "s"})),
    Case("one", CAUSAL, qkv(3, 1, 1, 16, 16)),
    Case("decode", PLAIN, qkv(4, 1, 259, 64, 64)),
    Case("long heads", CAUSAL, qkv(1, 67, 67, 256, 128)),
    Half("halves", PLAIN, qkv(2, 70, 300, 40, 64)),
    Case("window", WINDOW, qkv(2, 150, 150, 20, 36)),
    Case("capped", CAPPED, qkv(2, 90, 90, 32, 32)),
    Case("as written", WRITTEN, qkv(2, 90, 77, 32, 32)),
    Case("row and lse", row_and_lse, qkv(2, 100, 100, 48, 48)),
    Case("columns", columns, ((2, 90, 32), (2, 90, 32), (2, 90))),
    Case("grouped", grouped, ((2, 8, 33, 16), (2, 2, 33, 16), (2, 2, 33, 16))),
    Case("noisy", noisy, ((2, 70, 32), (2, 70, 32), (2, 70, 70))),
)
VARIANTS = [(c, d) for c in CASES for d in ((False, True) if c.dynamic else (False,))]
Built = tuple[Unit, list[tuple[Graph, Scheduled]]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """All cases in one translation unit."""
    return build_cases(tmp_path_factory.mktemp("products"), VARIANTS)


def given(case: Case, scale: int, seed: int) -> list[Tensor]:
    """Inputs; what a column kernel takes for logarithms of sums is one."""
    inputs = case.inputs(scale, seed)
    if case.run is columns:
        inputs[2] = torch.logsumexp(masked(score(inputs[0], inputs[1]), causal), -1)
    return inputs


@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=[f"{c.name}-{d}" for c, d in VARIANTS])
def test_products_obey_the_float64_rule(built: Built, number: int) -> None:
    unit, parts = built
    case, dynamic = VARIANTS[number]
    graph, scheduled = parts[number]
    one = case.shapes[0][1] == 1  # a single query leaves no class for lanes
    assert one != any(isinstance(s, Dot) for s in scheduled.program.statements())
    for scale in (1, 2, 3) if dynamic else (1,):
        inputs = given(case, scale, number)
        made = run(unit, number, graph, scheduled, inputs)
        eager, wide = case.run(*inputs), case.run(*[t.double() for t in inputs])
        pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (eager, wide)), strict=True)
        for v, (e, r) in zip(graph.outputs, pairs, strict=True):
            assert isinstance(v, Value)
            got = torch.from_numpy(made[scheduled.kernel.outputs.index(v)].copy())
            if e.dtype is torch.bool:
                assert torch.equal(got, e)
                continue
            tolerance = 1e-2 if e.dtype is torch.half else 1e-4
            assert torch.allclose(got, e, rtol=tolerance, atol=tolerance / 10)
            assert compare(got, e, r).passed


SMALL = (
    Case("plain", PLAIN, qkv(1, 5, 70, 3, 4)),
    Case("causal", CAUSAL, qkv(1, 19, 19, 8, 17), ({1: "s"}, {1: "s"}, {1: "s"})),
    Case("window", WINDOW, qkv(1, 67, 67, 4, 4)),
    Case("as written", WRITTEN, qkv(1, 9, 12, 4, 4)),
    Case("columns", lambda q, k, z: columns(q, k, z)[:2], ((1, 20, 4), (1, 20, 4), (1, 20))),
)


def test_products_are_exact(tmp_path: Path) -> None:
    parts = [(c, *solved(c, bool(c.dynamic))) for c in SMALL]
    symbols = sorted({repr(s) for _, g, _ in parts for s in g.symbols()})
    unit = build(tmp_path, [s.program for *_, s in parts], symbols, exact=True)
    lost = ctypes.c_int64.in_dll(unit.library, "tw_exact_error")
    for number, (case, graph, scheduled) in enumerate(parts):
        tensors = case.inputs()
        inputs = [exact_random(tuple(t.shape), k + 3, -2, 2) for k, t in enumerate(tensors)]
        sizes = sizes_of(graph, [t.numpy() for t in tensors])
        held = dict(zip([v for v in graph.inputs if isinstance(v, Value)], inputs, strict=True))
        for v in scheduled.kernel.outputs:
            shape = [dims.evaluate(e, sizes) for e in v.shape]
            held[v] = np.zeros(shape, ELEMENT if v.dtype.is_float else STORAGE[v.dtype.name])
        known = dict.fromkeys(symbols, 0) | sizes
        assert unit.run(number, [held[v] for v in scheduled.params], known) == 0
        assert lost.value == 0, f"{case.name}: residues are lost"
        for v, want in zip(graph.outputs, run_graph(graph, list(inputs), EXACT), strict=True):
            assert isinstance(v, Value)
            assert equal(held[v], np.asarray(want)), f"{case.name} is not exact"
