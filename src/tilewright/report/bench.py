"""What `bench` found, as a page and as Markdown: latencies, their distribution, throughput over a size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.tuning.page_limits import PAGE, PLOT

from .charts import Line, Plot, Scale, Tick
from .page import rendered
from .texts import count, duration, printable, size


@dataclass(frozen=True, slots=True)
class ContestantFacts:
    """One contestant: seconds to build and of the first call, seconds of each timed call, time over ours, bytes of peak
    memory, the tolerance with which it agrees with eager, and how much it compiled."""

    name: str
    build: float
    first_call: float
    samples: tuple[float, ...]
    latency: tuple[tuple[str, float], ...]
    """Seconds by trtexec's names."""
    throughput: float
    factor: float
    peak_bytes: int | None
    tolerance: str
    coverage: str


@dataclass(frozen=True, slots=True)
class SweepFacts:
    """Items per second of each contestant where a dim has each size; a contestant may lack sizes."""

    dim: str
    rates: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]

    @property
    def sizes(self) -> list[int]:
        """All sizes."""
        return sorted({n for _, found in self.rates for n, _ in found})


@dataclass(frozen=True, slots=True)
class BenchFacts:
    """A benchmark of one model; `missing` could not run, each with the reason."""

    title: str
    made: str
    sizes: str
    threads: int
    environment: tuple[tuple[str, str], ...]
    contestants: tuple[ContestantFacts, ...]
    missing: tuple[tuple[str, str], ...]
    sweep: SweepFacts | None = None


def bench_page(facts: BenchFacts) -> str:
    """The page of a benchmark."""
    fastest = min((c.latency[2][1] for c in facts.contestants), default=0.0)
    return rendered(
        "bench.html",
        None,
        facts=facts,
        fastest=fastest,
        latencies=distribution(facts.contestants),
        over=None if facts.sweep is None else over_sizes(facts.sweep),
    )


def distribution(contestants: Sequence[ContestantFacts]) -> Plot | None:
    """The share of calls that took no longer, over seconds; the slowest hundredth is left out."""
    samples = {c.name: sorted(c.samples) for c in contestants if c.samples}
    if not samples:
        return None
    kept = {name: found[: max(2, -(-99 * len(found) // 100))] for name, found in samples.items()}
    x = Scale(0.0, max(found[-1] for found in kept.values()) * 1.05, PLOT.left, PLOT.width - PLOT.right)
    y = Scale(0.0, 1.0, PLOT.height - PLOT.bottom, PLOT.top)
    lines: list[Line] = []
    for k, (name, found) in enumerate(kept.items()):
        places = range(0, len(found), max(1, len(found) // PAGE.max_curve_points))
        points = [(x(found[0]), y(0.0)), *((x(found[i]), y((i + 1) / len(samples[name]))) for i in places)]
        lines.append(
            Line((*points, (x(found[-1]), y(len(found) / len(samples[name])))), name, f"series-{k % 4}")
        )
    return Plot(
        "latency",
        "time of a call",
        "share of calls",
        x.ticks(duration),
        y.ticks(lambda n: f"{n:.0%}", 5),
        tuple(lines),
    )


def over_sizes(sweep: SweepFacts) -> Plot | None:
    """Items per second over the size of a dim."""
    sizes, rates = sweep.sizes, [rate for _, found in sweep.rates for _, rate in found]
    if not rates:
        return None
    x = Scale(sizes[0], max(sizes[-1], sizes[0] + 1), PLOT.left, PLOT.width - PLOT.right, True)
    y = Scale(0.0, max(rates) * 1.1, PLOT.height - PLOT.bottom, PLOT.top)
    lines = tuple(
        Line(tuple((x(n), y(rate)) for n, rate in found), name, f"series-{k % 4}")
        for k, (name, found) in enumerate(sweep.rates)
        if found
    )
    ticks = tuple(Tick(x(n), str(n)) for n in sizes)
    return Plot("throughput", sweep.dim, f"{sweep.dim} / s", ticks, y.ticks(count, 5), lines)


def bench_markdown(facts: BenchFacts) -> str:
    """The tables as Markdown."""
    names = [key for key, _ in facts.contestants[0].latency] if facts.contestants else []
    columns = (
        "",
        "build",
        "first call",
        "throughput /s",
        *names,
        "time / ours",
        "peak memory",
        "tolerance against eager",
    )
    rows = [
        (
            c.name, duration(c.build), duration(c.first_call), count(c.throughput),
            *(duration(t) for _, t in c.latency), f"{c.factor:.3f}x", size(c.peak_bytes), c.tolerance,
        )
        for c in facts.contestants
    ]  # fmt: skip
    told = dict(facts.environment)
    parts = [
        f"# {_cell(facts.title)}",
        f"{_cell(told.get('cpu', ''))}, {facts.threads} threads, torch {_cell(told.get('torch', '-'))}, "
        f"tilewright {_cell(told.get('tilewright', '-'))}; {facts.made}; sizes {_cell(facts.sizes)}",
        _table(columns, rows),
    ]
    if facts.sweep is not None:
        found = {name: dict(rates) for name, rates in facts.sweep.rates}
        rows = [(str(n), *(count(rates.get(n)) for rates in found.values())) for n in facts.sweep.sizes]
        parts.append(f"{_cell(facts.sweep.dim)} per second:")
        parts.append(_table((facts.sweep.dim, *found), rows))
    parts += [f"{_cell(name)}: {_cell(reason)}" for name, reason in facts.missing]
    parts += [f"{_cell(c.name)}: {_cell(c.coverage)}" for c in facts.contestants if c.coverage]
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    marks = ("---", *("---:" for _ in columns[1:]))
    lines = [map(_cell, columns), marks, *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    """Text that Markdown shows as it is."""
    return printable(text).translate(_MARKS)


_MARKS = str.maketrans({c: f"\\{c}" for c in "\\`*_[]|#"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})
