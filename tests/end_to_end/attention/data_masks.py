"""Masks made of data, as programs write them, and what their kernels' loops look like."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tests.support.triton.absent_gpu import Device
from torch import Tensor

from tilewright import accuracy
from tilewright.ir.expr import walk
from tilewright.ir.program import Loop, TileProgram
from tilewright.ir.sizes import dims

Function = Callable[..., Tensor]
D = 32


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(D)).float()


def places(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])[None, :]


def softmax(s: Tensor, seen: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.where(seen, s, float("-inf")), -1).to(v.dtype) @ v


def documents(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    return softmax(s, ((own[..., :, None] == ids[..., None, :]) & (j <= i)).unsqueeze(-3), v)


def later(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    """What came before, by times."""
    return softmax(scores(q, k), (own[..., :, None] >= ids[..., None, :]).unsqueeze(-3), v)


def padding(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return softmax(scores(q, k), real[:, None, None, :], v)


def flags(q: Tensor, k: Tensor, v: Tensor, some: Tensor) -> Tensor:
    s = scores(q, k)
    seen = some.repeat_interleave(64, 0).repeat_interleave(64, 1)
    return softmax(s, seen[: s.shape[-2], : s.shape[-1]], v)


def ended(program: TileProgram) -> list[Loop]:
    """Loops that end at numbers from memory."""
    return [s for s in program.loops() if any(x.op == "var" for e in (s.start, s.stop) for x in walk(e))]


def right(made: Device, function: Function, inputs: list[Tensor]) -> None:
    (ours, *_), _ = made.run(inputs)
    verdict = accuracy.compare(ours, function(*inputs), accuracy.in_float64(function)(*inputs))
    assert verdict.passed, verdict


def received(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What each key receives besides: rows that see nothing make all of it NaN."""
    same = (own[..., :, None] == ids[..., None, :]).unsqueeze(-3)
    p = torch.softmax(torch.where(same, scores(q, k), float("-inf")), -1)
    return p.to(v.dtype) @ v, p.sum(-2)


def listed(program: TileProgram) -> list[Loop]:
    """Loops over entries of a list: each step is one of another axis, at a place from memory."""
    return [
        s
        for s in program.loops()
        if any(
            isinstance(x, Loop)
            and dims.static(dims.sub(x.stop, x.start)) == x.tile
            and any(y.op == "var" for y in walk(x.start))
            for x in s.body
        )
    ]
