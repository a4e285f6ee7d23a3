"""How a report's page is drawn, and how much it may hold. Lengths are in pixels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayoutLimits:
    """The graph of kernels and calls."""

    box_width: int = 172
    box_height: int = 40
    box_gap: int = 20
    row_height: int = 76
    column_gap: int = 76
    lane_gap: int = 7
    max_lanes: int = 12
    """Edges that pass rows side by side, each in a lane of its own; more share."""
    max_gutter_lanes: int = 8
    """The same between two columns."""
    max_row: int = 8
    """Steps in one row."""
    min_rows: int = 9
    """Rows of a column, however many columns there are."""
    shape: float = 1.55
    """Width over height that the whole is folded to."""


@dataclass(frozen=True, slots=True)
class PageLimits:
    """What a page holds: with all of it, it stays below five megabytes for two thousand kernels."""

    max_source_bytes: int = 1 << 20
    """Bytes of all sources, packed; those of the kernels that take longest go first."""
    max_ops_characters: int = 160
    """Characters of the ops of a kernel in a table; the page has all of them beside it."""
    max_first_rows: int = 200
    """Rows of the table of steps that a browser reads with the page; its script makes the others once that is shown,
    and a browser without scripts has them in a table of their own."""
    max_plot_steps: int = 600
    """Points of a plot: those of the steps that take longest."""
    max_curve_points: int = 200
    """Points of a distribution."""
    max_compared_rows: int = 400
    """Rows of a comparison of two runs: those that differ most."""


@dataclass(frozen=True, slots=True)
class PlotLimits:
    """Plots."""

    width: int = 560
    height: int = 340
    wide: int = 1160
    """Of plots over the whole page."""
    flat: int = 200
    """Height of those."""
    left: int = 64
    right: int = 28
    top: int = 16
    bottom: int = 44
    """Room for what stands around the axes."""
    min_radius: float = 2.5
    max_radius: float = 13.0


LAYOUT = LayoutLimits()
PAGE = PageLimits()
PLOT = PlotLimits()
