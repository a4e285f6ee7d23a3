"""`python -m benchmarks.device_check [--json FILE] [--parts N]`: whether compiled graphs are right on a GPU.

The corpus of `tests.schedule` and the attention cores in three types by the fp64 rule, programs of halves, sizes that
are nothing, one, odd or large, memory that is misaligned, expanded or strided, streams, threads, CUDA graphs, bad
input, and what a launch costs. Prints one line for each check that fails, and a count. Parts run side by side in
processes of their own.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from tests.support.corpus import CASES, Case
from torch import Tensor

import tilewright
from benchmarks import (
    device_attention,
    device_cases,
    device_convolutions,
    device_halves,
    device_loops,
    device_random,
    record,
)
from tilewright.accuracy import compare_trees, in_float64

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Check:
    """One thing that must hold: a function that raises, or returns a remark."""

    name: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Outcome:
    """How one check went; `said` is the error's line or the remark."""

    name: str
    passed: bool
    said: str
    seconds: float


OTHERS = (
    *device_cases.ALL,
    device_loops.loops,
    device_random.random_numbers,
    device_convolutions.rectified_convolutions,
)
"""Checks that are no op of the corpus."""


def typed(inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Float inputs in another type, on the GPU."""
    return [(t.to(dtype) if t.is_floating_point() else t).cuda() for t in inputs]


def judge(function: Callable[..., object], compiled: Callable[..., object], inputs: Sequence[Tensor]) -> str:
    """The fp64 rule for one call. Raises AssertionError where it fails."""
    eager, ours = function(*inputs), compiled(*inputs)
    verdict = compare_trees(ours, eager, in_float64(function)(*inputs))
    assert verdict.passed, str(verdict)
    return f"k {verdict.relative_k:.2f}"


def graphs() -> int:
    """Graphs that were ever compiled: those that live become fewer whenever garbage of earlier checks is collected."""
    counted = tilewright.stats()
    return counted.graphs + counted.fallbacks


def corpus_case(case: Case, dtype: torch.dtype, dynamic: bool) -> str:
    """One case: static sizes, or one graph for three sizes."""
    run = case.run

    def function(*args: Tensor) -> object:
        return run(*args)

    first = typed(case.inputs(), dtype)
    dims: dict[str, dict[int, str]] = {}
    if dynamic:
        dims = {f"arg{k}": dict(p) for k, p in enumerate(case.dynamic) if p}
        names = ", ".join(f"arg{k}" for k in range(len(first)))
        scope: dict[str, object] = {"run": run}
        exec(f"def function({names}):\n    return run({names})", scope)
        function = scope["function"]  # type: ignore[assignment]
    compiled = tilewright.compile(function, tuple(first), dims=dims or None, options={"strict": True})
    made = graphs()
    said = [judge(function, compiled, typed(case.inputs(s), dtype)) for s in ((1, 2, 3) if dynamic else (1,))]
    assert graphs() == made, "a new size compiled a new graph"
    assert compiled.coverage.kernels > 0, str(compiled.coverage)
    return ", ".join(said)


def corpus() -> Iterator[Check]:
    """Every case, static in three types and dynamic in fp32."""
    for case in CASES:
        for dtype in DTYPES:
            name = f"{case.name}-{str(dtype)[6:]}"
            yield Check(name, lambda case=case, dtype=dtype: corpus_case(case, dtype, False))
        if case.dynamic:
            yield Check(f"{case.name}-dynamic", lambda case=case: corpus_case(case, torch.float32, True))


def checks() -> list[Check]:
    """All of them, those that take longest first."""
    others = [Check(f.__name__, f) for f in OTHERS]
    attention = [Check(name, run) for name, run in device_attention.checks()]
    halves = [Check(name, run) for name, run in device_halves.checks()]
    return [*attention, *others, *halves, *corpus()]


def run(check: Check) -> Outcome:
    """Run one check and note how it went."""
    start = time.perf_counter()
    try:
        said, passed = check.run(), True
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - every failure is a finding
        place = traceback.extract_tb(error.__traceback__)[-1]
        lines = " | ".join(str(error).splitlines()[:4])
        said = f"{type(error).__name__}: {lines} [{Path(place.filename).name}:{place.lineno}]"
        passed = False
    torch._dynamo.reset()
    return Outcome(check.name, passed, said[:700], round(time.perf_counter() - start, 3))


def own_cores(number: int, parts: int) -> list[int]:
    """The cores of one of several processes: twice its share, as some wait while others build."""
    cores = sorted(os.sched_getaffinity(0))
    share = min(len(cores), max(2, 2 * len(cores) // parts))
    return [cores[(number * len(cores) // parts + k) % len(cores)] for k in range(share)]


def serve(cores: Sequence[int]) -> None:
    """Run the checks that standard input names, one a line, and print a line with the outcome of each."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    torch.set_default_device("cuda")
    known = {c.name: c for c in checks()}
    for line in sys.stdin:
        print(json.dumps(asdict(run(known[line.strip()]))), flush=True)
        torch.cuda.empty_cache()


class Worker:
    """A process that runs checks on one of the GPUs, started again after a check that ended it."""

    def __init__(self, number: int, parts: int) -> None:
        self.device = gpus()[number % len(gpus())]
        self.cores = own_cores(number, parts)
        self.process: subprocess.Popen[str] | None = None

    def check(self, name: str) -> Outcome:
        """The outcome of one check."""
        if self.process is None:
            cores = ",".join(map(str, self.cores))
            command = [sys.executable, "-m", "benchmarks.device_check", f"--serve={cores}"]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": self.device, "OMP_NUM_THREADS": str(len(self.cores))},
            )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        start = time.perf_counter()
        with suppress(BrokenPipeError):  # it has ended, as the next line says
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
        said = next((line for line in self.process.stdout if line.startswith("{")), "")
        if said:
            return Outcome(**json.loads(said))
        return Outcome(name, False, f"ended with {self.close()}", round(time.perf_counter() - start, 3))

    def close(self) -> int | None:
        """Wait for the end of the process and let go of its pipes; its exit code."""
        ended, self.process = self.process, None
        if ended is None:
            return None
        with suppress(BrokenPipeError), ended:  # what it did not read is lost
            pass
        return ended.returncode

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self.process is not None:
            self.process.kill()


