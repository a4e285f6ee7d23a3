"""Tilewright compiles PyTorch modules, functions and ONNX files to fused kernels: C++ for CPUs, Triton for GPUs.

`torch.compile(model, backend="tilewright")` needs no import of it.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .options import Options

if TYPE_CHECKING:
    from tilewright.artifact.load import load
    from tilewright.runtime.call.model import CompiledModel

    from .api import compilations, compile, reset, stats, synchronize
    from .keep.saving import save
    from .ways.traced import backend

__all__ = [
    "CompiledModel",
    "Options",
    "backend",
    "compilations",
    "compile",
    "load",
    "reset",
    "save",
    "stats",
    "synchronize",
]
__version__ = "0.1.0"

_HOME = {
    "CompiledModel": "tilewright.runtime.call.model",
    "backend": "tilewright.api",
    "compilations": "tilewright.api",
    "compile": "tilewright.api",
    "load": "tilewright.artifact.load",
    "reset": "tilewright.api",
    "save": "tilewright.keep.saving",
    "stats": "tilewright.api",
    "synchronize": "tilewright.api",
}


def __dir__() -> list[str]:
    """The public names, those that are not imported yet among them."""
    return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})


@contextmanager
def _without_collector() -> Generator[None]:
    """Without the cycle collector: modules live to the end, and a full collection looks at all that torch has made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _grow_old()
            gc.enable()


def _grow_old() -> None:
    """Take all objects for old ones, which only full collections look at: else the next three collections look at what
    was imported, one for each generation. Where a program has frozen objects itself, they stay as they are."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


def __getattr__(name: str) -> object:
    """What needs torch is imported when first used, so that the command line's help is quick."""
    if name in _HOME:
        with _without_collector():
            return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
