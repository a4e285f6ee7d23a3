"""Random numbers, from torch's own generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import check_size, torch_dtype


@op("RandomNormal", pure=False)
def random_normal(
    *,
    dtype: int = 1,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float = 0.0,
    shape: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Normal numbers of a fixed shape; `seed` is not used, the generator is torch's."""
    check_size(shape, "RandomNormal")
    return torch.randn(*shape, dtype=torch_dtype(dtype), device=device) * scale + mean


@op("RandomUniform", pure=False)
def random_uniform(
    *,
    dtype: int = 1,
    high: float = 1.0,
    low: float = 0.0,
    seed: float = 0.0,
    shape: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Uniform numbers of a fixed shape."""
    check_size(shape, "RandomUniform")
    return torch.rand(*shape, dtype=torch_dtype(dtype), device=device) * (high - low) + low


@op("RandomNormalLike", pure=False)
def random_normal_like(
    x: Tensor, *, dtype: int | None = None, mean: float = 0.0, scale: float = 1.0, seed: float = 0.0
) -> Tensor:
    """Normal numbers in the shape of x."""
    return torch.randn_like(x, dtype=x.dtype if dtype is None else torch_dtype(dtype)) * scale + mean


@op("RandomUniformLike", pure=False)
def random_uniform_like(
    x: Tensor, *, dtype: int | None = None, high: float = 1.0, low: float = 0.0, seed: float = 0.0
) -> Tensor:
    """Uniform numbers in the shape of x."""
    wanted = x.dtype if dtype is None else torch_dtype(dtype)
    return torch.rand_like(x, dtype=wanted) * (high - low) + low


@op("Bernoulli", since=15, pure=False)
def bernoulli(x: Tensor, *, dtype: int | None = None, seed: float = 0.0) -> Tensor:
    """One with probability x."""
    return torch.bernoulli(x).to(x.dtype if dtype is None else torch_dtype(dtype))


@op("Multinomial", since=7, pure=False)
def multinomial(x: Tensor, *, dtype: int = 6, sample_size: int = 1, seed: float = 0.0) -> Tensor:
    """Class indices drawn by unnormalised log probabilities."""
    return torch.multinomial(torch.softmax(x, -1), sample_size, True).to(torch_dtype(dtype))
