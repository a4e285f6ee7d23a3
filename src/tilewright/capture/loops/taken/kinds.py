"""What each step takes another part of: kinds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class Sliced:
    """What step k reads of `base`: what lies at `first` + k * `step` along a dim."""

    base: fx.Node
    index: tuple[object, ...] | None
    """Of `base[index]`, with a full slice in the place of the number; None: `dim` is counted in `base` itself."""
    dim: int
    first: int
    step: int
    length: int | None
    """How much of the dim it takes; None: one, without the dim."""


@dataclass(frozen=True, slots=True)
class Picked:
    """What step k reads of `base`: what lies at place number k of these along a dim, without that dim."""

    base: fx.Node
    index: tuple[object, ...] | None
    """As of `Sliced`."""
    dim: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What step k reads is number k of these."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Own:
    """What step k reads is number k of these tensors of outside, which are of one type."""

    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Lifted:
    """What step k reads is part number k of a product of all that step k takes of `part`: of what `node`, of step 1, is
    one of."""

    part: Sliced | Picked | Own
    node: fx.Node


@dataclass(frozen=True, slots=True)
class Drawn:
    """What step k reads is what `node`, of step 1, would draw with chance number k."""

    node: fx.Node
    chances: tuple[float, ...]
    sizes: tuple[int | tuple[fx.Node, int], ...]
    """Of what is drawn: each a number, or of which node's value it is one, and which."""


Taken = Sliced | Picked | Own | Numbers | Lifted | Drawn
"""What each step takes another part of."""
