"""One row: contestants built, judged and timed on one workload, and how much memory each takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import gpu_clock, gpu_report
from benchmarks.attention.peers import MEASURING, OURS, OWN, Apart, Option, Ours, build_ahead
from benchmarks.attention.workloads import Tensors
from benchmarks.gpu_clock import Timed
from benchmarks.record import Facts
from tilewright import measure
from tilewright.measure import Peer, PreparedContestant, Run, Unavailable, Workload

GRAPHS = 2 << 30
"""Bytes of eager's scores up to which runs are captured in graphs, all of which live at once."""

FEWEST = 5
"""Samples."""

FASTER = 1.3
"""A product of two matrices is taken to reach at least 1 / FASTER of what the machine can."""

Results = Mapping[str, Tensors]


@dataclass(frozen=True)
class Row:
    """What is compared: a workload and who runs it; `judge` says whether results are right."""

    workload: Workload
    peers: Mapping[str, Peer]
    judge: Callable[[Results], Mapping[str, Facts]]
    flops: float
    """Of the matrix products that nobody can leave out."""
    scores: int
    """Bytes of a whole matrix of scores."""
    ours: Sequence[Mapping[str, Option]] = ()
    """Options of our contestants, whose machine code may be built before they are."""
    measuring: Collection[str] = MEASURING
    """Contestants that time candidates while they compile, for which they need the device alone."""
    longest: float = math.inf
    """Seconds from which on one sample is enough."""


@dataclass
class Made:
    """The contestants of a row that are built so far, and bytes that each keeps on the device between calls."""

    items: dict[str, PreparedContestant | Unavailable] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)

    @property
    def ready(self) -> dict[str, PreparedContestant]:
        """Those that run."""
        return {name: item for name, item in self.items.items() if isinstance(item, PreparedContestant)}


def build(row: Row, names: Sequence[str], made: Made, device: torch.device, threads: int) -> None:
    """Build the contestants that are not yet there and run each twice."""
    for name in names:
        if name in made.items:
            continue
        before = _allocated(device)
        made.items[name] = measure.prepare(name, row.workload, threads, row.peers[name])
        gpu_clock.synchronize(device)
        made.kept[name] = _allocated(device) - before
        gpu_clock.release(device)


def build_own_ahead(row: Row, until: float) -> None:
    """Machine code of our contestants, which time candidates later and then find it in the kernel cache."""
    for options in row.ours:
        if time.time() < until:
            build_ahead(row.workload, options)


def finish(row: Row, made: Made, device: torch.device, threads: int, rounds: int, seconds: float) -> Facts:
    """Judge, measure memory, time. Needs the device alone."""
    with measure.settings(threads):
        extra = _each(row, made, device, lambda name, run: made.kept[name] + extra_bytes(run, device))
        runs = {name: bound(item, row.workload) for name, item in made.ready.items()}
        verdicts = row.judge({name: measure.flatten(run()) for name, run in runs.items()}) if runs else {}
        gpu_clock.release(device)
        masks = {f"{name}'s mask": m for name, item in made.ready.items() if (m := mask_of(item)) is not None}
        captured = row.scores <= GRAPHS
        timed = clock(runs | masks, device, rounds, seconds, captured=captured, longest=row.longest)
        fastest = FASTER * product(device)
    facts: dict[str, Facts] = {}
    for name, item in made.items.items():
        if isinstance(item, Unavailable):
            facts[name] = {"not_available": item.reason}
        else:
            facts[name] = contestant(item, timed[name], row.flops, fastest)
            facts[name] |= {"extra_bytes": extra[name], "accuracy": verdicts.get(name, {})}
            if (mask := timed.get(f"{name}'s mask")) is not None:
                facts[name] |= {"mask_ms": mask.timing.median * 1e3, "mask_method": mask.method}
    return {
        "inputs": [
            f"{str(x.dtype).removeprefix('torch.')} {'x'.join(map(str, x.shape))}"
            for x in row.workload.inputs
        ],
        "contestants": facts,
    }


def mask_of(item: PreparedContestant) -> Run | None:
    """What makes a contestant's mask, if it gets one ready made."""
    return item.call.mask if isinstance(item.call, Apart) else None


def bound(item: PreparedContestant, workload: Workload) -> Run:
    """The contestant's call on the workload's inputs."""
    return lambda: item.call(*workload.inputs)


def _each(row: Row, made: Made, device: torch.device, work: Callable[[str, Run], int]) -> dict[str, int]:
    """`work` on each contestant; one that fails now (others took no memory before) becomes unavailable."""
    found: dict[str, int] = {}
    for name, item in made.ready.items():
        try:
            found[name] = work(name, bound(item, row.workload))
        except Exception as error:  # noqa: BLE001 - one contestant's failure must not stop the others
            made.items[name] = Unavailable(measure.one_line(error))
        gpu_clock.release(device)
    return found


