"""Tilewright: a deep-learning compiler that treats a model as one problem of moving bytes.

`torch.compile(model, backend="tilewright")` needs no import; `tilewright.compile` takes modules, callables,
exported programs and model files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tilewright.options import Options

if TYPE_CHECKING:
    from tilewright.door import compile, reset, stats

__version__ = "0.1.0"
__all__ = ["Options", "__version__", "compile", "reset", "stats"]

_DOOR = frozenset({"compile", "reset", "stats"})


def __getattr__(name: str) -> object:
    """The door's functions, imported when first used: the command line's help needs no torch."""
    if name in _DOOR:
        return getattr(importlib.import_module("tilewright.door"), name)
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
