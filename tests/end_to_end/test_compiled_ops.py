"""Every declared op through the whole pipeline: what the generated code returns is what eager returns."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from tests.support.ops.captured_op import same
from tests.support.ops.cases import Case
from tests.support.ops.more_cases import CASES
from torch.utils._pytree import tree_leaves

import tilewright

SIZES = {"a": 3, "b": 5, "c": 4, "d": 2}
LATER = {"a": 7, "b": 6, "c": 9, "d": 3}

# torch itself fixes a size of these while it traces, or eager refuses the second size.
FIXED = {"take_along", "instance_norm"}


def _check(compiled: Callable[..., object], fn: Callable[..., object], args: list[torch.Tensor]) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = [t for t in tree_leaves(fn(*args)) if isinstance(t, torch.Tensor)]
        got = [t for t in tree_leaves(compiled(*args)) if isinstance(t, torch.Tensor)]
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
        same(ours.float().numpy() if ours.dtype is torch.bfloat16 else ours.numpy(), theirs)


def _fresh(case: Case) -> Callable[..., object]:
    """A function of its own per case: torch counts recompilations by code object."""
    torch._dynamo.reset()
    return lambda *args: case.fn(*args)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_static(case: Case) -> None:
    for dtype in case.dtypes:
        fn = _fresh(case)
        args = [a.make(SIZES, dtype) for a in case.args]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = tilewright.compile(fn, tuple(args))
        _check(compiled, fn, args)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.static and c.name not in FIXED], ids=lambda c: c.name
)
def test_symbolic(case: Case) -> None:
    """One graph for two sizes."""
    if all(d.isdigit() for a in case.args for d in a.dims.split()):
        pytest.skip("no size may change")
    fn = _fresh(case)
    args = [a.make(SIZES, case.dtypes[0]) for a in case.args]
    for t, a in zip(args, case.args, strict=True):
        for d, size in enumerate(a.dims.split()):
            if not size.isdigit():
                torch._dynamo.maybe_mark_dynamic(t, d)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(fn, backend="tilewright")
        _check(compiled, fn, args)
        _check(compiled, fn, [a.make(LATER, case.dtypes[0]) for a in case.args])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.cumsum(1) / x.sum(1, keepdim=True),
        lambda x: x.cumsum(1).softmax(1),
        lambda x: (x[:, :, None] >= x[0].cumsum(0)).sum(2),
        lambda x: (x.cumsum(1), x.cumsum(0)),
        lambda x: x.cumsum(0).cumsum(1),
    ],
    ids=["divided by the total", "softmax of it", "counted", "both ways", "one after the other"],
)
def test_running_sums_and_their_readers(fn: Callable[..., object]) -> None:
    torch._dynamo.reset()
    x = torch.rand(6, 9)
    _check(tilewright.compile(fn, (x,)), fn, [x])
