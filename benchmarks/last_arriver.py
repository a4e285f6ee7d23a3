"""`python -m benchmarks.last_arriver --json FILE --budget SECONDS`: sums in parts on a GPU.

They are merged by a second kernel or by the block that arrives last.

Layers of ResNets at batch 1 (`C7`, `C8`, `C11`, `R9`: fp16, channels innermost, bias and ReLU) and products of matrices
with the shapes of Llama-2-7b for 1 and 16 rows. Of each, for the numbers of parts and the tiles that the model finds
fastest: the kernel that sums parts as it is emitted, with the merging kernel behind it (`s4p0 two`); the same text with
the merge as its tail (`s4p0 last`; in fp32 instead of fp64, `s4p0 last32`); and the whole sum in one kernel (`p0`).

All run in graphs over cold inputs, in turn with cuDNN or cuBLAS: once with ordinary edges between all kernels (`full`),
once with those of early launch (`early`), as runs of kernels have them in a compiled network. Each row has a process of
its own. Results are held against fp32; those of two runs, and of two replays, bit against bit, and counters must end
at zero. With `--device cpu` everything is built for an H100 and nothing runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import gemm, gpu_report, gpu_turns, record
from benchmarks.convolutions import FUSED, PASS
from benchmarks.gemm import ALLOWED, CUBLAS, unit_of
from benchmarks.gpu_clock import Call, Run, Tensors, capture, release, sets_needed, synchronize, time_runs
from benchmarks.gpu_turns import BUILDING, DONE, TIMING, Limits, Turns
from benchmarks.last_arriver_ways import LAST, LAST_SINGLE, ROWS, TWO, WHOLE, Problem, Proposer, Way, Ways
from benchmarks.record import Facts, Json
from tilewright.errors import TilewrightError
from tilewright.options import Options
from tilewright.runtime.cuda.build import BuiltKernel
from tilewright.runtime.cuda.device import gpu_target
from tilewright.runtime.cuda.kernels import CudaUnit
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.target import preset

FULL, EARLY = "full", "early"
"""Edges between kernels: each begins when the one in front has ended, or is launched before and waits."""

SECONDS, ROUNDS = 140.0, 30
"""The end of a run, and samples of each way."""

BUILD_SHARE = 0.5
"""Part of the time after which no more kernels are built: no row is timed before all rows are built."""

JOBS = 10
"""Rows that build at once: all, as none times before all are built."""


@dataclass(frozen=True)
class Bench:
    """The kernels of a row on a device, with ordinary edges and with early ones, and the memory between kernels."""

    units: Mapping[str, CudaUnit]
    numbers: Mapping[str, int]
    partials: Tensor
    counters: Tensor

    @classmethod
    def of(cls, found: Ways, store: ContentStore, device: torch.device) -> Bench:
        """Load what was built."""
        target = replace(gpu_target(device.index or 0), early_launch="own")
        kernels = found.kernels
        ordinary = {name: unhurried(b) for name, b in kernels.built.items()}
        units = {
            EARLY: unit_of(kernels, target, store, device),
            FULL: unit_of(replace(kernels, built=ordinary), target, store, device),
        }
        room = max((w.partials for w in found.ways.values()), default=0)
        tiles = max((w.tiles for w in found.ways.values()), default=0)
        partials = torch.full((max(1, room),), torch.nan, dtype=torch.float32, device=device)
        counters = torch.zeros(max(1, tiles), dtype=torch.int32, device=device)
        return cls(units, {name: k for k, name in enumerate(kernels.built)}, partials, counters)

    def run(self, way: Way, edges: str, sets: Sequence[Tensors]) -> Run:
        """What computes all sets one after the other."""
        each = len(sets[0])
        shared = {each + k: len(sets) * each + k for k in range(2)}
        pointers = array("Q", [t.data_ptr() for tensors in sets for t in tensors])
        pointers.extend((self.partials.data_ptr(), self.counters.data_ptr()))
        launches = [
            (self.numbers[name], [(shared.get(p, first + p), 0) for p in places])
            for first in range(0, len(sets) * each, each)
            for name, places in way.steps
        ]
        return self.units[edges].prepare(launches, pointers, array("q"))

    def call(self, way: Way, edges: str) -> Call:
        """It as a function of one set of inputs."""

        def run(*tensors: Tensor) -> Tensor:
            self.run(way, edges, [tensors])()
            return tensors[-1]

        return run

    def checked(self, run: Run, alone: Call, sets: Sequence[Tensors]) -> Facts:
        """Whether two runs of the first set and of the last, and two replays of all sets in a graph, give the same
        bits, and counters are zero in the end."""
        results = [tensors[-1] for tensors in sets]

        def made(act: Callable[[], object]) -> list[Tensor]:
            for t in (*results, self.partials):
                t.fill_(torch.nan)
            act()
            synchronize(self.partials.device)
            return [t.clone() for t in results]

        self.counters.zero_()  # what another way left must not spoil this one
        ends = (0, len(sets) - 1)
        first, second = ([made(lambda k=k: alone(*sets[k]))[k] for k in ends] for _ in range(2))
        replay = capture(run)
        one, two = made(replay), made(replay)
        return {
            "same_twice": all(map(torch.equal, first, second)),
            "same_replayed": all(map(torch.equal, first, [one[k] for k in ends]))
            and all(map(torch.equal, one, two)),
            "counters_zero": not bool(self.counters.any()),
        }


def unhurried(built: BuiltKernel) -> BuiltKernel:
    """A kernel that is launched when the one in front has ended, although its code waits."""
    folder = Path(f"{built.folder.name}-unhurried")
    return replace(built, folder=folder, facts=replace(built.facts, early=False), image=built.code)


def measured(problem: Problem, found: Ways, store: ContentStore, arguments: argparse.Namespace) -> Facts:
    """Errors, checks and times of one row. Needs the device alone."""
    device = torch.device(arguments.device)
    torch.backends.cudnn.benchmark = True
    sets = [problem.inputs(device) for _ in range(sets_needed(problem.moved, device))]
    bench, peers = Bench.of(found, store, device), problem.peers()
    told: dict[str, Facts] = {name: {} for name in found.ways}
    runs: dict[tuple[str, str], Run] = {}
    for name, way in found.built.items():
        for edges in (FULL, EARLY):
            try:
                alone, run = bench.call(way, edges), bench.run(way, edges, sets)
                checks = bench.checked(run, alone, sets)
                error = problem.errors({name: alone}, sets[0])[name]
            except (TilewrightError, RuntimeError) as failed:
                told[name][f"{edges}_failed"] = str(failed)[:200]
                continue
            told[name] |= {f"{edges}_error": error, **{f"{edges}_{k}": v for k, v in checks.items()}}
            runs[name, edges] = run
    theirs = problem.errors(peers, sets[0])
    calls: dict[str, tuple[Call, Sequence[Tensors]]] = {name: (call, sets) for name, call in peers.items()}
    calls |= {f"{name} {edges}": (run, [()]) for (name, edges), run in runs.items()}
    timed = time_runs(calls, device, arguments.rounds)
    limit = ALLOWED * max(theirs.get(PASS, theirs.get(CUBLAS, 0.0)), torch.finfo(torch.float16).eps)
    for name, edges in runs:
        one = timed[f"{name} {edges}"]
        told[name][f"{edges}_us"] = one.timing.median * 1e6 / len(sets)
        told[name][f"{edges}_min_us"] = one.timing.minimum * 1e6 / len(sets)
        told[name][f"{edges}_method"] = one.method
        told[name][f"{edges}_right"] = is_right(told[name], edges, limit)
    facts: Facts = {f"{name}_us": timed[name].timing.median * 1e6 for name in peers}
    facts |= {"sets": len(sets), "allowed_error": limit, "peer_errors": theirs}
    return described(found, told) | facts


def is_right(told: Facts, edges: str, limit: float) -> bool:
    """Whether a way is near enough to the truth, and the same each time."""
    error = told[f"{edges}_error"]
    checks = ("same_twice", "same_replayed", "counters_zero")
    return isinstance(error, float) and error <= limit and all(told[f"{edges}_{c}"] for c in checks)


def described(found: Ways, ran: Mapping[str, Facts]) -> Facts:
    """What is known of kernels and ways, those that `ran` with their times."""
    ways: dict[str, Json] = {
        name: {"kind": w.kind, "modelled_us": w.modelled * 1e6, "blocks": w.blocks, "tiles": w.tiles, "warps": w.warps}
        | ran.get(name, {})
        for name, w in found.ways.items()
    }  # fmt: skip
    missing: dict[str, Json] = {**found.kernels.missing, **found.missing}
    return {"kernels": {**gemm.schedule_facts(found.kernels, {})}, "ways": ways, "missing": missing}


def child(name: str, arguments: argparse.Namespace) -> None:
    """Build and time one row, and write its facts."""
    torch.manual_seed(0)
    problem, device = Problem(ROWS[name]), torch.device(arguments.device)
    turns, facts = Turns(arguments.turns), Facts()

    def write(**news: Json) -> None:
        facts.update(news)
        if arguments.child_json is not None:
            record.write_json(arguments.child_json, facts)

    target = gpu_target(device.index or 0) if device.type == "cuda" else preset("sm_90")
    store = ContentStore(default_root(Options()))
    with turns.building():
        write(phase=BUILDING)
        start = time.perf_counter()
        found = Proposer(problem, target).all()
        solved = time.perf_counter()
        found.build(target, store, arguments.build_until or float("inf"))
        seconds = {"solve_s": solved - start, "build_s": time.perf_counter() - solved}
        write(phase=TIMING, **seconds, **described(found, {}))
    if device.type == "cuda":
        with turns.timing():
            start = time.perf_counter()
            write(**measured(problem, found, store, arguments))
            release(device)
            write(time_s=time.perf_counter() - start)
    write(phase=DONE)


# --- what is told ---


def ways_of(facts: Facts) -> Mapping[str, Facts]:
    """What is known of the ways of a row."""
    ways: Mapping[str, Facts] = facts.get("ways", {})  # type: ignore[assignment]
    return ways


def best(facts: Facts, kind: str, edges: str) -> tuple[str, float] | None:
    """The fastest right way of a kind, and its microseconds."""
    times = {
        name: us
        for name, w in ways_of(facts).items()
        if w["kind"] == kind and w.get(f"{edges}_right") and isinstance(us := w.get(f"{edges}_us"), float)
    }
    return min(times.items(), key=lambda item: item[1], default=None)


def ratios(found: Mapping[str, Facts], kind: str, edges: str) -> tuple[list[float], list[float]]:
    """Times of two kernels over those of a last arriver: of the best of each row; and of all that have the same parts
    and tiles, as one number for each row."""
    bests, pairs = list[float](), list[float]()
    for facts in found.values():
        two, last = best(facts, TWO, edges), best(facts, kind, edges)
        if two is not None and last is not None:
            bests.append(two[1] / last[1])
        ways = ways_of(facts)
        made = [
            a / b
            for name, w in ways.items()
            if w["kind"] == TWO
            and isinstance(a := w.get(f"{edges}_us"), float)
            and isinstance(b := ways.get(name.replace(TWO, kind), {}).get(f"{edges}_us"), float)
        ]
        pairs += [geomean(made)] if made else []
    return bests, pairs


def geomean(values: Sequence[float]) -> float:
    """Of positive numbers; NaN of none."""
    return exp(statistics.fmean(map(log, values))) if values else float("nan")


def peer(facts: Facts) -> float | None:
    """The fastest library, in microseconds."""
    names = (PASS, FUSED, CUBLAS)
    times = [us for name in names if isinstance(us := facts.get(f"{name}_us"), float)]
    return min(times, default=None)


def summary(found: Mapping[str, Facts]) -> str:
    """One line for each row and kind of edges, and how a last arriver compares with two kernels."""
    lines: list[list[str]] = []
    for name, facts in found.items():
        theirs = peer(facts)
        for edges in (FULL, EARLY):
            cells = [name, edges, f"{theirs:.2f}" if theirs is not None else "-"]
            for kind in (WHOLE, TWO, LAST, LAST_SINGLE):
                one = best(facts, kind, edges)
                cells += ["-", "-"] if one is None else [f"{one[1]:.2f}", one[0].split()[0]]
            two, last = best(facts, TWO, edges), best(facts, LAST, edges)
            ratio = f"{two[1] / last[1]:.3f}" if two and last else str(facts.get("failed", "-"))[:40]
            lines.append([*cells, ratio])
    heads = ["row", "edges", "library", WHOLE, "", TWO, "", LAST, "", LAST_SINGLE, "", "two / last"]
    table = gpu_report.text_table(
        "us over cold inputs, median; the best right way of each kind", heads, lines
    )
    told = [
        f"{edges} edges, {kind} over two kernels: {geomean(bests):.3f} times as fast (geomean of the best ways of "
        f"{len(bests)} rows), {geomean(pairs):.3f} with equal parts and tiles"
        for edges in (FULL, EARLY)
        for kind in (LAST, LAST_SINGLE)
        for bests, pairs in [ratios(found, kind, edges)]
    ]
    wrong = [
        f"not right: {name} {way} {edges}"
        for name, facts in found.items()
        for way, w in ways_of(facts).items()
        for edges in (FULL, EARLY)
        if w.get(f"{edges}_right") is False or f"{edges}_failed" in w
    ]
    return "\n".join([table, *told, *wrong[:20]])


def options(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = gpu_report.parser(__doc__)
    gpu_report.child_options(parser)
    parser.set_defaults(budget=SECONDS, rounds=ROUNDS)
    made = parser.parse_args(given)
    for name in made.only:
        if name not in ROWS:
            parser.error(f"no {name!r}; there are {', '.join(ROWS)}")
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Run, print the table, write the JSON."""
    warnings.filterwarnings("ignore")
    arguments = options(given)
    device = torch.device(arguments.device)
    if reason := gpu_report.unusable(device):
        print(reason, file=sys.stderr)
        return 2
    if arguments.child:
        child(arguments.child, arguments)
        return 0
    head = gpu_report.provenance(device, arguments.commit) | {"rounds": arguments.rounds}

    def report(found: Mapping[str, Facts]) -> None:
        if arguments.json is not None:
            record.write_json(arguments.json, head | {"rows": found})

    limits = Limits(arguments.build or BUILD_SHARE * arguments.budget, arguments.budget, arguments.gpus)
    passed = [f"--device={arguments.device}", f"--rounds={arguments.rounds}"]
    names = arguments.only or list(ROWS)
    found = gpu_turns.run("benchmarks.last_arriver", names, passed, limits, arguments.jobs or JOBS, report)
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
