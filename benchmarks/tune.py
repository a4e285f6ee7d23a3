"""`python -m benchmarks.tune --table FILE [--json FILE]`: which blocks are fastest on this device?

For each kind of kernel, several block sizes and numbers of warps are compiled and timed in turn, and the fastest
becomes an entry of the table of block sizes (`src/tilewright/tuning/<target>.json`). Cases build side by side in
processes of their own and are timed one at a time.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import tilewright
from benchmarks import gpu_clock, record
from tilewright.errors import TilewrightError
from tilewright.runtime.cuda_device import gpu_target
from tilewright.schedule import solver, tuning
from tilewright.schedule.tuning import Entry, Tuning

MEBIBYTES = 128
"""Size of the largest input."""

PER_THREAD = (2, 64)
"""Fewest and most elements of a block per thread that are tried."""

NOISE = 0.01
"""Differences of time that mean nothing."""

USUAL = 12
"""Elements per thread."""

DTYPES = {2: torch.float16, 4: torch.float32}


@dataclass(frozen=True)
class Case:
    """One kind of kernel: a function of one matrix, and the length of its rows."""

    kind: str
    bytes: int
    length: int
    run: Callable[[Tensor], Tensor]

    @property
    def name(self) -> str:
        """For the command line."""
        return f"{self.kind}-{self.bytes}-{self.length}"


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _cases() -> Iterator[Case]:
    for size in DTYPES:
        yield Case("square", size, 8192, lambda x: x.t().contiguous())
        yield Case("columns", size, 4096, lambda x: x.sum(0))
        for length in (256, 1024, 4096, 8192, 16384):
            yield Case("rows", size, length, _softmax)
        yield Case("streams", size, 131072, _softmax)


CASES: Mapping[str, Case] = {case.name: case for case in _cases()}


def _warps(elements: int) -> list[int]:
    fewest, most = PER_THREAD
    return [w for w in (1, 2, 4, 8, 16, 32) if fewest <= elements // (32 * w) <= most]


def candidates(case: Case) -> list[Entry]:
    """What is tried for a case."""
    powers = lambda low, high: [1 << k for k in range(low, high + 1)]  # noqa: E731
    found: list[tuple[int, int, int]] = []
    match case.kind:
        case "square":
            found = [(a * b, a, 1) for a in powers(5, 7) for b in powers(5, 7)]
        case "rows":
            found = [(case.length * r, 0, 1) for r in powers(0, 4) if case.length * r <= 1 << 14]
        case "streams":
            found = [(e, 0, s) for e in powers(11, 14) for s in (1, 3)]
        case _:
            found = [(a * b, a, s) for a in powers(6, 8) for b in powers(3, 5) for s in (1, 3)]
    return [
        Entry(case.kind, case.bytes, case.length, e, lane, w, stages)
        for e, lane, stages in found
        for w in _warps(e)
    ]


def compiled(case: Case, entry: Entry, x: Tensor) -> Callable[[Tensor], object]:
    """The case as a callable under one entry; it has run once."""
    solver.table = lambda target: Tuning((entry,))
    scope: dict[str, Callable[[Tensor], Tensor]] = {"run": case.run}
    exec("def fresh(x):\n    return run(x)", scope)  # Dynamo limits how often one code object is compiled
    model = tilewright.compile(scope["fresh"], (x,), options={"strict": True})
    model(x)
    return model


def measure(case: Case, lock: Path) -> dict[str, object]:
    """Seconds of each candidate, and the fastest entry."""
    device = torch.device("cuda")
    rows = (MEBIBYTES << 20) // (case.bytes * case.length)
    sets = [(torch.randn(rows, case.length, device=device).to(DTYPES[case.bytes]),) for _ in range(2)]
    calls = {}
    refused: list[str] = []
    for entry in candidates(case):
        try:
            calls[json.dumps(asdict(entry))] = (compiled(case, entry, *sets[0]), sets)
        except (TilewrightError, RuntimeError) as error:
            refused.append(f"{entry}: {str(error)[:100]}")
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        timed = gpu_clock.time_runs(calls, device, 15)
    seconds = {name: t.timing.median for name, t in timed.items()}
    return {"seconds": dict(sorted(seconds.items(), key=lambda item: item[1])), "refused": refused}


def chosen(seconds: Mapping[Entry, float]) -> Entry:
    """Of the entries that are as good as the best one, that whose threads have the most usual amount of work."""
    least = min(seconds.values())
    near = [e for e, s in seconds.items() if s <= (1 + NOISE) * least]
    return min(near, key=lambda e: (abs(math.log2(e.elements / (32 * e.warps * USUAL))), seconds[e]))


def main() -> None:
    """Run all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--child", nargs=2)
    given = parser.parse_args()
    if given.child:
        name, folder = given.child
        found = measure(CASES[name], Path(folder) / "lock")
        (Path(folder) / f"{name}.json").write_text(json.dumps(found))
        return
    start = time.time()
    names = [name for name in CASES if given.only in name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.tune", "--table", str(given.table), "--child"]
        children = [subprocess.Popen([*command, name, folder]) for name in names]
        for child in children:
            child.wait()
        results = {n: json.loads(p.read_text()) for n in names if (p := Path(folder) / f"{n}.json").exists()}
    best: list[Entry] = []
    for name, facts in results.items():
        order = list(facts["seconds"].items())
        print(name, *(f"{1e6 * s:.1f} us {list(json.loads(n).values())[3:]}" for n, s in order[:4]), sep="  ")
        best += [chosen({Entry(**json.loads(n)): s for n, s in order})] if order else []
    target = gpu_target(0)
    given.table.write_text(tuning.table(target.name).merged(best).text())
    if given.json:
        given.json.write_text(json.dumps({**record.provenance(1), "target": target.name, "cases": results}))
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
