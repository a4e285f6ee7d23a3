"""Where the steps of a graph stand on the page: rows by depth, folded into columns; n log n in steps and edges.

row      a step stands below all that it reads; a row that is too wide is broken
place    within a row, steps stand near what they read
column   rows fill columns, like the lines of a newspaper, so that a long chain can be seen as a whole
route    an edge to the next row is a curve; a longer one goes between rows to a lane beside those that it passes, or
         to the gutter beside the column that it ends in: no edge crosses a box
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tilewright.tuning.page_limits import LAYOUT


@dataclass(frozen=True, slots=True)
class StepBox:
    """A step: the upper left corner, and the row and column that it stands in."""

    x: float
    y: float
    row: int
    column: int


@dataclass(frozen=True, slots=True)
class Route:
    """The way of an edge. `lane` is where it goes up or down beside boxes (None: straight to its end)."""

    start: int
    end: int
    lane: float | None


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes by number, routes in the order of the edges, and the size of all."""

    boxes: tuple[StepBox, ...]
    routes: tuple[Route, ...]
    width: float
    height: float


def draw(count: int, edges: Sequence[tuple[int, int]]) -> Drawing:
    """Places of so many steps, which stand in an order in which each reads only earlier ones."""
    rows = _rows(count, edges)
    row_of = {step: r for r, steps in enumerate(rows) for step in steps}
    offsets, widths = _offsets(rows, edges, count)
    lanes = _lanes(edges, row_of, widths)
    reach = list(widths)
    for (start, _), lane in zip(edges, lanes, strict=True):
        if lane is not None:
            reach[row_of[start]] = max(reach[row_of[start]], 2 * lane)
    per_column = _rows_per_column(reach)
    columns = _columns(reach, per_column)
    boxes: list[StepBox] = []
    for step in range(count):
        column, place = divmod(row_of[step], per_column)
        x = columns[column].middle + offsets[step] - LAYOUT.box_width / 2
        boxes.append(StepBox(round(x, 1), float(place * LAYOUT.row_height), row_of[step], column))
    crossing = [0] * len(columns)
    routes: list[Route] = []
    for (start, end), lane in zip(edges, lanes, strict=True):
        column = columns[boxes[end].column]
        if boxes[start].column != boxes[end].column:
            beside = LAYOUT.lane_gap * (1 + crossing[boxes[end].column] % LAYOUT.max_gutter_lanes)
            crossing[boxes[end].column] += 1
            routes.append(Route(start, end, round(column.left - beside, 1)))
        else:
            routes.append(Route(start, end, None if lane is None else round(column.middle + lane, 1)))
    height = (min(per_column, len(rows)) - 1) * LAYOUT.row_height + LAYOUT.box_height if rows else 0.0
    width = max((c.left + c.width for c in columns), default=0.0)
    return Drawing(tuple(boxes), tuple(routes), round(width, 1), height)


@dataclass(frozen=True, slots=True)
class _Column:
    """Where a column begins, and how wide it is."""

    left: float
    width: float

    @property
    def middle(self) -> float:
        """Where its steps stand around."""
        return self.left + self.width / 2


def _columns(reach: Sequence[float], per_column: int) -> list[_Column]:
    columns: list[_Column] = []
    left = 0.0
    for first in range(0, len(reach), per_column):
        columns.append(_Column(left, max(reach[first : first + per_column])))
        left += columns[-1].width + LAYOUT.column_gap
    return columns


def _rows(count: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Steps by their depth, wide rows broken; what is tied to nothing stands behind all others."""
    depth = [0] * count
    for start, end in sorted(edges, key=lambda e: e[1]):
        depth[end] = max(depth[end], depth[start] + 1)
    tied = {step for edge in edges for step in edge}
    alone = max(depth, default=0) + 1 if tied else 0
    order = sorted(range(count), key=lambda s: (depth[s] if s in tied else alone, s))
    rows: list[list[int]] = []
    for _, group in groupby(order, key=lambda s: depth[s] if s in tied else alone):
        steps = list(group)
        rows += [steps[k : k + LAYOUT.max_row] for k in range(0, len(steps), LAYOUT.max_row)]
    return rows


def _offsets(
    rows: Sequence[Sequence[int]], edges: Sequence[tuple[int, int]], count: int
) -> tuple[list[float], list[float]]:
    """How far each step's middle is from its column's, near what it reads and without overlap; how wide each row is."""
    reads: list[list[int]] = [[] for _ in range(count)]
    for start, end in edges:
        reads[end].append(start)
    offset = [0.0] * count
    widths: list[float] = []
    pitch = LAYOUT.box_width + LAYOUT.box_gap
    for steps in rows:
        wanted = {s: sum(offset[r] for r in reads[s]) / len(reads[s]) if reads[s] else 0.0 for s in steps}
        order = sorted(steps, key=lambda s: (wanted[s], s))
        middle = sum(wanted.values()) / len(steps)
        bound = pitch * (LAYOUT.max_row - len(steps)) / 2  # no row leaves the width of the widest
        middle = max(-bound, min(bound, middle))
        for k, s in enumerate(order):
            offset[s] = middle + (k - (len(order) - 1) / 2) * pitch
        widths.append(2 * max(abs(offset[s]) for s in steps) + LAYOUT.box_width)
    return offset, widths


def _lanes(
    edges: Sequence[tuple[int, int]], row_of: dict[int, int], widths: Sequence[float]
) -> list[float | None]:
    """For each edge that passes rows, how far right of the middle it goes down; edges of one step share a lane, and
    lanes that are taken at the same row differ."""
    spans: dict[int, int] = {}
    for start, end in edges:
        if row_of[end] - row_of[start] > 1:
            spans[start] = max(spans.get(start, 0), row_of[end])
    widest = _WidestRow(widths)
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    lane: dict[int, float] = {}
    fresh = 0
    for start, last in sorted(spans.items(), key=lambda s: (row_of[s[0]], s[1])):
        first = row_of[start]
        while taken and taken[0][0] <= first:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            number = heapq.heappop(free)
        else:
            number, fresh = fresh, fresh + 1
        heapq.heappush(taken, (last, number))
        beside = widest.between(first, last + 1) / 2 + LAYOUT.box_gap
        lane[start] = beside + number % LAYOUT.max_lanes * LAYOUT.lane_gap
    return [lane[s] if row_of[e] - row_of[s] > 1 else None for s, e in edges]


class _WidestRow:
    """The widest of consecutive rows, found in constant time from maxima over powers of two."""

    def __init__(self, widths: Sequence[float]) -> None:
        self.levels = [list(widths)]
        step = 1
        while 2 * step <= len(widths):
            below = self.levels[-1]
            self.levels.append([max(below[k], below[k + step]) for k in range(len(below) - step)])
            step *= 2

    def between(self, first: int, end: int) -> float:
        """Of rows from `first` up to, and not including, `end`."""
        level = (end - first).bit_length() - 1
        return max(self.levels[level][first], self.levels[level][end - (1 << level)])


def _rows_per_column(reach: Sequence[float]) -> int:
    """So many rows that all columns together have about the shape of a screen."""
    if not reach:
        return 1
    mean = sum(reach) / len(reach) + LAYOUT.column_gap
    height = len(reach) * LAYOUT.row_height
    columns = max(1.0, (LAYOUT.shape * height / mean) ** 0.5)
    return max(LAYOUT.min_rows, -(-len(reach) // round(columns)))