def gpus() -> list[str]:
    """The GPUs to run on, as the driver's environment variable names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(k) for k in range(max(1, torch.cuda.device_count()))]


def all_outcomes(names: Sequence[str], parts: int, budget: float | None) -> list[Outcome]:
    """The outcomes of checks, each taken by the next free process; what `budget` seconds do not reach has failed."""
    end = math.inf if budget is None else time.monotonic() + budget
    left = iter(names)
    lock = threading.Lock()
    workers = [Worker(k, parts) for k in range(parts)]

    def work(worker: Worker) -> list[Outcome]:
        found: list[Outcome] = []
        while True:
            with lock:
                name = next(left, None)
            if name is None:
                worker.stop()
                worker.close()
                return found
            late = time.monotonic() >= end
            found.append(Outcome(name, False, "no time left", 0.0) if late else worker.check(name))

    timer = threading.Timer(budget or 0.0, lambda: [w.stop() for w in workers])
    timer.daemon = True
    if budget is not None:
        timer.start()
    with ThreadPoolExecutor(parts) as pool:
        found = [o for some in pool.map(work, workers) for o in some]
    timer.cancel()
    return found


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="write all outcomes to a file")
@click.option("--commit", default="", help="what was checked, for the file")
@click.option("--parts", default=8, show_default=True, help="processes side by side, over all visible GPUs")
@click.option("--only", default="", help="checks whose name contains this")
@click.option("--budget", type=float, help="seconds after which what still runs is ended, and fails")
@click.option("--serve", "cores", default="", help="run the checks that standard input names, on these cores")
def main(path: Path | None, commit: str, parts: int, only: str, budget: float | None, cores: str) -> None:
    """Check compiled graphs on this machine's GPUs."""
    if cores:
        serve([int(n) for n in cores.split(",")])
        return
    found = all_outcomes([c.name for c in checks() if only in c.name], parts, budget)
    for o in found:
        if not o.passed or o.name in {f.__name__ for f in OTHERS}:
            print(f"{'ok  ' if o.passed else 'FAIL'} {o.name}: {o.said}")
    failed = sum(not o.passed for o in found)
    print(f"{len(found) - failed} of {len(found)} checks passed")
    if path is not None:
        facts = {**record.provenance(torch.get_num_threads()), "device": torch.cuda.get_device_name()}
        facts |= {"commit": commit} if commit else {}
        record.write_json(path, {**facts, "checks": [asdict(o) for o in found]})
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
