"""Sums in parts: what cancels between the parts is not lost, as they are doubles where the machine adds doubles."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.interp import FLOATS, run_program
from tilewright.ir.dtype import DType, f32, f64
from tilewright.ir.graph import Graph, Op
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.rewrite.split.reduction import list_splits
from tilewright.rewrite.split.seen_reads import Inside
from tilewright.schedule.schedulers import scheduler_of
from tilewright.schedule.solver import Solver
from tilewright.target import PRESETS, Target

HOPPER = PRESETS["sm_90"]
COUNT = 1 << 14


def halves(case: Case, target: Target) -> tuple[Graph, Op, Op]:
    """The sum of a program in two steps."""
    graph = capture(case, False)
    (op,) = (o for o in graph.ops if o.expr is not None and o.expr.reduction is not None)
    return graph, *list_splits(
        op, 1000, target, scheduler_of(target).splits, NO_HINTS, Inside(graph, NO_HINTS)
    )[0]


def in_steps(case: Case, x: Tensor) -> np.ndarray:
    """What the two kernels make of `x`, run one after the other."""
    graph, first, second = halves(case, HOPPER)
    solver = Solver(HOPPER, Options())
    parts = solver.solve(Kernel((first,), first.outputs), graph.layouts)
    _, held = run_program(parts.program, [x.numpy(), None], {}, FLOATS)
    whole = solver.solve(Kernel((second,), second.outputs), graph.layouts)
    *_, made = run_program(whole.program, [held, *([None] * len(second.outputs))], {}, FLOATS)
    return np.asarray(made)


def test_what_cancels_between_parts_is_kept() -> None:
    """The second half is the negative of the first, in another order and but for one element."""
    torch.manual_seed(0)
    x = torch.rand(COUNT // 2) + 1
    x = torch.cat([x, -x[torch.randperm(COUNT // 2)]])
    x[5] += 2**-20
    made = in_steps(Case("sum", lambda x: x.sum(), ((COUNT,),)), x)
    assert made.item() == float(x.double().sum().float())


@pytest.mark.parametrize(
    ("program", "dtype", "kept"),
    [
        (lambda x: x.sum(), torch.float32, f64),
        (lambda x: (x * 2 + 1).sum(), torch.float32, f64),
        (lambda x: (x * x).sum(), torch.float32, f32),
        (lambda x: x.abs().sum(), torch.float32, f32),
        (lambda x: x.float().sum(), torch.float16, f32),
        (lambda x: x.sum(), torch.float64, f64),
        (lambda x: x.amax(), torch.float32, f32),
    ],
)
def test_parts_that_may_cancel_are_doubles(
    program: Callable[[Tensor], Tensor], dtype: torch.dtype, kept: DType
) -> None:
    class Typed(Case):
        def inputs(self, scale: int = 1, seed: int = 0) -> list[Tensor]:
            return [x.to(dtype) for x in super().inputs(scale, seed)]

    _, first, second = halves(Typed("sum", program, ((COUNT,),)), HOPPER)
    assert [v.dtype for v in first.outputs] == [kept]
    assert second.outputs[0].dtype is (f64 if dtype is torch.float64 else f32)


def test_products_in_parts_stay_products() -> None:
    case = Case("product", lambda x, y: (x[:, None] * y[None]).sum(-1), ((16, COUNT), (16, COUNT)))
    _, first, _ = halves(case, HOPPER)
    assert first.outputs[0].dtype is f32


def test_a_machine_with_slow_doubles_keeps_singles() -> None:
    _, first, _ = halves(Case("sum", lambda x: x.sum(), ((1 << 16,),)), PRESETS["x86-64-v4"])
    assert first.outputs[0].dtype is f32


@pytest.mark.parametrize(
    ("machine", "shape", "counts"),
    [
        ("x86-64-v4", (1 << 14,), [4]),
        ("x86-64-v4", ((1 << 14) - 1,), []),
        ("x86-64-v4", (1 << 20,), [64]),
        ("x86-64-v4", (63, 1 << 14), [4]),
        ("x86-64-v4", (64, 1 << 14), []),
        ("sm_90", (1 << 12,), [4, 16, 64]),
        ("sm_90", (4096, 256), [4]),
        ("sm_90", (255,), []),
    ],
)
def test_a_scheduler_says_which_parts_are_tried(
    machine: str, shape: tuple[int, ...], counts: list[int]
) -> None:
    """Few cores take the most parts that leave each enough, many blocks any number of them."""
    target = PRESETS[machine]
    graph = capture(Case("sum", lambda x: x.sum(-1), (shape,)), False)
    (op,) = (o for o in graph.ops if o.expr is not None and o.expr.reduction is not None)
    found = list_splits(op, 1000, target, scheduler_of(target).splits, NO_HINTS)
    assert [dims.static(part.output.shape[0]) for part, _ in found] == counts
