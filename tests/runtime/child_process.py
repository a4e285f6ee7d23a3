"""Scripts for child processes of tests, without the imports of the entry point, which take seconds; and patience."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
_START = f"""
import sys, types
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "src")!r}]
package = types.ModuleType("tilewright")
package.__path__ = [{str(ROOT / "src" / "tilewright")!r}]
sys.modules["tilewright"] = package
"""


def script(text: str) -> str:
    """Program text that can import the package's modules one by one."""
    return _START + text


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether a condition comes to hold: on a busy machine, a team that came late is left alone for a while."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
    return True
