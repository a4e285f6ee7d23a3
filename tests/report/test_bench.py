"""What `bench` found as a page and as Markdown: plots stand where the samples say, names are text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tilewright.report.bench import (
    BenchFacts,
    ContestantFacts,
    SweepFacts,
    bench_markdown,
    bench_page,
    distribution,
    over_sizes,
)

OURS = ContestantFacts(
    "tilewright", 1.0, 0.01, tuple(k / 1000 for k in range(1, 101)),
    tuple((name, 0.05) for name in ("min", "mean", "median", "p90", "p95", "p99")),
    20.0, 1.0, 1 << 20, "-", "all of it",
)  # fmt: skip
EAGER = replace(
    OURS, name="eager", samples=tuple(k / 500 for k in range(1, 101)), factor=2.0, peak_bytes=None
)
SWEEP = SweepFacts("batch", (("tilewright", ((1, 10.0), (8, 40.0))), ("eager", ((1, 5.0),))))
FACTS = BenchFacts(
    "model",
    "today",
    "x=2x3",
    2,
    (("cpu", "some"), ("torch", "2")),
    (OURS, EAGER),
    (("onnxruntime", "absent"),),
    SWEEP,
)


def test_half_of_the_calls_take_no_longer_than_the_median() -> None:
    plot = distribution((OURS, EAGER))
    assert plot is not None
    ours, eager = plot.lines
    middle = [x for x, y in ours.points if y <= (plot.top + plot.bottom) / 2][0]
    other = [x for x, y in eager.points if y <= (plot.top + plot.bottom) / 2][0]
    assert (other - plot.left) / (middle - plot.left) == pytest.approx(2, rel=0.05)
    assert distribution(()) is None


def test_one_sample_and_many_have_a_distribution() -> None:
    assert distribution((replace(OURS, samples=(0.1,)),)) is not None
    plot = distribution((replace(OURS, samples=tuple(k / 1e6 for k in range(1, 50_000))),))
    assert plot is not None and len(plot.lines[0].points) < 410


def test_throughput_stands_over_sizes() -> None:
    plot = over_sizes(SWEEP)
    assert plot is not None and [t.text for t in plot.across_ticks] == ["1", "8"]
    (first, second), (lone,) = (line.points for line in plot.lines)
    assert first[0] == lone[0] == plot.left and second[1] < first[1] < lone[1]
    assert over_sizes(SweepFacts("batch", (("tilewright", ()),))) is None


def test_the_page_needs_no_script() -> None:
    text = bench_page(FACTS)
    assert "<script" not in text and "script-src" not in text and "default-src &#39;none&#39;" in text
    assert "Throughput over batch" in text and "absent" in text
    assert "Throughput" not in bench_page(replace(FACTS, sweep=None)).replace("throughput", "")


HOSTILE = "</style><script>alert(1)</script>|{{7*7}}`[a](javascript:1)\u202e"


def test_hostile_names_are_text() -> None:
    facts = replace(
        FACTS, title=HOSTILE, sizes=HOSTILE, missing=((HOSTILE, HOSTILE),), sweep=replace(SWEEP, dim=HOSTILE)
    )
    facts = replace(facts, contestants=(replace(OURS, name=HOSTILE, coverage=HOSTILE),))
    text, markdown = bench_page(facts), bench_markdown(facts)
    assert "<script" not in text + markdown and "\u202e" not in text + markdown
    assert "{{7*7}}" in text and text.count("</style>") == 1
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows[:3]}) == 1


def test_markdown_has_the_same_figures() -> None:
    text = bench_markdown(FACTS)
    assert "| tilewright | 1.00 s | 10.0 ms | 20 |" in text and "| 8 | 40 | - |" in text
    assert "2.000x" in text and "onnxruntime: absent" in text
