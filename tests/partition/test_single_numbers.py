"""Single numbers: what each reader computes for itself stands between no kernels, and places of many caches are told
by one kernel."""

from __future__ import annotations

import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture
from torch import Tensor

import tilewright
from tilewright.ir.kernel import Cover, Kernel
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.schedule.solver import Solver
from tilewright.target import preset


def normed(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


def added_and_normed(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    z = x + y
    return z, normed(z, w)


def covered(case: Case, machine: str) -> Cover:
    solver = Solver(preset(machine), Options())
    return partition(capture(case, False), solver.price, solver.hints)


@pytest.mark.parametrize("machine", ["sm_90", "x86-64-v4"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_norm_of_one_row_is_one_kernel(machine: str, rows: int) -> None:
    (kernel,) = covered(Case("norm", normed, ((rows, 2048), (2048,))), machine).steps
    assert isinstance(kernel, Kernel) and len(kernel.outputs) == 1
    both = covered(Case("sum", added_and_normed, ((rows, 2048), (rows, 2048), (2048,))), machine)
    assert len(both.steps) == 1


def counted(c: Tensor, d: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    k.index_copy_(0, c + torch.arange(1), x * 2)
    c.add_(1)
    v.index_copy_(0, d + torch.arange(1), x * 3)
    d.add_(1)
    return torch.sin(k) + v


def test_places_of_several_caches_are_one_kernel() -> None:
    torch.compiler.reset()
    tilewright.reset()
    compiled = torch.compile(counted, backend="tilewright", dynamic=False)
    ours, theirs = (
        [torch.tensor([3]), torch.tensor([5]), torch.zeros(9, 8), torch.zeros(9, 8)] for _ in range(2)
    )
    for n in range(3):
        x = torch.randn(1, 8, generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close(compiled(*ours, x), counted(*theirs, x))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
    (made,) = tilewright.compilations()
    assert not made.calls and len(made.kernels) <= 4, "places, counters, both lines, the result"


@pytest.mark.parametrize("machine", ["sm_90", "x86-64-v4"])
def test_the_place_of_the_least_element_is_no_number_of_the_inputs(machine: str) -> None:
    """It is one of two results of its op."""
    case = Case("least", lambda x: x.argmin(0, keepdim=True).to(torch.float32), ((2,),))
    assert covered(case, machine).steps
