"""Gradients of many results at once: `torch.autograd.grad(..., is_grads_batched=True)`, and `jacobian` of
`torch.autograd.functional` with `vectorize=True`. Torch gives a backward pass tensors that stand for any one of a batch
and have no memory, which kernels cannot read; so a compiled pass runs for one after the other."""

# What torch has for this it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.capture.opaque import Runner

aten = torch.ops.aten


def one_by_one(runner: Runner) -> Runner:
    """`runner` for arguments that may stand for batches; so do its results then. It must leave what its arguments hold
    as it is."""

    def run(args: list[object]) -> list[object]:
        level = _levels()
        if not level:
            return runner(args)
        given = tuple(args)
        args.clear()
        return _over_batch(runner, given, level)

    return run


def _levels() -> int:
    """How many batches of this kind are open, one inside the other."""
    count = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return count - 1


def _over_batch(runner: Runner, args: Sequence[object], level: int) -> list[object]:
    """Run for each of the batch of a level, those inside of it one after the other, and make batches of the results."""
    if not level:
        return list(runner(list(args)))
    found = {k: _batch_of(t, level) for k, t in enumerate(args) if isinstance(t, Tensor)}
    batches = {k: batch for k, batch in found.items() if batch is not None}
    if not batches:
        return _over_batch(runner, args, level - 1)
    rows: list[list[object]] = []
    for n in range(len(next(iter(batches.values())))):
        row = [batches[k][n] if k in batches else a for k, a in enumerate(args)]
        rows.append(_over_batch(runner, row, level - 1))
    return [_as_batch(column, level) for column in zip(*rows, strict=True)]


def _batch_of(t: Tensor, level: int) -> Tensor | None:
    """All that a tensor stands for at a level, along the first dim; None if that is itself: of itself torch makes as
    many as it is asked for."""
    batch, other = (aten._remove_batch_dim(t, level, count, 0) for count in (1, 2))
    return batch if batch.shape == other.shape else None


def _as_batch(column: Sequence[object], level: int) -> object:
    tensors = [x for x in column if isinstance(x, Tensor)]
    if len(tensors) < len(column):
        return column[0]  # no gradient, or a number
    return aten._add_batch_dim(torch.stack(tensors), 0, level)