def contestant(item: PreparedContestant, timed: Timed, flops: float, fastest: float) -> Facts:
    """What is recorded of one contestant's speed, and of our compiler what it made."""
    timing = timed.timing
    facts: Facts = {
        "first_call_s": item.ready_seconds,
        "median_ms": timing.median * 1e3,
        "min_ms": timing.minimum * 1e3,
        "p90_ms": timing.percentile(90) * 1e3,
        "samples": len(timing.samples),
        "method": timed.method,
        "tflops": flops / timing.median / 1e12,
    }
    if not measure.is_possible(timing.median, flops / fastest):
        facts["impossible"] = f"{flops / timing.median / 1e12:.0f} TFLOP/s, the machine {fastest / 1e12:.0f}"
    if isinstance(item.call, Ours):
        facts |= {"coverage": item.coverage, **made_of(item.call)}
    return facts


def made_of(call: Ours) -> Facts:
    """What was decided for a compiled model, its kernels and calls, and the time that the model of costs expects."""
    compiled = call.compiled
    mapped = next((phase.result for phase in compiled.trace.phases if phase.name == "map"), None)
    regions: Sequence[object] = getattr(mapped, "regions", ())
    modelled = [record.seconds for record in (*compiled.kernels, *compiled.calls)]
    return {
        "plan": [str(region) for region in regions],
        "modelled_ms": None if None in modelled else 1e3 * sum(s or 0.0 for s in modelled),
        "kernels": [
            _figures(k) | {"bytes_lower_bound": k.bytes_lower_bound, "schedule": k.schedule}
            for k in compiled.kernels
        ],
        "calls": [_figures(c) | {"how": c.how, "results": list(c.results)} for c in compiled.calls],
    }


def _figures(record: Any) -> Facts:
    """Of a kernel or call."""
    seconds = record.seconds
    return {
        "name": record.name,
        "ops": list(record.ops),
        "bytes_moved": record.bytes_moved,
        "flops": record.flops,
        "exps": record.exps,
        "modelled_ms": None if seconds is None else 1e3 * seconds,
    }


# --- memory ----------------------------------------------------------------------


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_allocated(device)


def extra_bytes(run: Run, device: torch.device) -> int:
    """The most memory that a call takes beyond what lives before it and its results. On the CPU by the growth
    of resident memory, which pages of a few hundred KiB blur."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = measure.flatten(run())
        torch.cuda.synchronize(device)
        most = torch.cuda.max_memory_allocated(device) - before
    else:
        with measure.PeakMemory() as memory:
            results = measure.flatten(run())
        most = memory.bytes or 0
    return max(0, most - sum(t.nbytes for t in results))


# --- time ------------------------------------------------------------------------


def clock(
    runs: Mapping[str, Run], device: torch.device, rounds: int, seconds: float, *, captured: bool,
    longest: float = math.inf,
) -> dict[str, Timed]:  # fmt: skip
    """Single runs in turn: on a GPU between events, each after a write of four times the cache; else by the
    wall clock after a pause. About `seconds` each, at most `rounds` samples; one of what takes `longest` or more."""
    if device.type != "cuda":
        timings = measure.measure(runs, seconds=seconds, rounds=(FEWEST, rounds))
        return {name: Timed(timing, "wall") for name, timing in timings.items()}
    ready, methods = dict(runs), dict.fromkeys(runs, "stream")
    for name, run in runs.items() if captured else ():
        try:
            ready[name], methods[name] = gpu_clock.capture(run), "graph"
        except gpu_clock.CaptureError as error:
            methods[name] = f"stream: {error}"
    scratch = torch.empty(
        gpu_clock.ROTATION * gpu_clock.cache_bytes(device), dtype=torch.uint8, device=device
    )
    samples = sampled(ready, rounds, seconds, longest, lambda: scratch.fill_(1))
    return {name: Timed(measure.Timing(tuple(values)), methods[name]) for name, values in samples.items()}


def sampled(
    runs: Mapping[str, Run], rounds: int, seconds: float, longest: float, before: Run
) -> dict[str, list[float]]:
    """Seconds between two events around each run, after `before`: one sample of what takes `longest` or more, of the
    others as many as fit into `seconds`."""
    once = gpu_clock.events(runs, 1, before)
    short = {name: run for name, run in runs.items() if once[name][0] < longest}
    most = max((once[name][0] for name in short), default=0.0)
    count = max(FEWEST, min(rounds, int(seconds / max(most, 1e-6))))
    return once | gpu_clock.events(short, count, before)


def product(device: torch.device) -> float:
    """Operations per second of a product of two large matrices, the best of some; in fp16 on a GPU, else fp32."""
    size, dtype = (8192, torch.float16) if device.type == "cuda" else (1024, torch.float32)
    x = torch.randn(size, size, device=device).to(dtype)
    y = torch.randn(size, size, device=device).to(dtype)
    timed = clock({"product": lambda: x @ y}, device, 10, 0.5, captured=False)
    return 2 * size**3 / timed["product"].timing.minimum


def table(title: str, rows: Mapping[str, Facts]) -> str:
    """One line per row: each contestant's milliseconds, our speed over the best of the others, our memory."""
    names = list(dict.fromkeys(n for facts in rows.values() for n in _contestants(facts)))
    lines: list[list[str]] = []
    for label, facts in rows.items():
        found = _contestants(facts)
        best = best_peer(facts)
        mine = milliseconds(found.get(OURS, {}))
        speed = f"{best / mine:.2f}" if best and mine else "-"
        extra = found.get(OURS, {}).get("extra_bytes")
        memory = f"{extra / 2**20:.1f}" if isinstance(extra, int | float) else "-"
        kernels = found.get(OURS, {}).get("kernels")
        count = str(len(kernels)) if isinstance(kernels, list) else "-"
        cells = [_cell(found.get(name, {})) for name in names]
        lines.append([label, *cells, speed, memory, count])
    return gpu_report.text_table(title, ["", *names, "x best peer", "extra MiB", "kernels"], lines)


