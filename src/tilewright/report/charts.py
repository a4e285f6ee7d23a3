"""Plots as numbers: where each point, line and tick of an SVG stands. Templates write them down."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.tuning.page_limits import PAGE, PLOT

from .facts import GraphFacts, StepFacts
from .texts import count, duration, size


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of an axis, at a place in pixels."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """A point of a plot: its place, its radius, the step it stands for, and what a pointer is told of it."""

    x: float
    y: float
    radius: float
    step: int
    kernel: bool
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points, and what it is."""

    points: tuple[tuple[float, float], ...]
    text: str
    kind: str = ""

    @property
    def path(self) -> str:
        """As an SVG path."""
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in self.points)


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of fixed size; `left`, `top`, `right` and `bottom` bound what lies inside its axes."""

    name: str
    across: str
    up: str
    across_ticks: tuple[Tick, ...]
    up_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...] = ()
    dots: tuple[PlotPoint, ...] = ()
    width: int = PLOT.width
    height: int = PLOT.height

    left = PLOT.left
    top = PLOT.top

    @property
    def right(self) -> int:
        """Where the axes end."""
        return self.width - PLOT.right

    @property
    def bottom(self) -> int:
        """Where the lower axis is."""
        return self.height - PLOT.bottom


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers to pixels."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, number: float) -> float:
        """The place of a number, within the ends."""
        low, high = self.low, self.high
        if self.logarithmic:
            number, low, high = (math.log10(max(n, 1e-300)) for n in (number, low, high))
        share = (number - low) / (high - low) if high > low else 0.5
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

    def ticks(self, text: Callable[[float], str], most: int = 6) -> tuple[Tick, ...]:
        """Round numbers between the ends: powers of ten, or steps of 1, 2 or 5 of them."""
        return tuple(Tick(self(n), text(n)) for n in self._round(most))

    def byte_ticks(self) -> tuple[Tick, ...]:
        """At most five round numbers of bytes, KiB, MiB or GiB."""
        unit = 1024 ** max(0, math.floor(math.log(max(self.high, 1.0), 1024)))
        scaled = Scale(self.low / unit, self.high / unit, self.start, self.end)
        return scaled.ticks(lambda n: size(n * unit), 4)

    def _round(self, most: int) -> list[float]:
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            each = max(1, -(-(last - first + 1) // most))
            return [10.0**k for k in range(first, last + 1, each)]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        unit = 10 ** math.floor(math.log10(span / most))
        step = next(unit * k for k in (1, 2, 5, 10, 20) if span / (unit * k) <= most)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _scales(xs: Sequence[float], ys: Sequence[float], *, logarithmic: bool = True) -> tuple[Scale, Scale]:
    def ends(numbers: Sequence[float]) -> tuple[float, float]:
        if logarithmic:
            return 10 ** math.floor(math.log10(min(numbers))), 10 ** math.ceil(
                math.log10(max(numbers)) + 1e-9
            )
        return 0.0, max(numbers) or 1.0

    plot = Plot("", "", "", (), ())
    (x0, x1), (y0, y1) = ends(xs), ends(ys)
    return (
        Scale(x0, x1, plot.left, plot.right, logarithmic),
        Scale(y0, y1, plot.bottom, plot.top, logarithmic),
    )


def _largest(graph: GraphFacts) -> list[tuple[int, StepFacts]]:
    """The steps that take longest, in order, with their numbers."""
    steps = [(k, s) for k, s in enumerate(graph.steps) if s.seconds]
    steps.sort(key=lambda each: (-(each[1].seconds or 0.0), each[0]))
    return sorted(steps[: PAGE.max_plot_steps], key=lambda each: each[0])


def _radius(step: StepFacts, total: float) -> float:
    """Areas go with shares of the time."""
    share = (step.seconds or 0.0) / total if total else 0.0
    return round(PLOT.min_radius + (PLOT.max_radius - PLOT.min_radius) * share**0.5, 1)


def roofline(graph: GraphFacts) -> Plot | None:
    """Operations per byte against operations per second, below what the machine allows; None without any figures."""
    machine = graph.machine
    found = [
        (k, s, s.flops / s.bytes_moved, s.flops / s.seconds)
        for k, s in _largest(graph)
        if s.flops and s.bytes_moved and s.seconds
    ]
    if machine is None or not machine.bandwidth or not machine.flops or not found:
        return None
    total = graph.seconds
    ridge = machine.flops / machine.bandwidth
    xs = [x for *_, x, _ in found] + [ridge / 4, ridge * 4]
    x, y = _scales(xs, [y for *_, y in found] + [machine.flops])
    knee = x(ridge), y(machine.flops)
    lines = (
        Line((_start(x, y, machine.bandwidth), knee), f"memory: {size(machine.bandwidth)}/s", "roof"),
        Line((knee, (x.end, y(machine.flops))), f"{count(machine.flops, 'flop/s')}", "roof"),
    )
    if machine.cache_bandwidth:
        cached = x(machine.flops / machine.cache_bandwidth), y(machine.flops)
        told = f"cache: {size(machine.cache_bandwidth)}/s"
        lines += (Line((_start(x, y, machine.cache_bandwidth), cached, knee), told, "faint"),)
    dots = tuple(
        PlotPoint(
            x(a),
            y(b),
            _radius(s, total),
            k,
            s.is_kernel,
            f"{s.name}: {a:.3g} flop/byte, {count(b, 'flop/s')}",
        )
        for k, s, a, b in found
    )
    return Plot(
        "roofline", "flop per byte moved", "flop/s", x.ticks(lambda n: f"{n:g}"), y.ticks(count), lines, dots
    )


def _start(x: Scale, y: Scale, bandwidth: float) -> tuple[float, float]:
    """Where the line of a bandwidth enters a plot."""
    first = max(x.low, y.low / bandwidth)
    return x(first), y(first * bandwidth)


def agreement(graph: GraphFacts) -> Plot | None:
    """Modelled against measured seconds; None where nothing was measured."""
    found = [(k, s, s.modelled, s.measured) for k, s in _largest(graph) if s.modelled and s.measured]
    if not found:
        return None
    total = graph.seconds
    ends = [n for _, _, a, b in found for n in (a, b)]
    x, y = _scales(ends, ends)

    def line(factor: float, text: str, kind: str) -> Line:
        low, high = max(x.low, y.low / factor), min(x.high, y.high / factor)
        return Line(((x(low), y(low * factor)), (x(high), y(high * factor))), text, kind)

    lines = (
        line(1.0, "as modelled", "roof"),
        line(2.0, "twice as long", "faint"),
        line(0.5, "half", "faint"),
    )
    dots = tuple(
        PlotPoint(
            x(a),
            y(b),
            _radius(s, total),
            k,
            s.is_kernel,
            f"{s.name}: modelled {duration(a)}, measured {duration(b)}",
        )
        for k, s, a, b in found
    )
    return Plot("agreement", "modelled", "measured", x.ticks(duration), y.ticks(duration), lines, dots)


def memory(graph: GraphFacts) -> Plot | None:
    """Bytes of intermediate tensors while each step runs; None where they are not known, or there are none."""
    live = graph.live_bytes
    if not any(live):
        return None
    x = Scale(0.0, float(len(live)), PLOT.left, PLOT.wide - PLOT.right)
    y = Scale(0.0, float(max(live)), PLOT.flat - PLOT.bottom, PLOT.top)
    points: list[tuple[float, float]] = [(x(0), y(0))]
    for k, held in enumerate(live):
        points += [(x(k), y(held)), (x(k + 1), y(held))]
    points.append((x(len(live)), y(0)))
    ticks = tuple(t for t in x.ticks(lambda n: f"{n:g}", 12) if "." not in t.text)
    line = Line(tuple(points), "intermediate tensors and results", "area")
    return Plot(
        "memory", "kernels and calls, in order", "bytes", ticks, y.byte_ticks(), (line,), (),
        PLOT.wide, PLOT.flat,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a bar: where it begins, how wide it is, of which it is a share."""

    name: str
    seconds: float
    x: float
    width: float
    share: float


def phase_bars(graph: GraphFacts) -> tuple[Bar, ...]:
    """The phases one behind the other, to scale."""
    total = sum(p.seconds for p in graph.phases)
    bars: list[Bar] = []
    before = 0.0
    for p in graph.phases if total > 0 else ():
        share = p.seconds / total
        bars.append(Bar(p.name, p.seconds, round(before * PLOT.wide, 2), round(share * PLOT.wide, 2), share))
        before += share
    return tuple(bars)
