"""Judges a program in a forked child, so that a crash, a hang or a flood of memory is a finding and not an end."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable

from benchmarks.fuzz.judge import Failure

CPU_SECONDS = 90
"""Of the child itself; compilers that it starts have as many each."""
SECONDS = 900.0


def apart(judge: Callable[[], Failure | None], seconds: float = SECONDS) -> Failure | None:
    """What `judge` returns, run in a child that has so many `seconds` on the clock."""
    sys.stdout.flush()
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        _child(judge, end, start)
    os.close(start)
    text = _read(end, seconds)
    os.close(end)
    if text is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if text is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return Failure("slow", f"not finished after {seconds:.0f} s, or {CPU_SECONDS} s of processor time")
    if os.WIFSIGNALED(status) or not text:
        return Failure("crash", f"the process died with status {status}")
    found = json.loads(text)
    return Failure(*found) if found else None


def _child(judge: Callable[[], Failure | None], end: int, start: int) -> None:
    os.close(end)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    with contextlib.suppress(BaseException):
        found = judge()
        os.write(start, json.dumps([found.kind, found.text[:3000]] if found else []).encode())
    os._exit(0)


def _read(end: int, seconds: float) -> str | None:
    """All that comes through a pipe; None if it is not closed in time."""
    parts: list[bytes] = []
    limit = time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([end], [], [], max(0.0, limit - time.monotonic()))
        if not ready:
            return None
        part = os.read(end, 1 << 16)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)
