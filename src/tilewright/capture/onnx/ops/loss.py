"""Losses."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.capture.onnx.registry import op


def _nll(
    log_p: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int | None, reduction: str
) -> Tensor:
    """Negative log likelihood with class dim 1; written with a gather, for any rank."""
    classes = target.to(torch.int64)
    ignored = None if ignore_index is None else classes == ignore_index
    safe = classes if ignored is None else torch.where(ignored, 0, classes)
    loss = -torch.gather(log_p, 1, safe.unsqueeze(1)).squeeze(1)
    factor = torch.ones_like(loss) if weight is None else weight[safe].to(loss.dtype)
    if ignored is not None:
        factor = torch.where(ignored, torch.zeros_like(factor), factor)
    loss = torch.where(factor == 0, torch.zeros_like(loss), loss * factor)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / factor.sum()


@op("NegativeLogLikelihoodLoss", since=12)
def nll_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Negative log likelihood of the target classes."""
    return _nll(x, target, weight, ignore_index, reduction)


@op("SoftmaxCrossEntropyLoss", since=12)
def cross_entropy(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    outputs: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of scores with class dim 1; the second output is the log probabilities."""
    log_p = torch.log_softmax(scores, 1)
    loss = _nll(log_p, target, weight, ignore_index, reduction)
    return loss if outputs == 1 else (loss, log_p)
