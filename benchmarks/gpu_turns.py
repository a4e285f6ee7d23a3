"""Children that build side by side and time one at a time.

Building (imports, tracing, compiling, checking results) keeps one core busy for most of its time, so all
children do it at once. Timing needs the device alone: a child waits for it until nobody builds or times there
any more. Each child writes its figures to a file of its own after every row; the parent merges them. A child
that crashes or runs out of time costs its own rows and nobody else's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.record import ROOT, Facts

POLL = 0.25
GRACE = 45.0
"""Seconds past the end of building after which a child that still builds is ended: one compilation's time."""

CORES = 4
"""Cores that a child and the compilers it starts may use: many starting as many processes as there are cores
would need more memory than there is."""

BUILDING, TIMING, DONE = "building", "timing", "done"


class Turns:
    """Who may build and who may time: a lock on a file, shared or alone. Without a file everybody may."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @contextlib.contextmanager
    def building(self) -> Generator[None]:
        """Side by side with others that build."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def timing(self) -> Generator[None]:
        """Alone on the device. Afterwards others get their turn first."""
        with self._locked(fcntl.LOCK_EX):
            yield
        if self._path is not None:
            time.sleep(0.05)

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Generator[None]:
        if self._path is None:
            yield
            return
        with open(self._path, "ab") as file:
            fcntl.flock(file, kind)
            yield


@dataclass
class Child:
    """One process and the file that it writes."""

    item: str
    process: subprocess.Popen[bytes]
    path: Path
    log: Path
    gpu: int
    facts: Facts = field(default_factory=dict)
    ended: str = ""
    _seen: float = 0.0

    def look(self) -> bool:
        """Read the file again if it changed; true if it did."""
        with contextlib.suppress(OSError):
            stamp = self.path.stat().st_mtime_ns
            if stamp != self._seen:
                self._seen = stamp
                self.facts = json.loads(self.path.read_text(encoding="utf-8"))
                return True
        return False

    @property
    def phase(self) -> str:
        """What it says that it does."""
        return str(self.facts.get("phase", BUILDING))

    def end(self, reason: str) -> None:
        """Stop it, with the reason that is recorded."""
        self.ended = reason
        self.process.kill()

    def finish(self) -> Facts:
        """Its facts; with `failed` and the reason if it did not come to its end."""
        self.look()
        code = self.process.wait()
        if self.phase == DONE and code == 0:
            return self.facts
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        last = text.splitlines()[-1][:200] if text else "no message"
        return self.facts | {"failed": self.ended or f"exit code {code}: {last}"}


@dataclass(frozen=True)
class Limits:
    """Seconds from the start: when building ends, and when everything ends; and between how many `gpus` children are
    dealt out."""

    build: float
    total: float
    gpus: int = 1


def run(
    module: str,
    items: Sequence[str],
    arguments: Sequence[str],
    limits: Limits,
    jobs: int,
    report: Callable[[Mapping[str, Facts]], None],
) -> dict[str, Facts]:
    """Run `python -m module --child ITEM --turns FILE --child-json FILE --build-until TIME arguments` for each
    item, at most `jobs` at once, and return what each wrote. `report` gets everything so far after each change.
    """
    start = time.time()
    waiting = list(items)
    children: list[Child] = []
    done: dict[str, Facts] = {}
    with tempfile.TemporaryDirectory(prefix="turns-") as name:
        folder = Path(name)
        extra = ["--build-until", str(start + limits.build), *arguments]
        try:
            while waiting or children:
                age = time.time() - start
                while waiting and len(children) < jobs:
                    gpu = min(range(limits.gpus), key=lambda k: sum(child.gpu == k for child in children))
                    command = [module, "--child", waiting.pop(0), *extra]
                    children.append(_start(command, folder, len(done) + len(children), gpu))
                changed = sum(child.look() for child in children) > 0
                _end_late(children, age, limits)
                for child in [c for c in children if c.process.poll() is not None]:
                    children.remove(child)
                    done[child.item] = child.finish()
                    changed = True
                if age > limits.total:
                    done |= {item: {"failed": "no time left to start it"} for item in waiting}
                    waiting.clear()
                if changed:
                    report(_merged(items, done, children))
                time.sleep(POLL)
        finally:
            for child in children:
                child.end("the run was stopped")
                done[child.item] = child.finish()
    result = _merged(items, done, [])
    report(result)
    return result


def _merged(items: Sequence[str], done: Mapping[str, Facts], children: Sequence[Child]) -> dict[str, Facts]:
    running = {child.item: child.facts for child in children}
    known = {**running, **done}
    return {item: known[item] for item in items if item in known}


def _end_late(children: Sequence[Child], age: float, limits: Limits) -> None:
    for child in children:
        if age > limits.total:
            child.end(f"not finished after {limits.total:.0f} s")
        elif age > limits.build + GRACE and child.phase == BUILDING:
            child.end(f"not built after {limits.build + GRACE:.0f} s")


@contextlib.contextmanager
def _confined(number: int) -> Generator[None]:
    """Processes started within it run on `CORES` cores only, another window of them for each number."""
    if sys.platform != "linux":
        yield
        return
    before = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {before[(number * CORES + i) % len(before)] for i in range(CORES)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _start(command: Sequence[str], folder: Path, number: int, gpu: int) -> Child:
    path, log = folder / f"{number}.json", folder / f"{number}.log"
    environment = dict(os.environ)
    paths = [str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # As many processes as cores compile already.
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    environment.setdefault("OMP_NUM_THREADS", "2")
    seen = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    environment["CUDA_VISIBLE_DEVICES"] = seen[gpu] if gpu < len(seen) and seen[gpu] else str(gpu)
    own = ["--child-json", str(path), "--turns", str(folder / f"turn{gpu}")]
    with open(log, "wb") as file, _confined(number):
        process = subprocess.Popen(
            [sys.executable, "-m", *command, *own],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Child(command[2], process, path, log, gpu)
