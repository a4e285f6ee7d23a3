"""Facts as one HTML file that opens offline: nothing in it comes from outside, and nothing of a model is code.

Style and script stand in the page under a policy that names their hashes, so that nothing else runs. The script reads
its data from an element that no browser runs, and writes names as text alone; templates escape what they print."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tilewright.tuning.page_limits import LAYOUT, PAGE

from . import charts, texts
from .compare import RunComparison, compared
from .facts import GraphFacts, ReportFacts
from .layout import draw

TEMPLATES = Path(__file__).parent / "templates"
STYLE = "page.css"
SCRIPT = ("numbers.js", "drawing.js", "page.js")
"""One behind the other."""
Plain = None | bool | int | float | str | Sequence["Plain"] | Mapping[str, "Plain"]


@dataclass(frozen=True, slots=True)
class GraphView:
    """One graph as the page shows it."""

    graph: GraphFacts
    roofline: charts.Plot | None
    agreement: charts.Plot | None
    memory: charts.Plot | None
    phases: tuple[charts.Bar, ...]
    against: RunComparison | None


def page(facts: ReportFacts, against: ReportFacts | None = None) -> str:
    """The page of a report, beside an earlier one if there is one. Equal facts have equal pages."""
    others = {g.title: g for g in against.graphs} if against is not None else {}
    views = [
        GraphView(
            g,
            charts.roofline(g),
            charts.agreement(g),
            charts.memory(g),
            charts.phase_bars(g),
            compared(others[g.title], g) if g.title in others else None,
        )
        for g in facts.graphs
    ]
    return rendered("report.html", _data(facts), facts=facts, views=views, earlier=against)


def rendered(template: str, data: Plain, **values: object) -> str:
    """A template with style in it, and a script with its data unless there is none."""
    style, script = _read(STYLE), None if data is None else "".join(map(_read, SCRIPT))
    return (
        _environment()
        .get_template(template)
        .render(
            style=style,
            script=script,
            policy=policy(style, script),
            data=json_in_html(data),
            most_ops=PAGE.max_ops_characters,
            most_rows=PAGE.max_first_rows,
            most_dots=PAGE.max_plot_steps,
            **values,
        )
    )


def policy(style: str, script: str | None) -> str:
    """What a browser may do with the page: use this style and run this script, and nothing else."""
    texts_of = {"style": style} | ({} if script is None else {"script": script})
    allowed = (f"{kind}-src '{_digest(text)}'" for kind, text in texts_of.items())
    return "; ".join(("default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"))


def json_in_html(data: Plain) -> str:
    """Data as JSON that ends no element and begins no tag, wherever it is read."""
    text = json.dumps(_clean(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for c in "<>&\u2028\u2029":
        text = text.replace(c, f"\\u{ord(c):04x}")
    return text


def packed(sources: Mapping[int, str]) -> tuple[str, int]:
    """Texts by number as JSON, packed by gzip and written in base64, as many as a page may hold; and how many."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [packer.compress(b"{")]
    held, number = 0, 0
    for key, text in sources.items():
        if held > PAGE.max_source_bytes:
            break
        entry = (
            f"{',' if number else ''}{json.dumps(str(key))}:{json.dumps(texts.printable(text, lines=True))}"
        )
        parts.append(packer.compress(entry.encode()))
        parts.append(packer.flush(zlib.Z_SYNC_FLUSH))
        held += len(parts[-2]) + len(parts[-1])
        number += 1
    parts += [packer.compress(b"}"), packer.flush()]
    return base64.b64encode(b"".join(parts)).decode("ascii"), number


def _data(facts: ReportFacts) -> Plain:
    wanted: dict[int, float] = {}
    for g in facts.graphs:
        for s in g.steps:
            if s.source is not None:
                wanted[s.source] = wanted.get(s.source, 0.0) + (s.seconds or 0.0)
    order = sorted(wanted, key=lambda k: (-wanted[k], k))
    sources, kept = packed({k: facts.sources[k] for k in order})
    return {
        "graphs": [_graph_data(g) for g in facts.graphs],
        "sources": sources,
        "kept": kept == len(order),
        "mostOps": PAGE.max_ops_characters,
        "box": [LAYOUT.box_width, LAYOUT.box_height],
    }


def _graph_data(g: GraphFacts) -> Plain:
    between = [e for e in g.edges if e.start is not None and e.end is not None and e.start < e.end]
    drawing = draw(len(g.steps), [(e.start or 0, e.end or 0) for e in between])
    lanes = {(r.start, r.end): r.lane for r in drawing.routes}
    return {
        "title": g.title,
        "seconds": g.seconds,
        "size": [drawing.width, drawing.height],
        "machine": None if g.machine is None else [g.machine.bandwidth, g.machine.flops],
        "boxes": [[b.x, b.y, b.row, b.column] for b in drawing.boxes],
        "edges": [
            [e.start, e.end, e.tensor, e.bytes, e.level, lanes.get((e.start, e.end))]  # pyright: ignore[reportArgumentType, reportCallIssue]
            for e in g.edges
        ],
        "steps": list(_steps_data(g)),
    }


def _steps_data(g: GraphFacts) -> Iterator[Plain]:
    for s in g.steps:
        yield {
            "name": s.name, "how": s.how, "ops": list(s.ops), "moved": s.bytes_moved, "bound": s.bytes_lower_bound,
            "flops": s.flops, "exps": s.exps, "modelled": s.modelled, "measured": s.measured, "ends": s.boundary,
            "reason": s.reason, "schedule": s.schedule, "source": s.source, "results": list(s.results),
            "notes": list(s.notes), "kept": s.kept, "keptBytes": s.kept_bytes, "looped": s.looped,
        }  # fmt: skip


def _finalized(value: object) -> object:
    """What a template prints: text without what shows nothing or turns its surroundings round, but for our own."""
    return texts.printable(value, lines=True) if type(value) is str else value


def _clean(data: Plain) -> Plain:
    if isinstance(data, str):
        return texts.printable(data, lines=True)
    if isinstance(data, Mapping):
        return {texts.printable(k): _clean(v) for k, v in data.items()}
    if isinstance(data, Sequence):
        return [_clean(v) for v in data]
    return data


@functools.cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_finalized,
    )
    cast("dict[str, object]", found.filters).update(
        {
            "size": texts.size,
            "duration": texts.duration,
            "count": texts.count,
            "percent": texts.percent,
            "ratio": texts.ratio,
            "shortened": texts.shortened,
        }
    )
    return found


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
