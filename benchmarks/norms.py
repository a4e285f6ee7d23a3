"""`python -m benchmarks.norms --device cuda`: memory-bound kernels on a GPU against the best of their peers.

Each kernel has a process of its own, where all contestants run in turn, interleaved with copies of as many
bytes as the kernel must move. Every result is judged by the fp64 rule before it is timed. A timing that
beats the memory is an error, not a winner.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from benchmarks import gpu_peers, gpu_report, gpu_turns, record
from benchmarks.gpu_cases import CASES, RMS_NORM, Case, Shape, Tensors, compulsory
from benchmarks.gpu_clock import Timed, after_flush, release, sets_needed, time_runs
from benchmarks.gpu_figures import COPY, COPY_KERNEL, LARGE, Row, figures, rows
from benchmarks.gpu_peers import DYNAMIC, EAGER, FUSED, NAMES, OURS, OURS_DYNAMIC, Attempt, Call, Compilations
from benchmarks.gpu_turns import BUILDING, DONE, TIMING, Limits, Turns
from benchmarks.record import Facts
from tilewright import measure

DTYPES = ("float16", "bfloat16", "float32")
SIZES = "64,512,256,16,1"
ODD = 64.0
SPECIAL_SIZE = 32.0
"""MiB of 4096 x 4096 halves."""

JUDGED = 64 << 20
"""Bytes up to which results are judged while others build; larger ones take more memory than many at once
could have."""

PEAK = 2 << 30
READ = "read"
YARDSTICKS = (COPY, COPY_KERNEL, READ)


@dataclass(frozen=True)
class Point:
    """One type and size of a kernel."""

    dtype: str
    mebibytes: float
    odd: bool = False
    special: bool = False

    def shape(self, device: torch.device) -> Shape:
        """What its inputs are made from."""
        size = int(self.mebibytes * (1 << 20))
        return Shape(size, self.odd, getattr(torch, self.dtype), device)


@dataclass
class Ready:
    """A point whose contestants have run once: their calls, why others are missing, and the verdicts so far."""

    point: Point
    calls: dict[str, Call]
    missing: dict[str, str]
    accuracy: dict[str, Facts] = field(default_factory=dict)


def points(name: str, dtypes: Sequence[str], sizes: Sequence[float]) -> list[Point]:
    """All points of a kernel, the most telling first."""
    made: list[Point] = []
    for dtype in dtypes:
        odd = ODD if ODD in sizes else max(sizes)
        # The odd one first: some of the others are square, which Dynamo would take for a property of all sizes.
        made += [Point(dtype, odd, odd=True), Point(dtype, sizes[0])]
        if name == RMS_NORM and dtype == "float16" and max(sizes) >= SPECIAL_SIZE:
            made.append(Point(dtype, SPECIAL_SIZE, special=True))
        made += [Point(dtype, size) for size in sizes[1:]]
    return made


# --- building --------------------------------------------------------------------


class Builder:
    """Builds and checks the contestants of one kernel; those for all sizes are made once per type."""

    def __init__(self, case: Case, names: Sequence[str], device: torch.device, until: float) -> None:
        self._case = case
        self._names = names
        self._device = device
        self._until = until
        self._dynamic: dict[tuple[str, str], Call | str] = {}
        self.recompiles: dict[str, Compilations] = {}
        """By contestant and type: what was compiled in calls after the first."""

    def ready(self, point: Point) -> Ready:
        """Compile every contestant and run it once; judge the results if they are not too large."""
        shape = point.shape(self._device)
        inputs = self._case.inputs(shape)
        ready = Ready(point, {}, {})
        made: dict[str, Tensors] = {}
        keep = shape.size <= JUDGED
        for name in self._names:
            attempt = self._attempt(name, point, inputs, made.get(EAGER, ()), ready)
            if keep and attempt is not None and not isinstance(attempt.result, str):
                made[name] = attempt.result
        if EAGER in made:
            ready.accuracy = gpu_peers.judge(made, self._case, inputs)
        return ready

    def _attempt(
        self, name: str, point: Point, inputs: Tensors, like: Tensors, ready: Ready
    ) -> Attempt | None:
        first = (name, point.dtype) not in self._dynamic
        try:
            call = self._call(name, point.dtype)
        except Exception as error:  # noqa: BLE001 - one contestant's failure must not stop the others
            ready.missing[name] = measure.one_line(error)
            return None
        if name in (EAGER, FUSED) and point.shape(self._device).size > JUDGED:
            ready.calls[name] = call  # nothing to compile, and others need the memory
            return None
        attempt = gpu_peers.attempt(call, inputs, like)
        if attempt.compiled.fallbacks:  # it would be eager under our name
            attempt = replace(attempt, result="the graph was refused and runs as captured")
        if isinstance(attempt.result, str):
            ready.missing[name] = attempt.result
        else:
            ready.calls[name] = call
        if name in DYNAMIC:
            key = f"{name}, {point.dtype}"
            known = self.recompiles.get(key, Compilations(0, 0, 0, 0, 0))
            self.recompiles[key] = known if first else known.plus(attempt.compiled)
        return attempt

    def _call(self, name: str, dtype: str) -> Call:
        late = time.time() > self._until
        if name not in DYNAMIC:
            if late and name in (gpu_peers.INDUCTOR, OURS):
                raise gpu_peers.MissingError("no time left to build it")
            return gpu_peers.build(name, self._case)
        key = (name, dtype)
        if key not in self._dynamic:
            if late:
                raise gpu_peers.MissingError("no time left to build it")
            try:
                self._dynamic[key] = gpu_peers.build(name, self._case)
            except Exception as error:  # noqa: BLE001 - the reason is told for every size
                self._dynamic[key] = measure.one_line(error)
        call = self._dynamic[key]
        if isinstance(call, str):
            raise gpu_peers.MissingError(call)
        return call


# --- timing ----------------------------------------------------------------------


def yardsticks(moved: int, device: torch.device) -> dict[str, tuple[Call, list[Tensors]]]:
    """Copies of `moved` bytes, half read and half written, and a read of `moved` bytes."""
    count = sets_needed(moved, device)
    half = max(1, moved // 1024) * 512  # bytes; aligned like memory of the allocator

    def half_random() -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, (half // 4,), dtype=torch.int32, device=device)

    pairs = [(half_random(), half_random()) for _ in range(count)]
    whole = [(torch.randn(half // 2, device=device),) for _ in range(count)]
    return {
        COPY: (lambda source, target: target.copy_(source), pairs),
        COPY_KERNEL: (lambda source, target: torch.bitwise_not(source, out=target), pairs),
        READ: (lambda source: source.sum(), whole),
    }


@functools.cache
def peak(device: torch.device) -> float:
    """Bytes per second of the fastest yardstick at a size where nothing but memory counts."""
    moved = PEAK if device.type == "cuda" else 8 << 20
    timed = time_runs(yardsticks(moved, device), device, 20)
    return moved / min(item.timing.median for item in timed.values())


def time_point(ready: Ready, case: Case, device: torch.device, rounds: int) -> Facts:
    """All figures of one point. Needs the device alone."""
    point = ready.point
    shape = point.shape(device)
    inputs = case.inputs(shape)
    outputs = measure.flatten(case.composed(*inputs))
    moved = compulsory(inputs, outputs)
    if not ready.accuracy:
        made = {name: gpu_peers.attempt(call, inputs, outputs).result for name, call in ready.calls.items()}
        ready.missing |= {name: item for name, item in made.items() if isinstance(item, str)}
        right = {name: item for name, item in made.items() if not isinstance(item, str)}
        ready.accuracy = gpu_peers.judge({EAGER: outputs, **right}, case, inputs)
        del made, right
    sets = [inputs, *(case.inputs(shape) for _ in range(sets_needed(moved, device) - 1))]
    calls = {name: (call, sets) for name, call in ready.calls.items() if name not in ready.missing}
    measures = yardsticks(moved, device)
    timed = time_runs({**measures, **calls}, device, rounds)
    copy = min(timed[name].timing.median for name in (COPY, COPY_KERNEL))
    fastest = max(peak(device), moved / min(timed[name].timing.median for name in YARDSTICKS))
    facts: Facts = {
        "dtype": point.dtype,
        "mebibytes": point.mebibytes,
        "odd": point.odd,
        "special": point.special,
        "inputs": [list(t.shape) for t in inputs],
        "bytes": moved,
        "sets": len(sets),
        "copy_us": copy * 1e6,
        "read_us": timed[READ].timing.median * 1e6,
        "copy_GB_per_s": moved / copy / 1e9,
        "bound_us": measure.lower_bound(moved=moved, bandwidth=fastest) * 1e6,
        "contestants": {
            name: contestant(timed[name], moved, copy, moved / fastest, ready.accuracy.get(name, {}))
            for name in calls
        }
        | {name: {"not_available": reason} for name, reason in ready.missing.items()},
    }
    if point.special or point.mebibytes >= LARGE:
        some = {name: measures[name] for name in (COPY, COPY_KERNEL)} | calls
        single = after_flush({name: (call, group[0]) for name, (call, group) in some.items()}, device, rounds)
        facts["after_a_flush_us"] = {name: timing.median * 1e6 for name, timing in single.items()}
    return facts


def contestant(item: Timed, moved: int, copy: float, bound: float, accuracy: Facts) -> Facts:
    """What is recorded of one contestant at one point."""
    timing = item.timing
    facts: Facts = {
        "median_us": timing.median * 1e6,
        "min_us": timing.minimum * 1e6,
        "p90_us": timing.percentile(90) * 1e6,
        "GB_per_s": moved / timing.median / 1e9,
        "share_of_copy": copy / timing.median,
        "method": item.method,
        "accuracy": accuracy,
    }
    if not measure.is_possible(timing.median, bound):
        facts["impossible"] = f"{timing.median * 1e6:.2f} us, the memory needs {bound * 1e6:.2f} us"
    return facts


# --- a child ---------------------------------------------------------------------


def child(name: str, arguments: argparse.Namespace) -> Facts:
    """Build, check and time one kernel; writes its facts after every point."""
    device = torch.device(arguments.device)
    case, turns = CASES[name], Turns(arguments.turns)
    gpu_peers.watch_triton()
    torch.manual_seed(0)
    facts: Facts = {"phase": BUILDING, "points": []}
    done: list[Facts] = []

    def write(**news: record.Json) -> None:
        facts.update(news)
        if arguments.child_json is not None:
            record.write_json(arguments.child_json, facts)

    until = arguments.build_until or float("inf")
    builder = Builder(case, arguments.peers, device, until)
    with torch.no_grad(), turns.building():
        write()
        start = time.perf_counter()
        ready: list[Ready] = []
        for point in points(name, arguments.dtypes, arguments.sizes):
            ready.append(builder.ready(point))
            release(device)
        write(
            phase=TIMING,
            build_s=time.perf_counter() - start,
            recompiles={key: vars(added) for key, added in builder.recompiles.items()},
        )
    for dtype in arguments.dtypes:
        with torch.no_grad(), turns.timing():
            for item in (r for r in ready if r.point.dtype == dtype):
                done.append(time_point(item, case, device, arguments.rounds))
                release(device)
                write(points=done)
    write(phase=DONE)
    return facts


# --- the whole run ---------------------------------------------------------------


def recompiled(cases: Mapping[str, Facts]) -> dict[str, int]:
    """Of our kernels for all sizes: what was compiled, captured or built at sizes after the first."""
    found: dict[str, int] = {}
    for case, facts in cases.items():
        for key, added in facts.get("recompiles", {}).items():  # type: ignore[union-attr]
            if key.startswith(OURS_DYNAMIC):
                found[f"{case}: {key}"] = sum(added.values())  # type: ignore[union-attr,arg-type]
    return found


def table(found: Sequence[Row], dtype: str) -> str:
    """One line per kernel; per size our share of the copy bandwidth and our speed over the best peer."""
    mine = [row for row in found if row.dtype == dtype and not row.special]
    sizes = sorted({(row.odd, row.mebibytes) for row in mine})
    cases = list(dict.fromkeys(row.case for row in mine))
    lines = []
    for case in cases:
        at = {(row.odd, row.mebibytes): row for row in mine if row.case == case}
        ratios = [row.dynamic for row in at.values() if row.dynamic is not None]
        worst = f"{max(ratios):.2f}" if ratios else "-"
        lines.append([case, *(_cell(at.get(size)) for size in sizes), worst])
    heads = [f"{size:g} MiB{' odd' if odd else ''}" for odd, size in sizes]
    title = f"{dtype}: share of copy bandwidth, speed over the best peer; worst of dynamic over static"
    return gpu_report.text_table(title, ["kernel", *heads, "dynamic"], lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.share is None:
        return "wrong" if any(fault.startswith(OURS) for fault in row.faults) else "none"
    return f"{row.share:.0%} {row.speed:.2f}" if row.speed else f"{row.share:.0%}"


def summary(cases: Mapping[str, Facts], dtypes: Sequence[str]) -> str:
    """Everything that is printed at the end."""
    found = rows(cases)
    parts = [table(found, dtype) for dtype in dtypes if any(row.dtype == dtype for row in found)]
    faults = [(row.name, fault) for row in found for fault in row.faults]
    faults += [(case, str(facts["failed"])) for case, facts in cases.items() if "failed" in facts]
    faults += _noted(cases)
    if faults:
        parts.append(f"wrong, failed or absent:\n{gpu_report.grouped(faults)}\n")
    for row in found:
        if row.special:
            times = ", ".join(f"{name} {time_:.1f}" for name, time_ in row.times.items())
            parts.append(f"{row.name}, us: copy {row.copy:.1f}, {times}")
            flushed = ", ".join(f"{name} {time_:.1f}" for name, time_ in row.flushed.items())
            parts.append(f"  single runs after a flush: {flushed}\n")
    lines = [figure.row() for figure in figures(found, recompiled(cases))]
    parts.append(gpu_report.text_table("wanted figures", ["figure", "value", "wanted", ""], lines))
    return "\n".join(parts)


def _noted(cases: Mapping[str, Facts]) -> list[tuple[str, str]]:
    """Where our compiler is missing or a contestant could not be captured, and why."""
    found: list[tuple[str, str]] = []
    for case, facts in cases.items():
        for point in facts.get("points", ()):  # type: ignore[union-attr]
            for name, entry in point["contestants"].items():  # type: ignore[index,call-overload,union-attr]
                place = f"{case} {point['dtype']} {point['mebibytes']:g} MiB"  # type: ignore[index,call-overload]
                if name in (OURS, OURS_DYNAMIC) and "not_available" in entry:
                    found.append((place, f"{name} not available: {entry['not_available']}"))
                elif str(entry.get("method", "")).startswith("stream"):
                    found.append((place, f"{name} timed without a graph, {entry['method']}"))
    return found


def options(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = gpu_report.parser(__doc__)
    gpu_report.child_options(parser)

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser.add_argument("--dtypes", type=words, default=list(DTYPES), help="e.g. float16,float32")
    parser.add_argument(
        "--sizes", type=lambda text: [float(n) for n in words(text)], default=[float(n) for n in SIZES.split(",")],
        metavar="MIB,...", help=f"of the largest tensor, the most telling first (default {SIZES})",
    )  # fmt: skip
    parser.add_argument("--peers", type=words, default=list(NAMES), help=f"some of: {','.join(NAMES)}")
    made = parser.parse_args(given)
    for names, known in ((made.only, CASES), (made.peers, NAMES), (made.dtypes, DTYPES)):
        for name in names:
            if name not in known:
                parser.error(f"no {name!r}; there are: {', '.join(known)}")
    if EAGER not in made.peers:
        made.peers.insert(0, EAGER)
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Run, print the tables, write the JSON."""
    warnings.filterwarnings("ignore")
    arguments = options(given)
    device = torch.device(arguments.device)
    if reason := gpu_report.unusable(device):
        print(reason, file=sys.stderr)
        return 2
    if arguments.child:
        child(arguments.child, arguments)
        return 0
    names = arguments.only or list(CASES)
    head = gpu_report.provenance(device, arguments.commit) | {"rounds": arguments.rounds}
    start = time.time()

    def report(cases: Mapping[str, Facts]) -> None:
        if arguments.json is not None:
            found = [figure.facts() for figure in figures(rows(cases), recompiled(cases))]
            record.write_json(arguments.json, head | {"figures": found, "cases": cases})

    limits = Limits(arguments.build or 0.6 * arguments.budget, arguments.budget, arguments.gpus)
    passed = [
        f"--device={arguments.device}", f"--rounds={arguments.rounds}", f"--peers={','.join(arguments.peers)}",
        f"--dtypes={','.join(arguments.dtypes)}", f"--sizes={','.join(map(str, arguments.sizes))}",
    ]  # fmt: skip
    cases = gpu_turns.run("benchmarks.norms", names, passed, limits, arguments.jobs or len(names), report)
    print(summary(cases, arguments.dtypes))
    built = [f"{facts['build_s']:.0f}" for facts in cases.values() if "build_s" in facts]
    print(f"{time.time() - start:.0f} s in all; seconds of building per kernel: {' '.join(built)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
