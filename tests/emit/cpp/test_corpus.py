"""Lowered programs over the exact type: generated code gives the same words as the graph that it came from."""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path

import numpy as np
from tests.support.corpus import CASES
from tests.support.cpp_harness import build
from tests.support.one_kernel import sizes_of, solved

from tilewright.interp.algebra import STORAGE
from tilewright.interp.exact import ELEMENT, EXACT, equal, exact_random
from tilewright.interp.graph import run_graph
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims

NAMES = ("softmax_small", "flatten_softmax", "layer_norm", "group_norm_silu", "row_argmax", "cumsum_plus", "transpose",
         "concat", "slice_flip_roll", "cross_entropy", "max_pool", "pixel_shuffle", "causal_attention", "qkv_heads",
         "gram", "rope", "convolution")  # fmt: skip


def test_lowered_programs_are_exact(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [(c, *solved(c, bool(c.dynamic))) for c in CASES if c.name in NAMES]
    symbols = sorted({repr(s) for _, g, _ in parts for s in g.symbols()})
    unit = build(tmp_path, [s.program for *_, s in parts], symbols, exact=True)
    lost = ctypes.c_int64.in_dll(unit.library, "tw_exact_error")
    assert len(parts) == len(NAMES)
    for number, (case, graph, scheduled) in enumerate(parts):
        tensors = case.inputs()
        given = [exact_random(tuple(t.shape), k + 7, -2, 2) if t.is_floating_point() else t.numpy()
                 for k, t in enumerate(tensors)]  # fmt: skip
        sizes = sizes_of(graph, [t.numpy() for t in tensors])
        held = dict(zip([v for v in graph.inputs if isinstance(v, Value)], given, strict=True))
        for v in scheduled.kernel.outputs:
            shape = [dims.evaluate(e, sizes) for e in v.shape]
            held[v] = np.zeros(shape, ELEMENT if v.dtype.is_float else STORAGE[v.dtype.name])
        known = dict.fromkeys(symbols, 0) | sizes
        assert unit.run(number, [held[v] for v in scheduled.params], known) == 0
        assert lost.value == 0, f"{case.name}: residues are lost"
        for v, want in zip(graph.outputs, run_graph(graph, list(given), EXACT), strict=True):
            assert isinstance(v, Value)
            assert equal(held[v], np.asarray(want)), f"{case.name} is not exact"
