"""Where boxes stand: nothing overlaps, nothing is hidden behind a box, and time grows like the graph."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from tilewright.report.layout import Drawing, draw
from tilewright.tuning.page_limits import LAYOUT

Edges = list[tuple[int, int]]


def chain(count: int) -> Edges:
    """One behind the other."""
    return [(k - 1, k) for k in range(1, count)]


def residual(count: int) -> Edges:
    """A chain with edges past nine steps."""
    return [*chain(count), *((k - 9, k) for k in range(9, count, 5))]


def fan(count: int) -> Edges:
    """One read by all others."""
    return [(0, k) for k in range(1, count)]


def random_edges(count: int) -> Edges:
    """Each reads some earlier ones."""
    dice = random.Random(count)
    return [(dice.randrange(k), k) for k in range(1, count) for _ in range(dice.randint(0, 2))]


GRAPHS = {f.__name__: f for f in (chain, residual, fan, random_edges)}


def overlapping(drawing: Drawing) -> list[tuple[int, int]]:
    """Pairs of boxes that touch."""
    by_row: dict[float, list[tuple[float, int]]] = {}
    for k, box in enumerate(drawing.boxes):
        by_row.setdefault(box.y, []).append((box.x, k))
    found: list[tuple[int, int]] = []
    for row in by_row.values():
        row.sort()
        found += [(a, b) for (x, a), (y, b) in zip(row, row[1:], strict=False) if y < x + LAYOUT.box_width]
    return found


def hidden(drawing: Drawing) -> list[tuple[int, int, int]]:
    """Edges that pass through a box beside which they should go down."""
    found: list[tuple[int, int, int]] = []
    for route in drawing.routes:
        low, high = sorted((drawing.boxes[route.start].y, drawing.boxes[route.end].y))
        for k, box in enumerate(drawing.boxes):
            inside = route.lane is not None and box.x < route.lane < box.x + LAYOUT.box_width
            if inside and low < box.y < high:
                found.append((route.start, route.end, k))
    return found


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("count", [0, 1, 2, 13, 200])
def test_boxes_are_apart_inside_the_drawing_and_below_what_they_read(make: str, count: int) -> None:
    edges = GRAPHS[make](count)
    drawing = draw(count, edges)
    assert len(drawing.boxes) == count and len(drawing.routes) == len(edges)
    assert not overlapping(drawing) and not hidden(drawing)
    for box in drawing.boxes:
        assert 0 <= box.x <= drawing.width - LAYOUT.box_width + 0.1
        assert 0 <= box.y <= drawing.height - LAYOUT.box_height
    assert all(drawing.boxes[a].row < drawing.boxes[b].row for a, b in edges)


def test_a_long_chain_has_the_shape_of_a_screen() -> None:
    drawing = draw(2000, chain(2000))
    assert 0.7 < drawing.width / drawing.height / LAYOUT.shape < 1.4
    assert draw(LAYOUT.min_rows, chain(LAYOUT.min_rows)).width == LAYOUT.box_width


def test_the_same_graph_is_drawn_the_same_way() -> None:
    assert draw(200, random_edges(200)) == draw(200, random_edges(200))


def seconds(count: int, edges: Sequence[tuple[int, int]]) -> float:
    """The best of three."""
    times: list[float] = []
    for _ in range(3):
        start = time.process_time()
        draw(count, edges)
        times.append(time.process_time() - start)
    return min(times)


def test_time_grows_like_the_graph() -> None:
    """Eight times as much takes no more than sixteen times as long; quadratic would be sixty-four."""
    assert seconds(8000, residual(8000)) < 16 * max(seconds(1000, residual(1000)), 0.005)
