"""`python -m benchmarks.device_check [--json FILE] [--parts N]`: whether compiled graphs are right on a GPU.

The corpus of `tests.schedule` and the attention cores in three types by the fp64 rule, sizes that are nothing, one, odd
or large, memory that is misaligned, expanded or strided, streams, threads, CUDA graphs, bad input, and what a launch
costs. Prints one line for each check that fails, and a count. Parts run side by side in processes of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from tests.schedule.corpus import CASES, Case
from torch import Tensor

import tilewright
from benchmarks import device_attention, device_cases, record
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
    """All of them."""
    others = [Check(f.__name__, f) for f in device_cases.ALL]
    attention = [Check(name, run) for name, run in device_attention.checks()]
    return [*others, *attention, *corpus()]


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


def part(number: int, parts: int, only: str) -> None:
    """The checks of one process: a line with the name before each, and one with its outcome after it."""
    torch.set_default_device("cuda")
    for check in [c for c in checks() if only in c.name][number::parts]:
        print(check.name, flush=True)
        print(json.dumps(asdict(run(check))), flush=True)


def outcomes(process: subprocess.Popen[str], number: int) -> list[Outcome]:
    """What a part said, up to its end."""
    out, err = process.communicate()
    lines = out.splitlines()
    said = [Outcome(**json.loads(line)) for line in lines if line.startswith("{")]
    if process.returncode:
        name = lines[-1] if lines and not lines[-1].startswith("{") else f"part {number}"
        said.append(Outcome(name, False, " | ".join(err.splitlines()[-3:])[:700] or "ended", 0.0))
    return said


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="write all outcomes to a file")
@click.option("--parts", default=8, show_default=True, help="processes side by side")
@click.option("--only", default="", help="checks whose name contains this")
@click.option("--budget", type=float, help="seconds after which what still runs is ended, and fails")
@click.option("--part", "number", type=int, help="run one part here and print it")
def main(path: Path | None, parts: int, only: str, budget: float | None, number: int | None) -> None:
    """Check compiled graphs on this machine's GPU."""
    if number is not None:
        part(number, parts, only)
        return
    command = [
        sys.executable,
        "-m",
        "benchmarks.device_check",
        f"--parts={parts}",
        f"--only={only}",
        "--part",
    ]
    running = [
        subprocess.Popen([*command, str(k)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for k in range(parts)
    ]
    timers = [threading.Timer(budget, process.kill) for process in running] if budget else []
    for timer in timers:
        timer.daemon = True
        timer.start()
    with ThreadPoolExecutor(parts) as pool:  # all pipes are read at once, or a full one would stop its part
        found = [o for some in pool.map(outcomes, running, range(parts)) for o in some]
    for o in found:
        if not o.passed or o.name in {f.__name__ for f in device_cases.ALL}:
            print(f"{'ok  ' if o.passed else 'FAIL'} {o.name}: {o.said}")
    failed = sum(not o.passed for o in found)
    print(f"{len(found) - failed} of {len(found)} checks passed")
    if path is not None:
        facts = {**record.provenance(torch.get_num_threads()), "device": torch.cuda.get_device_name()}
        record.write_json(path, {**facts, "checks": [asdict(o) for o in found]})
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
