"""`bench`: ours and the peers in turn, in trtexec's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright import measure
from tilewright.errors import InputError, TilewrightError
from tilewright.tuning.search_limits import MEASUREMENT

from .request import CommandRequest, ExitCode
from .show import Cell, Json, size
from .work import (
    Compiled,
    compile_for,
    phases_of,
    prepared,
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


def bench_model(request: CommandRequest, against: str, seconds: float) -> int:
    """Build, time and show all contestants. A peer that cannot run is a line, never a failure."""
    names = _peers(against)
    threads = threads_of(request)
    with request.progress(f"loading {request.model}"):
        model, chosen = prepared(request)
        workload = measure.Workload(model.name, model.runnable, chosen.inputs)
    compiled: list[Compiled] = []
    refused: list[TilewrightError] = []

    def ours(_workload: measure.Workload, _threads: int) -> measure.BuiltPeer:
        try:
            made = compile_for(request, model, workload.inputs)
        except TilewrightError as error:
            refused.append(error)
            raise
        compiled.append(made)
        return measure.BuiltPeer(lambda *values: measure.flatten(made(*values)), lambda: str(made.coverage))

    def awaited(name: str) -> measure.Peer:
        build = ours if name == OURS else measure.PEERS[name]
        return build if request.device is None else _waiting(build)

    ready: dict[str, measure.PreparedContestant] = {}
    missing: dict[str, str] = {}
    for name in [OURS, *names]:
        with request.progress(f"building {name}"):
            made = measure.prepare(name, workload, threads, awaited(name))
        if isinstance(made, measure.PreparedContestant):
            ready[name] = made
        elif refused:
            raise refused[0]  # a failure of ours is an error, unlike a peer's
        else:
            missing[name] = str(made)
    if OURS in missing:
        raise TilewrightError(missing[OURS], phase="bench", op=request.model)
    with request.progress("timing, in turn with pauses"):
        timings = measure.compare(ready, workload, threads, seconds=seconds)
    show_compiled(request, compiled[-1])
    entry = ready[OURS]
    phases = [*phases_of(compiled[-1]), ("first run", entry.first_call_seconds)]
    total = entry.build_seconds + entry.first_call_seconds
    show_phases(
        request, phases, max(total, sum(seconds for _, seconds in phases))
    )  # an artifact was loaded before
    _show(request, workload, ready, timings, missing, threads)
    return ExitCode.OK


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


def _show(
    request: CommandRequest,
    workload: measure.Workload,
    ready: Mapping[str, measure.PreparedContestant],
    timings: Mapping[str, measure.Timing],
    missing: Mapping[str, str],
    threads: int,
) -> None:
    screen = request.screen
    agree = _agreement(ready, workload, threads)
    rows: list[Sequence[Cell]] = []
    facts: list[Json] = []
    for name, timing in timings.items():
        entry, summary = ready[name], timing.summary()
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
    for name, reason in missing.items():
        screen.line(f"{name}: {reason}")
    for name, timing in timings.items():
        if timing.variation > MEASUREMENT.noisy_variation_ratio:
            screen.line(f"warning: {name} varies by {timing.variation:.0%}: a noisy machine", style="yellow")
    screen.facts |= {"environment": measure.environment(), "threads": threads, "contestants": facts}
    screen.facts["not_available"] = dict(missing)


def _agreement(
    ready: Mapping[str, measure.PreparedContestant], workload: measure.Workload, threads: int
) -> dict[str, Tolerance]:
    """Each contestant's result against eager's; empty where eager does not take part."""
    if "eager" not in ready:
        return {}
    with measure.settings(threads):
        results = {name: each.call(*workload.inputs) for name, each in ready.items()}
    return {name: tolerance(result, results["eager"]) for name, result in results.items()}
