"""Large results on large pages: fresh memory costs one page fault per page, more than a kernel takes to fill it."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewright.runtime.plan.tensors import Make
from tilewright.tuning.runtime_thresholds import CPU_WORK

LARGE_PAGE_BYTES = 2 << 20
"""Bytes of a large page."""


@functools.lru_cache(maxsize=1)
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's `madvise`, where it knows large pages."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def on_large_pages(t: Tensor) -> Tensor:
    """Ask that fresh memory of `t`, in main memory, comes in large pages where whole ones fit; returns `t`.

    A system that refuses (or has none) leaves everything as it was."""
    advise = _advise()
    if advise is not None:
        start = -(-t.data_ptr() // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        end = (t.data_ptr() + t.untyped_storage().nbytes()) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
        if end > start:
            advise(start, end - start, mmap.MADV_HUGEPAGE)
    return t


def large_maker(make: Make) -> Make:
    """`make`, with large pages for its larger tensors."""

    def made(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        t = make(shape, strides, dtype)
        return on_large_pages(t) if t.untyped_storage().nbytes() >= CPU_WORK.min_huge_page_bytes else t

    return made
