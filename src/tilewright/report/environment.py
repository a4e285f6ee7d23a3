"""The machine and the versions behind a figure."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path


def environment() -> dict[str, str | int]:
    """The machine and the versions behind a figure: CPU model, cores, system, Python and packages."""
    facts: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }
    for package in ("tilewright", "torch", "onnxruntime", "onnx", "numpy", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    return facts


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def now() -> str:
    """The minute, for people."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
