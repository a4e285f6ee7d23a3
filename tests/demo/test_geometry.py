"""Geometry of the demo, against definitions written out in full."""

from __future__ import annotations

import numpy as np
import pytest
from demo.geometry import (
    Rectangle,
    components,
    hull,
    mean_inside,
    offset,
    outline,
    runs,
    smallest_rectangle,
    upright,
)


def flood(mask: np.ndarray) -> set[frozenset[tuple[int, int]]]:
    """8-connected components by flood fill."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}
    found: set[frozenset[tuple[int, int]]] = set()
    while left:
        todo, seen = [left.pop()], set()
        while todo:
            y, x = todo.pop()
            seen.add((y, x))
            for near in [(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]:
                if near in left:
                    left.remove(near)
                    todo.append(near)
        found.add(frozenset(seen))
    return found


@pytest.mark.parametrize("density", [0.0, 0.1, 0.35, 0.5, 0.8, 1.0])
def test_components_agree_with_flood_fill(density: float) -> None:
    source = np.random.default_rng(int(density * 100))
    for _ in range(20):
        mask = source.random(tuple(source.integers(1, 24, size=2))) < density
        ours = {
            frozenset((run.row, x) for run in group for x in range(run.first, run.last + 1))
            for group in components(mask)
        }
        assert ours == flood(mask)


def test_runs_at_the_borders() -> None:
    assert [
        (r.row, r.first, r.last) for r in runs(np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool))
    ] == [
        (0, 0, 1),
        (0, 3, 3),
        (2, 0, 3),
    ]


def test_outline_covers_whole_pixels() -> None:
    (group,) = components(np.ones((2, 5), bool))
    box = smallest_rectangle(outline(group))
    assert sorted([box.width, box.height]) == pytest.approx([2.0, 5.0])


def test_hull_contains_all_points_and_is_convex() -> None:
    points = np.random.default_rng(0).integers(0, 30, size=(200, 2)).astype(float)
    corners = hull(points)
    for a, b in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        d = b - a
        assert np.all(d[0] * (points[:, 1] - a[1]) - d[1] * (points[:, 0] - a[0]) >= -1e-9)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_smallest_rectangle_of_few_points(count: int) -> None:
    points = np.array([(0.0, 0.0), (3.0, 4.0), (6.0, 8.0)])[:count]
    box = smallest_rectangle(points)
    assert box.width * box.height == pytest.approx(0.0, abs=1e-9)
    assert max(box.width, box.height) == pytest.approx(5.0 * (count - 1))


@pytest.mark.parametrize("degrees", [0.0, 12.0, 45.0, 77.0, 90.0])
def test_smallest_rectangle_finds_a_turned_one(degrees: float) -> None:
    angle = np.deg2rad(degrees)
    true = Rectangle((50.0, 40.0), (float(np.cos(angle)), float(np.sin(angle))), 30.0, 8.0)
    inner = np.random.default_rng(1).random((300, 1, 4))
    inner /= inner.sum(-1, keepdims=True)
    points = np.concatenate([true.corners(), (inner @ true.corners())[:, 0]])
    box = smallest_rectangle(points)
    assert sorted([box.width, box.height]) == pytest.approx([8.0, 30.0])
    assert box.centre == pytest.approx(true.centre)


def test_smallest_rectangle_beats_every_direction() -> None:
    points = np.random.default_rng(2).normal(size=(40, 2)) * [5.0, 2.0]
    box = smallest_rectangle(points)
    for angle in np.linspace(0, np.pi, 721):
        u = points @ [np.cos(angle), np.sin(angle)]
        v = points @ [-np.sin(angle), np.cos(angle)]
        assert box.width * box.height <= np.ptp(u) * np.ptp(v) + 1e-9


def test_offset_moves_each_side_by_area_over_perimeter() -> None:
    grown = offset(Rectangle((0.0, 0.0), (1.0, 0.0), 30.0, 10.0), 1.6)
    distance = 30 * 10 * 1.6 / 80
    assert (grown.width, grown.height) == pytest.approx((30 + 2 * distance, 10 + 2 * distance))


def test_upright_orders_any_rotation_of_the_corners() -> None:
    corners = np.array([(0.0, 0.0), (10.0, 1.0), (9.0, 4.0), (-1.0, 3.0)])
    for shift in range(4):
        for turned in (np.roll(corners, shift, axis=0), np.roll(corners, shift, axis=0)[::-1]):
            assert np.array_equal(upright(turned), corners)


def test_mean_inside_a_diamond() -> None:
    values = np.zeros((9, 9), np.float32)
    values[4, 2:7] = 1.0
    diamond = np.array([(4.0, 2.0), (6.0, 4.0), (4.0, 6.0), (2.0, 4.0)])
    assert mean_inside(values, diamond) == pytest.approx(5 / 13)
    assert mean_inside(values, diamond[::-1].copy()) == pytest.approx(5 / 13)
