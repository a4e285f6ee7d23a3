"""Cross-overs of what runs plans, as `thresholds` has those of what makes them."""

from __future__ import annotations

from dataclasses import dataclass

from .load import load


@dataclass(frozen=True, slots=True)
class CpuWorkThresholds:
    """Rates, pages and launches of a CPU."""

    reached_peak_ratio: float
    min_huge_page_bytes: int
    max_uninterrupted_launches: int
    max_cache_share_bytes: int


CPU_WORK = load(CpuWorkThresholds, "cpu_work")


@dataclass(frozen=True, slots=True)
class GpuWorkThresholds:
    """Rates and launches of a GPU."""

    reached_bandwidth_ratio: float
    min_bundled_launches: int


GPU_WORK = load(GpuWorkThresholds, "gpu_work")


@dataclass(frozen=True, slots=True)
class OwnKernelThresholds:
    """When the kernels written by hand pay."""

    min_keys: int
    min_depth: int
    min_run_elements: int
    min_filled_ratio: float
    min_winograd_channels: int
    min_winograd_tiles: int
    min_between_ratio: float


OWN_KERNELS = load(OwnKernelThresholds, "own_kernels")
