"""Plane geometry for text boxes, with numpy only.

Points are float64 arrays [..., 2] of (x, y) in pixels, y downwards. A box is [4, 2]: corners in order along
the outline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Run:
    """A maximal horizontal stretch of set pixels: row, first column, last column (inclusive)."""

    row: int
    first: int
    last: int


def runs(mask: Mask) -> tuple[Run, ...]:
    """All runs of a mask [h, w], row by row, left to right."""
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    rows, firsts = np.nonzero(edges == 1)
    _, ends = np.nonzero(edges == -1)
    return tuple(Run(int(r), int(f), int(e) - 1) for r, f, e in zip(rows, firsts, ends, strict=True))


def components(mask: Mask) -> tuple[tuple[Run, ...], ...]:
    """The 8-connected components of a mask [h, w], each as its runs, in order of their first pixel.

    Union-find over runs: two runs of neighbouring rows touch if their column ranges, widened by one, overlap.
    """
    items = runs(mask)
    parent = list(range(len(items)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    above = 0  # the first run that can still touch the current one
    for i, run in enumerate(items):
        while items[above].row < run.row - 1 or (
            items[above].row == run.row - 1 and items[above].last < run.first - 1
        ):
            above += 1
        j = above
        while j < i and items[j].row == run.row - 1 and items[j].first <= run.last + 1:
            a, b = root(i), root(j)
            parent[max(a, b)] = min(a, b)
            j += 1
    groups: dict[int, list[Run]] = {}
    for i, run in enumerate(items):
        groups.setdefault(root(i), []).append(run)
    return tuple(tuple(group) for group in groups.values())


def outline(group: tuple[Run, ...]) -> Points:
    """Points [4 n, 2] whose hull is that of the component's pixels, squares of side 1 about (x, y)."""
    return np.array(
        [(x, run.row + dy) for run in group for x in (run.first - 0.5, run.last + 0.5) for dy in (-0.5, 0.5)]
    )


def hull(points: Points) -> Points:
    """The convex hull of [n, 2] points, without repeated or collinear points (Andrew's monotone chain)."""
    ordered = np.unique(np.asarray(points, dtype=np.float64), axis=0)
    if len(ordered) <= 2:
        return ordered

    def chain(sequence: Points) -> list[tuple[float, float]]:
        kept: list[tuple[float, float]] = []
        for x, y in sequence.tolist():
            while len(kept) >= 2:
                (ax, ay), (bx, by) = kept[-2], kept[-1]
                if (bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0:
                    break
                kept.pop()
            kept.append((x, y))
        return kept[:-1]

    return np.array(chain(ordered) + chain(ordered[::-1]), dtype=np.float64)


@dataclass(frozen=True)
class Rectangle:
    """A rectangle in any direction: centre, unit vector along `width`, and the two side lengths."""

    centre: tuple[float, float]
    direction: tuple[float, float]
    width: float
    height: float

    def corners(self) -> Points:
        """The four corners [4, 2], along the outline from (-width, -height)."""
        along = np.array(self.direction) * self.width / 2
        across = np.array([-self.direction[1], self.direction[0]]) * self.height / 2
        middle = np.array(self.centre)
        return np.stack(
            [
                middle - along - across,
                middle + along - across,
                middle + along + across,
                middle - along + across,
            ]
        )

    def grown(self, distance: float) -> Rectangle:
        """The smallest rectangle around the outline moved outwards by `distance` with rounded corners."""
        return Rectangle(self.centre, self.direction, self.width + 2 * distance, self.height + 2 * distance)


def smallest_rectangle(points: Points) -> Rectangle:
    """The rectangle of least area around [n, 2] points, n >= 1.

    One of its sides lies on an edge of the hull (the theorem behind rotating calipers), so each edge's
    direction is tried; all at once, since hulls here have a few dozen edges.
    """
    corners = hull(points)
    if len(corners) == 1:
        return Rectangle((float(corners[0, 0]), float(corners[0, 1])), (1.0, 0.0), 0.0, 0.0)
    edges = np.roll(corners, -1, axis=0) - corners
    along = edges / np.linalg.norm(edges, axis=1, keepdims=True)
    across = np.stack([-along[:, 1], along[:, 0]], axis=1)
    u, v = along @ corners.T, across @ corners.T
    low_u, high_u, low_v, high_v = u.min(1), u.max(1), v.min(1), v.max(1)
    best = int(np.argmin((high_u - low_u) * (high_v - low_v)))
    centre = along[best] * (low_u[best] + high_u[best]) / 2 + across[best] * (low_v[best] + high_v[best]) / 2
    width, height = float(high_u[best] - low_u[best]), float(high_v[best] - low_v[best])
    return Rectangle(
        (float(centre[0]), float(centre[1])), (float(along[best, 0]), float(along[best, 1])), width, height
    )


def offset(rectangle: Rectangle, ratio: float) -> Rectangle:
    """Move the outline outwards by area * ratio / perimeter, the rule of differentiable binarisation (DB)."""
    perimeter = 2 * (rectangle.width + rectangle.height)
    distance = 0.0 if perimeter == 0 else rectangle.width * rectangle.height * ratio / perimeter
    return rectangle.grown(distance)


def upright(corners: Points) -> Points:
    """Reorder a box's corners: top left, top right, bottom right, bottom left, as a reader holding the page
    sees them.
    """
    by_x = corners[np.argsort(corners[:, 0], kind="stable")]
    left, right = by_x[:2], by_x[2:]
    top_left, bottom_left = left[np.argsort(left[:, 1], kind="stable")]
    top_right, bottom_right = right[np.argsort(right[:, 1], kind="stable")]
    return np.stack([top_left, top_right, bottom_right, bottom_left])


def mean_inside(values: NDArray[np.float32], corners: Points) -> float:
    """The mean of a map [h, w] over the pixels whose centres lie in the convex box; 0 if there are none."""
    h, w = values.shape
    x0, y0 = np.clip(np.floor(corners.min(0)).astype(int), 0, [w - 1, h - 1])
    x1, y1 = np.clip(np.ceil(corners.max(0)).astype(int), 0, [w - 1, h - 1])
    ys, xs = np.mgrid[y0 : y1 + 1, x0 : x1 + 1]
    sides = np.roll(corners, -1, axis=0) - corners
    cross = [s[0] * (ys - c[1]) - s[1] * (xs - c[0]) for s, c in zip(sides, corners, strict=True)]
    inside = np.all(np.stack(cross) >= -1e-9, axis=0) | np.all(np.stack(cross) <= 1e-9, axis=0)
    return float(values[y0 : y1 + 1, x0 : x1 + 1][inside].mean()) if inside.any() else 0.0
