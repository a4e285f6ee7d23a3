"""Breadth: torch's own samples of every operator. Run with `-s` to see the count and what is left to libraries."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.support.ops.captured_op import library_calls, same, trace
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tilewright.capture.fx import from_fx
from tilewright.errors import UnsupportedError
from tilewright.interp import run_graph

pytest.importorskip("expecttest")  # torch's own test tools import it

SAMPLES = 2
INEXACT = ("grid_sample",)
"""Ops for which eager computes places in the half type, and we in fp32: results differ by more than roundings."""

UNDEFINED = ("empty", "new_empty", "uninitialized")
"""Ops whose result has no defined elements."""


def _operators() -> Iterator[object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    yield from op_db


def _outcome(op: object, sample: object, dtype: torch.dtype) -> str:
    """ "generated", "library: names", "undefined", or "no trace" where torch itself cannot trace the sample."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))  # type: ignore[attr-defined]
    spots = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    given = [leaves[k].detach().clone() for k in spots]
    if any(t.numel() > 5000 or t.layout is not torch.strided for t in given):
        return "no trace"

    def fn(*tensors: torch.Tensor) -> list[object]:
        filled = list(leaves)
        for k, t in zip(spots, tensors, strict=True):
            filled[k] = t
        first, args, kwargs = tree_unflatten(filled, spec)
        return tree_leaves(op.op(first, *args, **kwargs))  # type: ignore[attr-defined]

    try:
        want = [t for t in fn(*[t.clone() for t in given]) if isinstance(t, torch.Tensor)]
        gm = trace(fn, given)
    except Exception:  # noqa: BLE001  torch refuses some of its own samples
        return "no trace"
    try:
        graph = from_fx(gm)
    except UnsupportedError as refused:
        assert "layout torch.sparse" in str(refused)
        return "refused"
    calls = library_calls(graph)
    if calls:
        return "library: " + ", ".join(sorted(set(calls)))
    if any(word in op.name for word in UNDEFINED):  # type: ignore[attr-defined]
        return "undefined"
    if dtype.itemsize == 2 and any(word in op.name for word in INEXACT):  # type: ignore[attr-defined]
        return "inexact"
    with np.errstate(all="ignore"):
        got = run_graph(graph, [t if t.dtype is torch.bfloat16 else t.numpy() for t in given])
    tensors = [g for g in got if not isinstance(g, (int, float))]
    for ours, theirs in zip(tensors, want, strict=False):
        same(np.asarray(ours), theirs)
    return "generated"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float32, 400), (torch.int64, 250), (torch.bfloat16, 330), (torch.bool, 190)]
)
@pytest.mark.filterwarnings("ignore")
def test_samples(dtype: torch.dtype, least: int) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    libraries: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for op in _operators():
        if not op.supports_dtype(dtype, "cpu"):  # type: ignore[attr-defined]
            continue
        torch.manual_seed(0)
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))  # type: ignore[attr-defined]
        seen: set[str] = set()
        for sample in samples[:: max(1, len(samples) // SAMPLES)]:
            try:
                seen.add(_outcome(op, sample, dtype))
            except Exception as bad:  # noqa: BLE001  every operator is to be counted
                wrong.append(f"{op.name}: {type(bad).__name__} {str(bad).strip()[:200]}")  # type: ignore[attr-defined]
        outcomes["generated" if seen == {"generated"} else min(seen, default="wrong").split(":")[0]] += 1
        libraries.update(s for s in seen if s.startswith("library"))
    print(
        f"{dtype}: {dict(outcomes)}",
        *[f"\n  {n}x {s}" for s, n in libraries.most_common(30)],
        *wrong,
        sep="\n",
    )
    assert wrong == []
    assert outcomes["generated"] >= least
