"""How much memory a process takes while something runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path


class PeakMemory:
    """The growth of resident memory within a `with` block: `bytes` afterwards, None where the system does
    not tell.

    Linux resets the high-water mark on request; freed heap is given back first, so that the block cannot
    hide in it.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._base = 0
        self._reset = False

    def __enter__(self) -> PeakMemory:
        gc.collect()
        _give_back_heap()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._base, self._reset = _status("VmRSS"), True
        except OSError:
            self._base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self

    def __exit__(self, *exc: object) -> None:
        if self._reset:
            self.bytes = max(0, _status("VmHWM") - self._base)
        elif sys.platform == "linux":
            self.bytes = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self._base)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _give_back_heap() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
