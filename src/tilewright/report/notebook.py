"""What a notebook shows of a compiled model: one small table, made of what is known already."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import cast

from tilewright.tuning.text_limits import TEXTS

from .records import GraphWork, KernelRecord
from .texts import printable, shortened, size

_COLUMNS = ("graph", "kernels", "calls", "bytes moved", "largest kernel")


def table(title: str, done: object, compilations: Sequence[object]) -> str:
    """The table of a model: a row for each graph compiled so far, first the latest ones. Nothing is compiled or
    scheduled for it, and every text in it is escaped: names come from model files."""
    head = f"<strong>{_text(title)}</strong>: {_text('not compiled yet' if done is None else str(done))}"
    graphs = [cast(GraphWork, c) for c in reversed(compilations)]
    if not graphs:
        return f"<div>{head}</div>"
    rows = [_row(g) for g in graphs[: TEXTS.max_shown_graphs]]
    more = len(graphs) - len(rows)
    below = f"<div>and {more} more graphs</div>" if more > 0 else ""
    titles = "".join(f"<th>{c}</th>" for c in _COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div>{head}<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{below}</div>"


def _row(graph: GraphWork) -> Sequence[str]:
    """The cells of one graph."""
    work = (*graph.kernels, *graph.calls)
    moved = [w.bytes_moved for w in work]
    total = None if None in moved else sum(n for n in moved if n is not None)
    largest = max(graph.kernels, key=lambda k: k.bytes_moved or 0, default=None)
    return (
        _text(graph.kind), str(len(graph.kernels)), str(len(graph.calls)), size(total),
        "-" if largest is None else _kernel(largest),
    )  # fmt: skip


def _kernel(kernel: KernelRecord) -> str:
    return f"{_text(kernel.name)} ({_text(', '.join(kernel.ops))}), {size(kernel.bytes_moved)}"


def _text(text: str) -> str:
    return escape(printable(shortened(" ".join(text.split()), TEXTS.max_place_characters)))
