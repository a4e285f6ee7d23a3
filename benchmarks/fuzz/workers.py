"""Judges programs in fresh interpreters that stay: a device's driver does not survive a fork, and starting torch takes
longer than most programs. A worker that dies or hangs costs its program and is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.fuzz.judge import Failure, Setting
from benchmarks.fuzz.program import Program

ROOT = Path(__file__).parents[2]
PROGRAMS = 100
"""That one worker judges: what torch and drivers keep of each would add up."""
STARTING = 240.0
SECONDS = 300.0
"""On the clock, for one program."""
DEVICE_ERROR = "CUDA error"
"""In the text of an error after which a process computes nothing more on its device. Where eager is refused by it (an
index that a device checks), all that the process judged next was refused as well, in silence."""


class NoWorker(RuntimeError):
    """A worker did not start: the device is not there, or the machine has no room."""


class Worker:
    """One interpreter, started when it is first asked."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.process: subprocess.Popen[str] | None = None
        self.judged = 0

    def ask(
        self, program: Program, setting: Setting, backend: str = "tilewright", seconds: float = SECONDS
    ) -> Failure | None:
        """The verdict on a program. Raises NoWorker if no interpreter starts."""
        line = {"program": repr(program), "setting": repr(setting), "backend": backend}
        reply = self._asked(line, seconds)
        if reply is None:
            self.end()
            return Failure("slow", f"not finished after {seconds:.0f} s")
        if not reply:
            status = self.end()
            return Failure("crash", f"the process died with status {status}")
        found = json.loads(reply)
        if self.judged >= PROGRAMS or found and (found[0] == "crash" or DEVICE_ERROR in found[1]):
            self.end()  # an error of the device stays with its process, whoever made it
        return Failure(*found) if found else None

    def grow(self, seed: int) -> str | None:
        """The text of a random program; None where torch dies over it. Raises NoWorker if no interpreter starts."""
        reply = self._asked({"seed": seed}, SECONDS)
        if not reply:
            self.end()
            return None
        return json.loads(reply)

    def _asked(self, line: Mapping[str, object], seconds: float) -> str | None:
        process = self._started()
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
        self.judged += 1
        return self._line(process, seconds)

    def end(self) -> int | None:
        """Stop; the next program gets another interpreter. Returns how the process ended by itself, if it did."""
        process, self.process = self.process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.stdout is not None and select.select([process.stdout], [], [], 0)[0]:
                process.wait(5)  # its output is closed
        status = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the compilers that it started
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return status

    def _started(self) -> subprocess.Popen[str]:
        if self.process is not None:
            return self.process
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        process = self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fuzz.worker", self.device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.judged = 0
        if self._line(process, STARTING) != "ready\n":
            status = self.end()
            raise NoWorker(f"a worker for {self.device} did not start (status {status})")
        return process

    @staticmethod
    def _line(process: subprocess.Popen[str], seconds: float) -> str | None:
        """The next line of a worker, empty if it ended; None if none comes in time."""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, seconds))
        return process.stdout.readline() if ready else None
