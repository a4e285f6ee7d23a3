"""What a machine, or a container on it, says of its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tilewright
from tilewright.errors import OutOfMemory
from tilewright.machine_memory import memory_bytes, reachable_bytes
from tilewright.runtime.plan import bound

KIB = 1024


def system(root: Path, groups: str, limits: dict[str, str]) -> Path:
    """A made-up /proc and /sys, of a machine with 8000 KiB and 500 KiB on disk."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:       8000 kB\nMemFree: 1 kB\nSwapTotal:   500 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "most"),
    [
        ("", {}, 8000 * KIB),
        ("0::/\n", {"memory.max": "max"}, 8000 * KIB),
        ("0::/\n", {"memory.max": "4096000"}, 4096000),
        ("0::/a/b\n", {"a/memory.max": "3000", "a/b/memory.max": "max"}, 3000),
        ("9:cpu:/x\n4:memory:/y/z\n", {"memory/y/memory.limit_in_bytes": "5000"}, 5000),
        ("4:memory:/y\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 8000 * KIB),
        ("9:cpu:/x\n", {"x/memory.max": "7"}, 8000 * KIB),
        ("nonsense\n", {}, 8000 * KIB),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, groups: str, limits: dict[str, str], most: int) -> None:
    root = system(tmp_path, groups, limits)
    assert memory_bytes(root) == most and reachable_bytes(root) == most + 500 * KIB


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == reachable_bytes(tmp_path) == 0


@pytest.mark.parametrize(("known", "refused"), [(1 << 20, True), (1 << 40, False), (0, False)])
def test_what_the_machine_cannot_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, known: int, refused: bool
) -> None:
    """Between kernels, in results, and in what a library call returns."""
    monkeypatch.setattr(bound, "reachable_bytes", lambda: known)
    programs = (lambda x: (x * 2).cumsum(0).cumsum(1) + 1, lambda x: x * 2, lambda x: torch.sort(x)[0])
    for program in programs:
        x = torch.randn(1024, 300)
        run = tilewright.compile(program)
        if refused:
            with pytest.raises(OutOfMemory, match="all that the machine has"):
                run(x)
        else:
            torch.testing.assert_close(run(x), program(x))
