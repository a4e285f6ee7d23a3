"""`bench`: ours and the peers in turn, in trtexec's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright import measure
from tilewright.errors import InputError, TilewrightError
from tilewright.report.bench import BenchFacts, ContestantFacts, SweepFacts, bench_markdown, bench_page
from tilewright.report.environment import environment, now
from tilewright.report.records import Compiled
from tilewright.report.texts import size
from tilewright.report.write import check_writable, write
from tilewright.tuning.timing_limits import MEASUREMENT

from .model import Model
from .request import CommandRequest, ExitCode
from .show import Cell, Json
from .sizes import SizesOfDim, parse_over, shown
from .work import (
    compile_for,
    phases_of,
    prepared,
    seconds_of,
    show_compiled,
    show_phases,
    synchronize,
    threads_of,
)

OURS = "tilewright"
LATENCY = ("min", "mean", "median", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The smallest absolute, or else relative, tolerance with which two results agree."""

    absolute: float
    relative: float

    def __str__(self) -> str:
        """As polygraphy prints it."""
        return f"abs {self.absolute:.2g} or rel {self.relative:.2g}"


def tolerance(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> Tolerance:
    """What `ours` needs to agree with `reference`; infinite where shapes or non-finite values differ."""
    if [t.shape for t in ours] != [t.shape for t in reference]:
        return Tolerance(float("inf"), float("inf"))
    absolute = relative = 0.0
    for a, b in zip(ours, reference, strict=True):
        x, y = a.detach().double(), b.detach().double()
        same = (x == y) | (x.isnan() & y.isnan())
        gap = torch.where(same, torch.zeros_like(x), (x - y).abs().nan_to_num(nan=float("inf")))
        if gap.numel():
            absolute = max(absolute, float(gap.max()))
            ratio = torch.where(gap > 0, gap / y.abs(), gap).nan_to_num(nan=float("inf"), posinf=float("inf"))
            relative = max(relative, float(ratio.max()))
    return Tolerance(absolute, relative)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What `bench` is asked besides the model: peers, seconds for each contestant, files for pages, and the sizes of a
    dim over which throughput is measured (`batch=1,2,4`)."""

    against: str
    seconds: float
    html: str | None = None
    markdown: str | None = None
    over: str | None = None


@dataclass(frozen=True, slots=True)
class BenchOutcome:
    """Who could run, how long calls took, who could not and why, and how far results agree with eager's."""

    ready: Mapping[str, measure.PreparedContestant]
    timings: Mapping[str, measure.Timing]
    missing: Mapping[str, str]
    agree: Mapping[str, Tolerance]


def bench_model(request: CommandRequest, asked: BenchPlan) -> int:
    """Build, time and show all contestants. A peer that cannot run is a line, never a failure."""
    names, seconds = _peers(asked.against), asked.seconds
    for path in (asked.html, asked.markdown):
        if path is not None:
            check_writable(path)
    over = None if asked.over is None else parse_over(asked.over)
    threads = threads_of(request)
    with request.progress(f"loading {request.model}"):
        model, chosen = prepared(request)
        if over is not None:
            over.check(request, model)
        workload = measure.Workload(model.name, model.runnable, chosen.inputs)
    build = _Contestants(request, model, workload, threads)
    stopped: KeyboardInterrupt | None = None
    timings: Mapping[str, measure.Timing] = {}
    try:
        for name in [OURS, *names]:
            build.add(name)
        with request.progress("timing, in turn with pauses"):
            timings = measure.compare(build.ready, workload, threads, seconds=seconds)
    except measure.Interrupted as error:
        timings, stopped = error.timings, error
    except KeyboardInterrupt as error:
        stopped = error
    build.show()
    if stopped is not None and not timings:
        _show_built(request, build.ready)
        raise stopped
    agree = {} if stopped is not None else _agreement(build.ready, workload, threads)
    outcome = BenchOutcome(build.ready, timings, build.missing, agree)
    _show(request, outcome, threads)
    sweep = None
    if over is not None and stopped is None:
        sweep, stopped = _swept(request, model, outcome, over, workload, seconds)
    _write_pages(request, asked, outcome, sweep, shown(model, workload.inputs))
    if stopped is not None:
        raise stopped
    return ExitCode.OK


class _Contestants:
    """Builds contestants one after the other: those that are `ready`, and why others are `missing`."""

    def __init__(
        self, request: CommandRequest, model: Model, workload: measure.Workload, threads: int
    ) -> None:
        self.ready: dict[str, measure.PreparedContestant] = {}
        self.missing: dict[str, str] = {}
        self._request, self._model, self._workload, self._threads = request, model, workload, threads
        self._compiled: list[Compiled] = []
        self._refused: list[TilewrightError] = []
        self._built: list[tuple[str, float]] = []
        self._again = 0.0
        """Seconds of the first call in which other sizes were compiled for."""

    def add(self, name: str) -> None:
        """Build one more. Raises what ours raises; a peer's failure is a line."""
        build = self._ours if name == OURS else measure.PEERS[name]
        waits = build if self._request.device is None else _waiting(build)
        with self._request.progress(f"building {name} for {self._request.model}"):
            made = measure.prepare(name, self._workload, self._threads, waits)
        if isinstance(made, measure.PreparedContestant):
            self.ready[name] = made
            if name == OURS:
                self._again = seconds_of(phases_of(self._compiled[-1])) - seconds_of(self._built)
        elif self._refused:
            raise self._refused[0]  # a failure of ours is an error, unlike a peer's
        elif name == OURS:
            raise TilewrightError(str(made), phase="bench", op=self._request.model)
        else:
            self.missing[name] = str(made)

    def show(self) -> None:
        """What ours is, and what its time went to, if it is built."""
        entry = self.ready.get(OURS)
        if entry is None:
            return
        compiled = self._compiled[-1]
        show_compiled(self._request, compiled)
        first = [("first run", entry.first_call_seconds - self._again)]
        phases = [*self._built, *([("compiled again", self._again)] if self._again > 0 else []), *first]
        show_phases(self._request, phases, entry.build_seconds + entry.first_call_seconds)

    def _ours(self, _workload: measure.Workload, _threads: int) -> measure.BuiltPeer:
        try:
            made = compile_for(self._request, self._model, self._workload.inputs)
        except TilewrightError as error:
            self._refused.append(error)
            raise
        self._compiled.append(made)
        self._built = phases_of(made)
        return measure.BuiltPeer(
            lambda *values: measure.flatten(made(*values)), lambda: str(made.coverage),
            earlier_seconds=self._model.load_seconds,
        )  # fmt: skip


def _show_built(request: CommandRequest, ready: Mapping[str, measure.PreparedContestant]) -> None:
    """What is known of contestants before any was timed."""
    rows = [(name, each.build_seconds, each.first_call_seconds) for name, each in ready.items()]
    request.screen.table("built, not timed", ("", "build s", "first call s"), rows)
    request.screen.facts["contestants"] = [
        {"name": name, "build_seconds": built, "first_call_seconds": first} for name, built, first in rows
    ]


def _waiting(build: measure.Peer) -> measure.Peer:
    """A contestant whose calls end when their results are there."""

    def waits(workload: measure.Workload, threads: int) -> measure.BuiltPeer | measure.Unavailable:
        made = build(workload, threads)
        if isinstance(made, measure.Unavailable):
            return made

        def call(*inputs: Tensor) -> tuple[Tensor, ...]:
            results = made.call(*inputs)
            synchronize(results)
            return results

        return replace(made, call=call)

    return waits


def _peers(against: str) -> list[str]:
    names = [name.strip() for name in against.split(",")]
    names = [name for name in dict.fromkeys(names) if name not in ("", "none", OURS)]
    known = [peer for peer in measure.PEERS if peer != OURS]
    for name in names:
        if name not in known:
            raise InputError(
                f"unknown peer {name!r}", phase="cli", op="--against", hint=f"of {', '.join(known)}"
            )
    return names


def _show(request: CommandRequest, outcome: BenchOutcome, threads: int) -> None:
    screen, timings, agree = request.screen, outcome.timings, outcome.agree
    rows: list[Sequence[Cell]] = []
    facts: list[Json] = []
    for name, timing in timings.items():
        entry, summary = outcome.ready[name], timing.summary()
        factor = measure.ratio(timing, timings[OURS])
        memory = entry.peak_bytes
        build, first = entry.build_seconds, entry.first_call_seconds
        times = [summary[key] for key in LATENCY]
        ratio = f"{factor:.3f}x"
        rows.append(
            (
                name,
                build,
                first,
                summary["throughput"],
                *times,
                ratio,
                size(memory),
                str(agree.get(name, "-")),
            )
        )
        facts.append(
            {
                "name": name,
                "build_seconds": build,
                "first_call_seconds": first,
                "latency_ms": {key: summary[key] for key in (*LATENCY, "max")},
                "throughput": summary["throughput"],
                "cv": summary["cv"],
                "samples": summary["samples"],
                "time_over_tilewright": factor,
                "peak_bytes": memory,
                "tolerance": [agree[name].absolute, agree[name].relative] if name in agree else None,
                "coverage": entry.coverage,
            }
        )
    latency = tuple(f"{key} ms" for key in LATENCY)
    columns = ("", "build s", "first call s", "throughput /s", *latency, "time / ours", "peak memory")
    screen.table(f"{threads} threads", (*columns, "tolerance against eager"), rows)
    for name, reason in outcome.missing.items():
        screen.line(f"{name}: {reason}")
    for name, timing in timings.items():
        if timing.variation > MEASUREMENT.noisy_variation_ratio:
            screen.line(f"warning: {name} varies by {timing.variation:.0%}: a noisy machine", style="yellow")
    screen.facts |= {"environment": environment(), "threads": threads, "contestants": facts}
    screen.facts["not_available"] = dict(outcome.missing)


def _agreement(
    ready: Mapping[str, measure.PreparedContestant], workload: measure.Workload, threads: int
) -> dict[str, Tolerance]:
    """Each contestant's result against eager's; empty where eager does not take part."""
    if "eager" not in ready:
        return {}
    with measure.settings(threads):
        results = {name: each.call(*workload.inputs) for name, each in ready.items()}
    return {name: tolerance(result, results["eager"]) for name, result in results.items()}


# --- throughput over a size -------------------------------------------------------


def _swept(
    request: CommandRequest,
    model: Model,
    outcome: BenchOutcome,
    over: SizesOfDim,
    workload: measure.Workload,
    seconds: float,
) -> tuple[SweepFacts, KeyboardInterrupt | None]:
    """Items per second at each size; what a contestant refuses is left out. With the sign that somebody interrupted it,
    which ends it at the sizes so far."""
    rates: dict[str, list[tuple[int, float]]] = {name: [] for name in outcome.ready}
    stopped: KeyboardInterrupt | None = None
    try:
        for number in over.sizes:
            inputs = over.inputs(request, model, workload.inputs, number)
            timed = _timed_at(
                request, outcome, replace(workload, inputs=inputs), f"{over.dim} = {number}", seconds
            )
            for name, timing in timed.items():
                rates[name].append((number, number / timing.median))
    except KeyboardInterrupt as error:
        stopped = error
    sweep = SweepFacts(over.dim, tuple((name, tuple(found)) for name, found in rates.items()))
    _show_sweep(request, sweep)
    return sweep, stopped


def _timed_at(
    request: CommandRequest, outcome: BenchOutcome, workload: measure.Workload, at: str, seconds: float
) -> Mapping[str, measure.Timing]:
    """Those that can run at a size."""
    threads = threads_of(request)
    able: dict[str, measure.PreparedContestant] = {}
    with request.progress(f"timing {at}"):
        for name, each in outcome.ready.items():
            try:
                with measure.settings(threads):
                    each.call(*workload.inputs)
            except Exception as error:  # noqa: BLE001 - a contestant's failure is a line, and the others go on
                request.screen.line(f"{name}: {at}: {measure.one_line(error)}")
            else:
                able[name] = each
        return measure.compare(able, workload, threads, seconds=seconds)


def _show_sweep(request: CommandRequest, sweep: SweepFacts) -> None:
    found = {name: dict(rates) for name, rates in sweep.rates}
    rows: list[Sequence[Cell]] = [(n, *(rates.get(n) for rates in found.values())) for n in sweep.sizes]
    request.screen.table(f"{sweep.dim} per second", (sweep.dim, *found), rows)
    request.screen.facts["over"] = {
        "dim": sweep.dim,
        "rates": {name: {str(n): rate for n, rate in rates.items()} for name, rates in found.items()},
    }


def _write_pages(
    request: CommandRequest, asked: BenchPlan, outcome: BenchOutcome, sweep: SweepFacts | None, sizes: str
) -> None:
    """The same as files."""
    contestants = tuple(
        ContestantFacts(
            name=name,
            build=outcome.ready[name].build_seconds,
            first_call=outcome.ready[name].first_call_seconds,
            samples=timing.samples,
            latency=tuple((key, timing.summary()[key] / 1e3) for key in LATENCY),
            throughput=timing.throughput,
            factor=measure.ratio(timing, outcome.timings[OURS]),
            peak_bytes=outcome.ready[name].peak_bytes,
            tolerance=str(outcome.agree.get(name, "-")),
            coverage=outcome.ready[name].coverage,
        )
        for name, timing in outcome.timings.items()
    )
    facts = BenchFacts(
        title=request.model,
        made=now(),
        sizes=sizes,
        threads=threads_of(request),
        environment=tuple((name, str(value)) for name, value in environment().items()),
        contestants=contestants,
        missing=tuple(outcome.missing.items()),
        sweep=sweep,
    )
    for path, made in ((asked.html, bench_page), (asked.markdown, bench_markdown)):
        if path is not None:
            write(path, made(facts))
            request.screen.line(f"written: {path}")
