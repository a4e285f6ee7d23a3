"""What lies in the kernel cache: its entries, which of them are broken, and how to be rid of all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .cache import KEY, MANIFEST, is_complete, move_aside


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One entry: its key, the files in it, their bytes, and when it was used last (seconds since 1970)."""

    key: str
    folder: Path
    files: tuple[str, ...]
    bytes: int
    used: float

    @property
    def whole(self) -> bool:
        """Whether its files are what its manifest says. A broken one is never loaded, and replaced when needed."""
        return is_complete(self.folder)


def entries(root: Path) -> Iterator[StoreEntry]:
    """All entries of the store in `root`, broken ones too; those that vanish meanwhile are left out."""
    for folder in sorted(root.glob("[0-9a-f][0-9a-f]/*")):
        if not KEY.fullmatch(folder.name):
            continue  # no entry of ours
        with contextlib.suppress(OSError):
            files = sorted(folder.iterdir())
            manifest = folder / MANIFEST
            used = (manifest if manifest in files else folder).stat().st_mtime
            names = tuple(f.name for f in files if f != manifest)
            yield StoreEntry(folder.name, folder, names, sum(f.stat().st_size for f in files), used)


def clear(root: Path) -> tuple[int, int]:
    """Remove all entries; how many there were, and their bytes. Code that processes have loaded stays usable. Raises
    OSError where one cannot be removed."""
    found = tuple(entries(root))
    staging = root / "staging"
    if found:
        staging.mkdir(mode=0o700, exist_ok=True)
    for entry in found:
        move_aside(entry.folder, staging)
    shutil.rmtree(root / "locks", ignore_errors=True)
    return len(found), sum(entry.bytes for entry in found)
