"""What the GPUs of this machine are: the preset that fits, corrected by what the device says of itself."""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import torch

from tilewright.errors import UnsupportedError
from tilewright.target import PRESETS, MemoryKind, Target
from tilewright.tuning.runtime_thresholds import GPU_WORK

from . import triton_compat


def refuses_early_launch(target: Target) -> str:
    """Why kernels for a GPU cannot be launched before the kernel in front has ended; empty if they can, as far as is
    known without its driver."""
    if not target.has_early_launch:
        return f"{target.name} cannot begin kernels early"
    if not triton_compat.can_wait():
        return f"Triton {triton_compat.version()} has no calls to wait for the kernel in front"
    return ""


class DeviceProperties(Protocol):
    """What torch tells of a device, as far as it is read here."""

    @property
    def major(self) -> int:
        """Of the compute capability."""
        ...

    @property
    def minor(self) -> int:
        """Of the compute capability."""
        ...

    @property
    def multi_processor_count(self) -> int:
        """Multiprocessors."""
        ...

    @property
    def total_memory(self) -> int:
        """Bytes."""
        ...


def missing(device: str) -> str:
    """What keeps kernels from being generated for a GPU here; empty if nothing does."""
    if torch.version.hip is not None:
        return "kernels are not launched on AMD GPUs yet"
    if torch.device(device).type != "cuda":
        return f"no code is generated for {device}"
    if triton_compat.version() is None:
        return "Triton is not installed (pip install triton)"
    return ""


@functools.lru_cache(maxsize=16)
def gpu_target(ordinal: int) -> Target:
    """The machine behind GPU number `ordinal`. Raises UnsupportedError for one older than every preset."""
    return target_of(torch.cuda.get_device_properties(ordinal))


def target_of(found: DeviceProperties) -> Target:
    """The newest preset that is not newer than the device, with the device's own numbers where it tells them."""
    arch = 10 * found.major + found.minor
    known = {int(t.arch): t for t in PRESETS.values() if t.backend == "cuda"}
    older = [a for a in known if a <= arch]
    if not older:
        raise UnsupportedError(
            f"a GPU of compute capability {found.major}.{found.minor}", phase="target",
            hint=f"{min(known) // 10}.{min(known) % 10} is the oldest that code is generated for",
        )  # fmt: skip
    base = known[max(older)]
    told = {
        MemoryKind.DEVICE: found.total_memory,
        MemoryKind.L2: getattr(found, "L2_cache_size", 0),
        MemoryKind.SHARED: getattr(found, "shared_memory_per_block_optin", 0),
    }
    sizes = {kind: int(value) for kind, value in told.items() if value}
    resized = base.resized(cores=found.multi_processor_count, capacities=sizes)
    levels = tuple(
        dataclasses.replace(level, bandwidth=_bandwidth(found) or level.bandwidth)
        if level.kind is MemoryKind.DEVICE
        else level
        for level in resized.levels
    )
    doubles = base.wide_sums and arch in known  # between the presets lie cards with few units for doubles
    return dataclasses.replace(resized, name=f"sm_{arch}", arch=str(arch), levels=levels, wide_sums=doubles)


def singles_may_round() -> bool:
    """Whether torch's switch lets matrix products of fp32 on GPUs read fewer bits (TF32)."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was set by the newer switch alone
        return getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") == "tf32"


def _bandwidth(found: DeviceProperties) -> float:
    """Bytes per second that a copy reaches, of clock (kHz, two transfers each) and width (bits); 0 if not told."""
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return GPU_WORK.reached_bandwidth_ratio * 2e3 * clock * width / 8
