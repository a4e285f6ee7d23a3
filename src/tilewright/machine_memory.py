"""How much memory this process may have: what the machine has, or what a container leaves of it."""

from __future__ import annotations

import functools
from pathlib import Path

LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Files of Linux's control groups, of both versions."""


@functools.lru_cache(maxsize=4)
def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may have: those of the machine, or of the smallest group that holds it; 0 where the
    system does not tell. `root`, where proc and sys are, is a parameter for tests."""
    return min((b for b in (_told(root, "MemTotal:"), *_limits(root)) if b), default=0)


@functools.lru_cache(maxsize=4)
def reachable_bytes(root: Path = Path("/")) -> int:
    """The same with what can be moved to disk: what needs more can not be held."""
    memory = memory_bytes(root)
    return memory and memory + _told(root, "SwapTotal:")


def _told(root: Path, name: str) -> int:
    """Bytes that Linux tells under a name."""
    for line in read_text(root / "proc/meminfo").splitlines():
        words = line.split()
        if words[:1] == [name] and len(words) >= 2 and words[1].isdigit():
            return int(words[1]) * 1024
    return 0


def _limits(root: Path) -> list[int]:
    """Of each group that this process is in, and of those around it."""
    found: list[int] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inside = Path(group.strip().lstrip("/"))
        for place in (inside, *inside.parents):
            texts = (read_text(top / place / name).strip() for name in LIMITS)
            found += [int(text) for text in texts if text.isdigit()]
    return found


def read_text(path: Path) -> str:
    """Text of a file of the operating system; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
