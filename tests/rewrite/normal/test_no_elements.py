"""Tensors without elements: what folds them is what no element gives, and no kernel reads memory that is not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

import tilewright
from tilewright.ir.sizes import dims
from tilewright.rewrite.normal.normalise import without_nothing

PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "product over nothing": (torch.matmul, ((5, 0), (0, 10))),
    "product of no rows": (torch.matmul, ((0, 5), (5, 10))),
    "group norm of no images": (lambda x, w, b: F.group_norm(x, 1, w, b), ((0, 2), (2,), (2,))),
    "layer norm of no rows": (lambda x, w: F.layer_norm(x, (16,), w), ((0, 16), (16,))),
    "attention to no keys": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, ((2, 4, 8), (2, 0, 8), (2, 0, 8))),
    "sum and what follows": (lambda x, y: x.sum(1) + y, ((3, 0), (3,))),
    "mean": (lambda x: x.mean(0) * 2, ((0, 4),)),
    "both in one graph": (lambda x, y: torch.cat(((x + y[:1]).sum(0), y.sum(1))), ((0, 3), (4, 3))),
}


def _inputs(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s) for s in shapes]


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_for_gpus(name: str) -> None:
    run, shapes = PROGRAMS[name]
    inputs = _inputs(shapes)
    (made,), _ = compiled(run, inputs).run(inputs)
    torch.testing.assert_close(made, run(*inputs), equal_nan=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_passes(name: str) -> None:
    run, shapes = PROGRAMS[name]
    made, wanted = _inputs(shapes), _inputs(shapes)
    for t in (*made, *wanted):
        t.requires_grad_()
    ours, eager = torch.compile(run, backend=tilewright.backend)(*made), run(*wanted)
    torch.testing.assert_close(ours, eager, equal_nan=True)
    ours.sum().backward()
    eager.sum().backward()
    for a, b in zip(made, wanted, strict=True):
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True)


def test_no_reduction_over_nothing_is_left() -> None:
    for run, shapes in PROGRAMS.values():
        graph = without_nothing(capture(run, _inputs(shapes)))
        for op in graph.ops:
            assert op.expr is not None
            assert dims.ZERO not in [a.extent for a in op.expr.reduce]
            assert not op.inputs or dims.ZERO not in op.outputs[0].shape