def reports(title: str, rows: Mapping[str, Facts]) -> str:
    """One line per row and way of ours to run it: kernels, calls, milliseconds modelled and measured, what they
    compute and move, and memory beyond inputs and results."""
    lines: list[list[str]] = []
    for label, facts in rows.items():
        for name, item in _contestants(facts).items():
            kernels: Sequence[Facts] | None = item.get("kernels")  # type: ignore[assignment]
            if kernels is None:
                continue
            calls: Sequence[Facts] = item.get("calls", ())  # type: ignore[assignment]
            sums = [_total([*kernels, *calls], key) for key in ("flops", "exps", "bytes_moved")]
            figures = [_scaled(n, 10**power) for n, power in zip(sums, (9, 9, 6), strict=True)]
            times = [_scaled(item.get(key), 1) for key in ("modelled_ms", "median_ms")]
            memory = _scaled(item.get("extra_bytes"), 1 << 20)
            lines.append([label, name, str(len(kernels)), str(len(calls)), *times, *figures, memory])
    head = ("", "", "kernels", "calls", "modelled ms", "ms", "Gflop", "Gexp", "MB moved", "extra MiB")
    return gpu_report.text_table(title, head, lines)


def _total(records: Sequence[Facts], key: str) -> float | None:
    found = [record.get(key) for record in records]
    return sum(n for n in found if isinstance(n, int | float)) if None not in found else None


def _scaled(n: object, unit: float) -> str:
    return f"{n / unit:.3g}" if isinstance(n, int | float) else "-"


def _contestants(facts: Facts) -> Mapping[str, Facts]:
    return facts.get("contestants", {})  # type: ignore[return-value]


def milliseconds(facts: Facts) -> float | None:
    """The median of a contestant that ran, is right and possible."""
    right = facts.get("accuracy", {}).get("passed")  # type: ignore[union-attr]
    if "median_ms" not in facts or not right or "impossible" in facts:
        return None
    return float(facts["median_ms"])  # type: ignore[arg-type]


def best_peer(facts: Facts) -> float | None:
    """Milliseconds of the fastest contestant besides us."""
    others = (item for name, item in _contestants(facts).items() if name not in OWN and "kernels" not in item)
    times = [milliseconds(item) for item in others]
    return min((t for t in times if t is not None), default=None)


def _cell(facts: Facts) -> str:
    if "median_ms" not in facts:
        return "-"
    time = f"{facts['median_ms']:.3g}"
    if "mask_ms" in facts:
        time += f" (mask {facts['mask_ms']:.2g})"
    return time if milliseconds(facts) is not None else f"{time} wrong"


def absent(rows: Mapping[str, Facts]) -> list[tuple[str, str]]:
    """Places and reasons: contestants that did not run, and results that are wrong or impossible."""
    found = [(label, str(facts["failed"])) for label, facts in rows.items() if "failed" in facts]
    for label, facts in rows.items():
        for name, item in _contestants(facts).items():
            verdict: Facts = item.get("accuracy", {})  # type: ignore[assignment]
            reason = item.get("not_available") or item.get("impossible")
            if reason is None and not verdict.get("passed"):
                reason = f"wrong: {verdict.get('reason', 'not judged')}"
            if reason is not None:
                found.append((label, f"{name}: {reason}"))
    return found
