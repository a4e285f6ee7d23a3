"""Processes that run cases, so that one that dies or hangs is an outcome and no end."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue

from benchmarks.onnx_suite.cases import cases
from benchmarks.onnx_suite.run import CRASHED, Outcome, run_case

CASE_SECONDS = 120.0
START_SECONDS = 300.0


def _serve(connection: Connection) -> None:
    """In a worker: cases by name until the other side hangs up."""
    warnings.filterwarnings("ignore")
    known = {case.name: case for case in cases()}
    with tempfile.TemporaryDirectory() as folder:
        connection.send("ready")
        while True:
            try:
                name = connection.recv()
            except EOFError:
                return
            connection.send(run_case(known[name], Path(folder)))


class Worker:
    """One process; it is started anew after a case that killed it or did not end."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def run(self, name: str) -> Outcome:
        """The outcome of a case."""
        connection = self._connection or self._start()
        connection.send(name)
        try:
            if connection.poll(CASE_SECONDS):
                return connection.recv()
            failure = f"not finished after {CASE_SECONDS:g} s"
        except (EOFError, ConnectionResetError):
            failure = "the process died"
        self.stop()
        return Outcome(CRASHED, failure)

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        if not ours.poll(START_SECONDS):
            raise RuntimeError("a worker does not start")
        ours.recv()
        self._connection = ours
        return ours

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def run_cases(names: Sequence[str], processes: int) -> Iterator[tuple[str, Outcome]]:
    """Name and outcome of each case as it ends."""
    todo: SimpleQueue[str] = SimpleQueue()
    done: SimpleQueue[tuple[str, Outcome] | Exception] = SimpleQueue()
    for name in names:
        todo.put(name)

    def work() -> None:
        worker = Worker()
        try:
            while True:
                name = todo.get_nowait()
                done.put((name, worker.run(name)))
        except Empty:
            pass
        except Exception as error:  # noqa: BLE001  (raised where the results are read)
            done.put(error)
        finally:
            worker.stop()

    for _ in range(min(processes, len(names))):
        threading.Thread(target=work, daemon=True).start()
    for _ in names:
        found = done.get()
        if isinstance(found, Exception):
            raise found
        yield found
