"""Where a GPU's kernels round: products and sums one by one unless blocks are multiplied, exponentials of singles
closely."""

from __future__ import annotations

import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture, one_kernel
from tests.support.triton.harness import print_triton
from torch import Tensor

from tilewright.emit.triton.kernel import TritonSource
from tilewright.lower.variants import variants
from tilewright.options import Options
from tilewright.runtime.cuda.build import job_of
from tilewright.schedule.solver import Solver
from tilewright.target import preset


class Halves(Case):
    """Inputs in half precision."""

    def inputs(self, scale: int = 1, seed: int = 0) -> list[Tensor]:
        return [x.half() for x in super().inputs(scale, seed)]


def source_of(case: Case, machine: str = "sm_90") -> TritonSource:
    target = preset(machine)
    graph = capture(case, False)
    program = Solver(target, Options()).solve(one_kernel(graph), graph.layouts).program
    return print_triton(program, (), target, variants(program)[0], "k0")


def residue(x: Tensor, y: Tensor) -> Tensor:
    """Zero for rows of one element, if the product is rounded where it is taken from its mean as in the mean."""
    z = x * y
    return z - z.mean(-1, keepdim=True)


@pytest.mark.parametrize("machine", ["sm_80", "sm_90", "gfx942"])
def test_only_products_of_blocks_round_once_with_their_sum(machine: str) -> None:
    apart = source_of(Case("residue", residue, ((64, 40), (64, 40))), machine)
    pointwise = source_of(Case("sum", lambda x, y: x * y + x, ((64, 40), (64, 40))), machine)
    blocks = source_of(Halves("product", lambda x, y: x @ y, ((64, 64), (64, 64))), machine)
    assert not job_of(apart, preset(machine)).fusion and not job_of(pointwise, preset(machine)).fusion
    assert job_of(blocks, preset(machine)).fusion


def test_sigmoids_of_singles_are_close() -> None:
    case = Case("silu", torch.nn.functional.silu, ((64, 40),))
    text = source_of(case).text
    assert "close_exp(" in text and "tl.sigmoid" not in text
    assert "tl.sigmoid" in source_of(Halves("silu", case.run, case.shapes)).text
