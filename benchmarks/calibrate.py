"""Sane statistics for the batch norms of models with random weights."""

from __future__ import annotations

import torch


def calibrate(model: torch.nn.Module, images: torch.Tensor) -> None:
    """Give every batch norm the statistics of `images`, in place."""
    norms = [
        module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    ]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all passes
        norm.train()
    with torch.no_grad():
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()
