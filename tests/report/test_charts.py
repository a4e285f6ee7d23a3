"""Plots as numbers: points stand where their figures say, ticks are round."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.report_facts import synthetic

from tilewright.report import charts
from tilewright.report.charts import Scale

(GRAPH,) = synthetic(40).graphs


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0.0, 10.0, 0, 100), [0, 2, 4, 6, 8, 10]),
        (Scale(0.0, 0.07, 0, 100), [0.0, 0.02, 0.04, 0.06]),
        (Scale(0.01, 100.0, 0, 100, True), [0.01, 0.1, 1, 10, 100]),
        (Scale(5.0, 5.0, 0, 100), [5]),
    ],
)
def test_ticks_are_round(scale: Scale, ticks: list[float]) -> None:
    assert [float(t.text) for t in scale.ticks(lambda n: f"{n:.6g}")] == pytest.approx(ticks)


def test_bytes_have_ticks_of_their_own() -> None:
    texts = [t.text for t in Scale(0.0, 3.5 * 2**20, 100, 0).byte_ticks()]
    assert texts == ["0 B", "1.0 MiB", "2.0 MiB", "3.0 MiB"]


def test_points_stand_below_the_roof_that_they_reach() -> None:
    machine = GRAPH.machine
    assert machine is not None
    at_roof = replace(
        GRAPH.steps[0], flops=1000, bytes_moved=1000, modelled=1000 / machine.bandwidth, measured=None
    )
    plot = charts.roofline(replace(GRAPH, steps=(at_roof,)))
    assert plot is not None
    (dot,), roof = plot.dots, plot.lines[0]
    (x0, y0), (x1, y1) = roof.points
    assert dot.y == pytest.approx(y0 + (y1 - y0) * (dot.x - x0) / (x1 - x0), abs=0.3)


def test_what_takes_as_long_as_modelled_stands_on_the_line() -> None:
    steps = tuple(replace(s, measured=s.modelled) for s in GRAPH.steps)
    plot = charts.agreement(replace(GRAPH, steps=steps))
    assert plot is not None and len(plot.dots) == 40
    right, up = plot.right - plot.left, plot.bottom - plot.top
    assert all(
        (d.x - plot.left) / right == pytest.approx((plot.bottom - d.y) / up, abs=1e-3) for d in plot.dots
    )


def test_without_figures_there_is_no_plot() -> None:
    steps = tuple(replace(s, modelled=None, measured=None) for s in GRAPH.steps)
    bare = replace(GRAPH, steps=steps, live_bytes=(0, 0), phases=())
    assert (charts.roofline(bare), charts.agreement(bare), charts.memory(bare)) == (None, None, None)
    assert charts.phase_bars(bare) == ()


def test_phases_fill_their_bar() -> None:
    bars = charts.phase_bars(GRAPH)
    assert sum(b.share for b in bars) == pytest.approx(1) and bars[0].x == 0
    assert all(a.x + a.width == pytest.approx(b.x, abs=0.02) for a, b in zip(bars, bars[1:], strict=False))
