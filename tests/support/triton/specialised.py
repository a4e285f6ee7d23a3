"""Attention as programs whose warps are specialised, for a GPU that is not here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.emit.gluon.kernel import emit_kernel
from tilewright.emit.triton.kernel import TritonSource
from tilewright.ir.program import TileProgram
from tilewright.ir.schedule import Role
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.lower.specialise.analyse import SPECIAL
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import preset

Change = Callable[[Tensor, int], Tensor]
"""(scores in fp32 [B, H, S, T], heads) -> what the softmax gets."""


def causal(s: Tensor, heads: int) -> Tensor:
    """Without later keys."""
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


def window(s: Tensor, heads: int) -> Tensor:
    """The last 300 keys."""
    i = torch.arange(s.shape[-1])
    behind = i[:, None] - i[None, :]
    return s.masked_fill((behind < 0) | (behind >= 300), -math.inf)


def soft_cap(s: Tensor, heads: int) -> Tensor:
    """Scores that a tangent bounds."""
    return 20 * torch.tanh(s / 20)


def alibi(s: Tensor, heads: int) -> Tensor:
    """A bias by distance and head."""
    i = torch.arange(s.shape[-1])
    slope = torch.exp2(-(torch.arange(heads) + 1) * 8.0 / heads)
    return s + slope[:, None, None] * (i[None, :] - i[:, None]).float()


CHANGES: dict[str, Change] = {
    "full": lambda s, heads: s, "causal": causal, "window": window, "soft cap": soft_cap, "alibi": alibi,
}  # fmt: skip


def attention(change: Change) -> Callable[..., Tensor]:
    """softmax(q k^T) v of [B, H, S, D], as a user writes it; keys and values may have fewer heads, and a bias may come
    behind them."""

    def run(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        s = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).float()
        s = change(s, q.shape[1])
        for b in bias:
            s = s + b
        return torch.softmax(s, dim=-1).to(v.dtype) @ v

    return run


def specialised(
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    keys: int = 128,
    dynamic: Sequence[Sequence[int]] = (),
) -> tuple[TileProgram, tuple[str, ...]]:
    """The legalised program of the one kernel of a function under the schedule with so many keys in a step, and the
    sizes that it knows by name."""
    device = compiled(run, inputs, dynamic)
    (kernel,) = device.kernels
    solver = Solver(preset("sm_90"), Options(contractions="inside"))
    layouts = device.cover.layouts
    (schedule,) = (
        s.schedule
        for s in solver.specialised(kernel.kernel, layouts)
        if any(c.role is Role.STREAMED and c.tile == keys for c in s.schedule.tiling.classes)
    )
    program = solver.solve(kernel.kernel, layouts, schedule).program
    return legalise_for_gpu(program, preset("sm_90")), device.symbols


def source(program: TileProgram, symbols: Sequence[str] = ()) -> TritonSource:
    """The text for calls that descriptors serve."""
    return emit_kernel(program, symbols, SPECIAL, "k0")
