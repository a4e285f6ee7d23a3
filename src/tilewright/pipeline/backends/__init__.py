"""What makes tile programs run, by kind of device: each backend is a file here and a line of `BACKENDS`.

`pipeline.build.Backend` says what one must offer. `cpu` prints C++ and builds one library for a graph; `cuda` prints
Triton and builds each kernel by itself. Which of them a graph gets, its device says.
"""

from __future__ import annotations

import torch

from tilewright.pipeline.build import Backend

from .cpu import CpuBackend
from .cuda import CudaBackend

BACKENDS: dict[str, Backend] = {"cpu": CpuBackend(), "cuda": CudaBackend()}
"""By kind of device."""


def backend_of(device: str) -> Backend | None:
    """What makes code run on a device; None if nothing does."""
    return BACKENDS.get(torch.device(device).type)
