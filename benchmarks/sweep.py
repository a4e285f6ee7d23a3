"""Long lists of cases in child processes: a crash, or a case without end, costs that case only, and a run that was cut
off goes on where it stopped.

A worker is `python -m MODULE --worker ARGUMENTS`: it reads one case per line and answers each with a line of JSON
(`serve`). What is known stands in a ledger, one line of JSON per case.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
Facts = dict[str, Any]
"""What is known of a case, as JSON has it."""

RENEWED = 25
"""Cases after which a worker is replaced: what compilers keep of each graph adds up."""


@dataclass(frozen=True)
class Sweep:
    """How a list of cases is run: `budget` and `case_seconds` in seconds, `ledger` the file of what is known."""

    module: str
    arguments: tuple[str, ...] = ()
    workers: int = 1
    budget: float = float("inf")
    case_seconds: float = 300.0
    ledger: Path | None = None

    def run(self, cases: Sequence[str], report: Callable[[str, Facts], None]) -> dict[str, Facts]:
        """Facts by case, those of earlier runs with them; cases that the budget leaves no time for are left out. A
        worker that dies answers {"died": reason}."""
        if self.ledger is not None:
            self.ledger.parent.mkdir(parents=True, exist_ok=True)
        known = {c: f for c, f in self._recalled() if c in set(cases)}
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for case in cases:
            if case not in known:
                waiting.put(case)
        deadline = time.monotonic() + self.budget
        lock = threading.Lock()

        def note(case: str, facts: Facts) -> None:
            with lock:
                known[case] = facts
                if self.ledger is not None:
                    with self.ledger.open("a", encoding="utf-8") as file:
                        file.write(json.dumps([case, facts]) + "\n")
                report(case, facts)

        threads = [
            threading.Thread(target=self._work, args=(waiting, deadline, note)) for _ in range(self.workers)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return {c: known[c] for c in cases if c in known}

    def _recalled(self) -> Iterable[tuple[str, Facts]]:
        if self.ledger is not None and self.ledger.exists():
            for line in self.ledger.read_text(encoding="utf-8").splitlines():
                case, facts = json.loads(line)
                yield case, facts

    def _work(
        self, waiting: queue.SimpleQueue[str], deadline: float, note: Callable[[str, Facts], None]
    ) -> None:
        child: _Child | None = None
        try:
            while time.monotonic() < deadline:
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    return
                if child is None or child.answered >= RENEWED or child.dead:
                    if child is not None:
                        child.end()
                    child = _Child([sys.executable, "-m", self.module, "--worker", *self.arguments])
                left = deadline - time.monotonic()
                facts = child.ask(case, min(self.case_seconds, left))
                if not (
                    child.dead and left < self.case_seconds
                ):  # what the end of the budget cut off is not known
                    note(case, facts)
        finally:
            if child is not None:
                child.end()


class _Child:
    """A worker process."""

    def __init__(self, command: Sequence[str]) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile()
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip
        self.answered = 0
        self.dead = False

    def ask(self, case: str, seconds: float) -> Facts:
        """The answer for one case; the process is dead if it gives none in time."""
        assert self.process.stdin is not None and self.process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            self.process.stdin.write(case + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            self.answered += 1
            answer: Facts = json.loads(line)
            return answer
        self.dead = True
        code = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
        said = f"no answer after {seconds:.0f} s" if late.is_set() else f"exit code {code}: {''.join(last)}"
        return {"died": said[:300]}

    def end(self) -> None:
        """Close the process."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()


def serve(handle: Callable[[str], Facts]) -> None:
    """Be a worker: answer each line of standard input. What the case prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(handle(line.strip())) + "\n")
        answers.flush()
    os._exit(0)  # torch's workers and CUDA's teardown are of no interest


def spread(items: Sequence[str], shard: str) -> list[str]:
    """Part `n/m` of a list (n from 1): every m-th item; all of it for an empty string."""
    if not shard:
        return list(items)
    n, m = (int(word) for word in shard.split("/"))
    return list(items[n - 1 :: m])


__all__ = ["Sweep", "serve", "spread"]
