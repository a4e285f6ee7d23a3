"""How far rewrites of graphs look for what they need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MaskSearchLimits:
    """Predicates that are sought for a frozen mask, and patterns of masks made of data."""

    first_elements: int = 8
    """Elements of the first row that are looked at before anything is computed."""
    sample_rows: int = 256
    """Rows that suggest predicates, and that a predicate is first compared with."""
    max_pointwise_ops: int = 8
    """Pointwise ops that are looked through between one step of a pattern and the next."""


MASK_SEARCH = MaskSearchLimits()


@dataclass(frozen=True, slots=True)
class AlgebraSearchLimits:
    """Annealing of a part of a graph."""

    annealing_steps: int = 100
    """Steps of annealing for each part."""
    descent_steps: int = 32
    """Steps of a descent."""


ALGEBRA_SEARCH = AlgebraSearchLimits()


@dataclass(frozen=True, slots=True)
class DiagonalLimits:
    """Values that repeat along diagonals."""

    min_times_fewer: int = 8
    """How many times as many elements as diagonals there are at least."""
    min_nodes: int = 12
    """Nodes of an expression from which on loading its value costs less than computing it."""
    max_nodes: int = 256
    """Nodes up to which expressions are put into each other to look for such values."""


DIAGONALS = DiagonalLimits()


@dataclass(frozen=True, slots=True)
class PaddedChannelLimits:
    """Convolutions over few channels."""

    counts: tuple[int, ...] = (4, 8)
    """Numbers of halves that are copied together: 8 and 16 bytes."""


PADDED_CHANNELS = PaddedChannelLimits()
