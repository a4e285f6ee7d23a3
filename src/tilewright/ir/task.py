"""What a library call computes, as plain data: what providers need to know to offer faster forms of it.

A task says which arguments of its call are what, by their places, and no more than the program did. Which form pays,
and on which machine, is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dtype import DType
from .expr import Expr


@dataclass(frozen=True, slots=True)
class Product:
    """Argument `x` [.., K] times argument `weight` ([K, N] if `transposed`, else [N, K]), plus argument `bias` if there
    is one."""

    dtype: DType
    """Of all operands."""
    x: int
    weight: int
    bias: int | None
    transposed: bool
    x_shape: tuple[Expr, ...]
    bias_rank: int
    shape: tuple[Expr, ...]
    """Of the result."""
    scaled: bool = False
    """The product or the bias has a factor other than 1."""
    repeated: bool = False
    """It is computed in each step of a loop."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """Argument `x` [batch, channel, space...] convolved with argument `weight`, plus argument `bias`, which may be
    None. The numbers of its window have one entry per dim of space."""

    dtype: DType
    """Of all operands."""
    x: int
    weight: int
    bias: int
    x_shape: tuple[Expr, ...]
    shape: tuple[Expr, ...]
    """Of the result."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool
    uneven: tuple[tuple[int, int], ...] = ()
    """Zeros in front of and behind the image besides those of `padding`, which the call adds itself."""


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(scale * q k^T + mask) v on operands 0, 1 and 2, for q [batch, heads, queries, depth] and k and v [batch,
    heads (or fewer, shared), keys, depth]. `scale` None means 1 / sqrt(depth). `mask` is an argument by place or name,
    if there is one."""

    dtype: DType
    """Of all operands."""
    q: tuple[Expr, ...]
    k: tuple[Expr, ...]
    causal: bool
    scale: float | None
    mask: int | str | None = None


@dataclass(frozen=True, slots=True)
class Offered:
    """To be done in one of the forms that are offered under these `names`; `number` tells the choices of a graph
    apart. `key` says what of the task the shapes of operands and result do not."""

    number: int
    key: str
    names: tuple[str, ...]


Task = Product | Convolution | Attention | Offered
