"""Floats of sums of indices are taken axis by axis where that changes nothing."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.specialised import CHANGES, attention
from torch import Tensor

from tilewright.ir.dtype import f32
from tilewright.ir.expr import axes_of, walk
from tilewright.ir.program import TileProgram, expressions
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.target import preset


def legal(scale: int) -> TileProgram:
    """Attention with a bias by distance; keys lie `scale` times as far apart as queries."""

    def change(s: Tensor, heads: int) -> Tensor:
        i = torch.arange(s.shape[-1])
        return s + 0.5 * (scale * i[None, :] - i[:, None]).float()

    (kernel,) = compiled(attention(change), [torch.zeros(1, 64, 512, 64).half()] * 3).kernels
    return legalised(kernel.program)


def legalised(program: TileProgram) -> TileProgram:
    return legalise_for_gpu(replace(program, warp_specialised=True), preset("sm_90"))


def converted(program: TileProgram) -> set[int]:
    """How many axes the indices have that become floats."""
    floats = (x for s in program.statements() for e in expressions(s) for x in walk(e) if x.op == "cast")
    return {len(axes_of(x.args[0])) for x in floats if x.dtype is f32 and axes_of(x.args[0])}


def test_each_axis_by_itself() -> None:
    assert converted(legal(1)) == {1}


def test_usual_warps_convert_as_ever() -> None:
    (kernel,) = compiled(attention(CHANGES["alibi"]), [torch.zeros(1, 64, 256, 64).half()] * 3).kernels
    assert 2 in converted(legalise_for_gpu(kernel.program, preset("sm_90")))


def test_large_numbers_stay_together() -> None:
    """The float of a sum of more than 24 bits is rounded once."""
    assert converted(legal(1 << 20)) == {2}


def test_the_meaning_stays() -> None:
    """Two axes of a bias by head; the slopes are floats of the head alone."""
    (kernel,) = compiled(attention(CHANGES["alibi"]), [torch.zeros(1, 64, 256, 64).half()] * 3).kernels
    assert converted(legalised(kernel.program)) == {1}
