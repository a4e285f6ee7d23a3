"""Scripts for child processes of tests, without the imports of the front door, which take seconds."""

from __future__ import annotations

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
