"""Worker processes that build Triton kernels: started when first needed, kept for the process, ended at its exit."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tilewright.errors import BuildError, KernelRefused
from tilewright.runtime.store.cache import digest
from tilewright.tuning.input_limits import BUILD_LIMITS


class BuilderDied(KernelRefused):
    """A build process has ended without an answer."""


def is_answer(answer: str, job: str) -> bool:
    """Whether a line that a worker wrote is its answer to `job`, and not what something else printed, or one that was
    meant for another job."""
    try:
        parts = json.loads(answer)
    except ValueError:
        return False
    return isinstance(parts, dict) and parts.get("job") == digest(job)


class _Worker:
    """One process and the line of text that goes each way."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-P", "-m", "tilewright._build"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(folder), text=True,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
        self._own_limits = _begin_limits(self._process.pid)

    @property
    def is_worn(self) -> bool:
        """Whether it has used up so much of a processor that a long job may not be done within its own limit."""
        if self._own_limits is None:
            return False
        return 2 * _processor_seconds(self._process.pid) > min(map(_finite, self._own_limits))

    def ask(self, line: str, processor_seconds: float | None) -> str:
        """The answer to a job, for which the process may compute so long (None: until it takes too long by the clock).
        Raises BuilderDied if the process dies over it, KernelRefused if it takes too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._own_limits is not None:
            _allow(self._process.pid, processor_seconds, self._own_limits)
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(BUILD_LIMITS.max_triton_seconds, end)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            self.close(0)
            status = f"(exit status {self._process.returncode})"
            if late.is_set():
                raise KernelRefused(
                    f"the Triton compiler took over {BUILD_LIMITS.max_triton_seconds:.0f} s {status}"
                )
            if processor_seconds is not None and self._process.returncode == -signal.SIGXCPU:
                raise KernelRefused(
                    f"the Triton compiler took over {processor_seconds:.0f} s of a processor {status}"
                )
            raise BuilderDied(f"the Triton compiler died {status}")
        if not is_answer(answer, line):
            self.close(0)
            raise BuildError(f"a build worker gave no answer to its job: {answer[:80]!r}", phase="build")
        return answer

    def close(self, seconds: float) -> None:
        """End the process: its input ends, and after `seconds` it is killed."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _begin_limits(process: int) -> tuple[int, int] | None:
    """How long a process may compute that has begun, in seconds: the limit that it may lift, and the one that it may
    not; None where systems do not tell. It leaves no image of its memory where it ends by a signal, as it does at a
    limit and where LLVM fails."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):  # it has ended, or nobody may ask
        _, hard = resource.prlimit(process, resource.RLIMIT_CORE)
        resource.prlimit(process, resource.RLIMIT_CORE, (0, hard))
        return resource.prlimit(process, resource.RLIMIT_CPU)
    return None


def _allow(process: int, seconds: float | None, own: tuple[int, int]) -> None:
    """Let a process compute for so many seconds from now on, after which the system ends it; None: as long as its `own`
    limits let it. Whatever else runs on the machine, this is the same amount of work."""
    soft, hard = own
    with contextlib.suppress(OSError):  # it has ended: who asks it finds out
        if seconds is not None:
            most = math.ceil(_processor_seconds(process) + seconds)
            soft = most if most < min(map(_finite, own)) else soft
        resource.prlimit(process, resource.RLIMIT_CPU, (soft, hard))


def _finite(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _processor_seconds(process: int) -> float:
    """What a process has computed; 0 if it has ended. Its own name, in parentheses, may have any characters."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _environment(folder: Path) -> dict[str, str]:
    """What a worker sees: the import path of this process, temporary files in `folder`, no setting of Triton's that the
    cache key does not know."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    here = str(Path(__file__).parents[3])
    path = os.pathsep.join([here, *(p for p in sys.path if p and p != here)])
    return {
        **environment, "PYTHONPATH": path, "TMPDIR": str(folder), "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_ALWAYS_COMPILE": "1", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


class Workers:
    """At most `most` processes, each with a thread here that waits for it."""

    def __init__(self, most: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tilewright-build-"))
        self._mine = threading.local()
        self._all: list[_Worker] = []
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="tilewright-build")

    def submit(self, jobs: Sequence[str], processor_seconds: float | None = None) -> list[Future[str]]:
        """The coming answers to jobs (`runtime.cuda.job.Job` as JSON), each of which may take so long. They raise
        BuildError if a worker fails (BuilderDied if it ends)."""
        return [self._threads.submit(self._ask, job, processor_seconds) for job in jobs]

    def _ask(self, job: str, processor_seconds: float | None) -> str:
        worker: _Worker | None = getattr(self._mine, "worker", None)
        if worker is not None and worker.is_worn:
            self._all.remove(worker)
            worker.close(0)
            worker = None
        if worker is None:
            try:
                worker = _Worker(self._folder)
            except OSError as error:
                raise BuildError(f"a build worker does not start: {error}", phase="build") from error
            self._mine.worker = worker
            self._all.append(worker)
        try:
            return worker.ask(job, processor_seconds)
        except BuildError:
            self._mine.worker = None  # the next job gets a fresh process
            self._all.remove(worker)
            raise

    @property
    def processes(self) -> int:
        """How many run now."""
        return len(self._all)

    def shutdown(self) -> None:
        """End all processes; waits for jobs that run."""
        self._threads.shutdown(cancel_futures=True)
        while self._all:
            self._all.pop().close(5.0)
        shutil.rmtree(self._folder, ignore_errors=True)


_held: dict[int, Workers] = {}
_lock = threading.Lock()


def workers() -> Workers:
    """Those of this process (a forked child gets its own)."""
    owner = os.getpid()
    with _lock:
        if owner not in _held:
            _held.clear()
            cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
            found = _held[owner] = Workers(max(1, min(BUILD_LIMITS.max_triton_workers, cores)))
            atexit.register(_end, owner, found)
        return _held[owner]


def _end(owner: int, found: Workers) -> None:
    if os.getpid() == owner:
        found.shutdown()
