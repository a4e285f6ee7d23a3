"""Which files of the package an entry of the store depends on: with another text of them it is made anew."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from pathlib import Path

from .cache import digest

DECIDING = (
    "target.py",
    "ir",
    "interp",
    "capture/fused.py",
    "analysis",
    "rewrite",
    "library",
    "partition",
    "form",
    "lower",
    "schedule",
    "tuning",
    "pipeline",
)
"""What decides which ops share a kernel, and how kernels are numbered."""

PRINTING = (*DECIDING, "emit")
"""What decides the text of kernels."""

PACKAGE = Path(__file__).parents[2]


@cache
def code_identity(rooms: tuple[str, ...]) -> str:
    """A digest of all Python files and tables of `rooms`: folders or files of the package."""
    files = sorted(p for room in rooms for p in _files(PACKAGE / room))
    return digest(*(part for p in files for part in (str(p.relative_to(PACKAGE)), p.read_bytes())))


def _files(room: Path) -> list[Path]:
    found = [room] if room.is_file() else [p for p in room.rglob("*") if p.suffix in (".py", ".json")]
    assert found, f"{room} is not there, and what it decides would be recalled for ever"
    return found


def package_version() -> str:
    """The version of Tilewright that is installed; "source" where a source tree is on the path."""
    try:
        return importlib.metadata.version("tilewright")
    except importlib.metadata.PackageNotFoundError:
        return "source"
