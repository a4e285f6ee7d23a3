"""The contestants of the demo: build each on each job, time them in turn, show one table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.markup import escape
from rich.table import Table

from tilewright import measure
from tilewright.measure import BuiltPeer, PreparedContestant, Timing, Unavailable, Workload
from tilewright.report.environment import environment
from tilewright.report.taken import Reported

NAMES: Mapping[str, str] = {
    "eager": "eager",
    "inductor": "Inductor",
    "onnxruntime": "onnxruntime",
    "tilewright": "Tilewright",
}
OURS = "tilewright"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A workload with every contestant built on it, or the reason why it could not be."""

    workload: Workload
    contestants: Mapping[str, PreparedContestant | Unavailable]

    def ready(self) -> dict[str, PreparedContestant]:
        """The contestants that can run."""
        return {name: item for name, item in self.contestants.items() if isinstance(item, PreparedContestant)}

    def why_not(self, name: str) -> str:
        """Why a contestant cannot run; empty if it can."""
        item = self.contestants[name]
        return f"{self.workload.name}: {item.reason}" if isinstance(item, Unavailable) else ""


def through_dynamo(workload: Workload, threads: int) -> BuiltPeer | Unavailable:
    """Our compiler through `torch.compile`, the way a module's user meets it."""
    import tilewright

    del threads
    assert isinstance(workload.target, torch.nn.Module)
    before = tilewright.stats()
    compiled = torch.compile(workload.target, backend="tilewright", dynamic=True if workload.dims else None)

    def coverage() -> str:
        after = tilewright.stats()
        graphs, kernels = after.graphs - before.graphs, after.kernels - before.kernels
        text = f"{graphs} graph{'s' if graphs != 1 else ''}, {kernels} kernel{'s' if kernels != 1 else ''}"
        fallbacks = after.fallbacks - before.fallbacks
        return f"{text}; {fallbacks} not compiled" if fallbacks else text

    return BuiltPeer(lambda *inputs: measure.flatten(compiled(*inputs)), coverage)


def build(workload: Workload, names: Sequence[str], threads: int, say: Say) -> Job:
    """Build the named contestants on a workload; one that fails is noted and the others go on."""
    contestants: dict[str, PreparedContestant | Unavailable] = {}
    for name in names:
        title = NAMES[name]
        say(f"{workload.name}: building {title}")
        module = isinstance(workload.target, torch.nn.Module)
        peer = through_dynamo if name == OURS and module else None
        contestants[name] = measure.prepare(name, workload, threads, peer)
    return Job(workload, contestants)


def graphs_of(job: Job, known: Sequence[object]) -> list[Reported]:
    """The graphs that were compiled since those that were `known`, under the name of a job."""
    import tilewright

    fresh = [c for c in tilewright.compilations() if all(c is not k for k in known)]
    names = [job.workload.name, *(f"{job.workload.name} {n}" for n in range(2, len(fresh) + 1))]
    return [Reported(name, graph) for name, graph in zip(names, fresh, strict=False)]


def beside(peers: Job, ours: Job) -> Job:
    """One job of what two of the same workload hold."""
    return Job(peers.workload, {**peers.contestants, **ours.contestants})


def time_job(job: Job, threads: int, seconds: float, say: Say) -> dict[str, Timing]:
    """Time the contestants of a job in turn, about `seconds` each."""
    say(f"{job.workload.name}: timing {len(job.ready())} contestants in turn")
    return measure.compare(job.ready(), job.workload, threads, seconds=seconds)


def table(jobs: Sequence[tuple[Job, Mapping[str, Timing]]], threads: int) -> Table:
    """One table: a section per job, a row per contestant."""
    noun = "thread" if threads == 1 else "threads"
    result = Table(title=f"CPU, fp32, {threads} {noun}, {environment()['cpu']}", title_justify="left")
    result.add_column("", no_wrap=True)
    for column in ("first call", "p50", "p90", "/ eager", "peak mem"):
        result.add_column(column, justify="right", no_wrap=True)
    result.add_column("coverage", overflow="fold", min_width=16)
    for job, timings in jobs:
        sizes = "x".join(map(str, job.workload.inputs[0].shape))
        result.add_row(f"[bold]{job.workload.name}[/bold]", *[""] * 5, sizes)
        for name in job.contestants:
            result.add_row(*row(job, name, NAMES[name], timings), end_section=name == OURS)
    return result


def row(job: Job, name: str, title: str, timings: Mapping[str, Timing]) -> list[str]:
    """The cells of one contestant in one job."""
    item = job.contestants[name]
    if isinstance(item, Unavailable):
        return [f"  {title}", "", "", "", "", "", "not available"]
    timing = timings[name]
    against = f"{measure.ratio(timing, timings['eager']):.2f}" if "eager" in timings else ""
    peak = "" if item.peak_bytes is None else f"{item.peak_bytes / 2**20:.0f} MiB"
    times = [milliseconds(seconds) for seconds in (item.ready_seconds, timing.median, timing.percentile(90))]
    # Only the first clause: the whole line stands below the table.
    return [f"  {title}", *times, against, peak, escape(item.coverage.partition(";")[0]) or "-"]


def coverage_lines(jobs: Sequence[Job]) -> list[str]:
    """The whole coverage line of ours for each job where it ran."""
    return [f"{job.workload.name}: {job.ready()[OURS].coverage}" for job in jobs if OURS in job.ready()]


def unavailable_lines(jobs: Sequence[Job]) -> list[str]:
    """Why contestants are not available, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for job in jobs:
        for name, item in job.contestants.items():
            if isinstance(item, Unavailable):
                found.setdefault((name, item.reason), []).append(job.workload.name)
    return [f"{NAMES[n]} is not available ({', '.join(where)}): {why}" for (n, why), where in found.items()]


def speed_words(timed: Sequence[tuple[Job, Mapping[str, Timing]]]) -> list[str]:
    """How much faster than eager ours is on each workload."""
    return [
        f"{timings['eager'].median / timings[OURS].median:.1f}x the speed of eager on {job.workload.name}"
        for job, timings in timed
        if OURS in timings and "eager" in timings
    ]


def milliseconds(seconds: float) -> str:
    """A duration with three significant digits, in s above one second, else in ms."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def quiet() -> None:
    """Keep the libraries' chatter off the terminal; must run before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
