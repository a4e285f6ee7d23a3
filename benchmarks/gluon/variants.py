"""Which forms of the hand-written kernels are compared, how each is launched and how it is built without a GPU."""

# pyright: basic
# pyright: reportMissingTypeStubs=false, reportMissingImports=false

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks.gluon import attention, products
from benchmarks.gluon.building import OPTIONS, Described, built

TILE = (128, 256, 64)
"""Rows, columns and depth of a step of a product."""

ORDER = 16
"""Rows of tiles that are gone down before the next column."""

QUERIES, DEPTH = 128, 128
"""Of a tile of attention: its rows and keys at once, and the elements of a head."""

KEPT = 1 << 25
"""Bytes of keys and values that stay in the L2 cache (50 MiB) beside all else; heads of so many are in use at once."""


@dataclass(frozen=True)
class Product:
    """A form of the product: all warps alike (`strips` = 0), or one that loads and `strips` sets that multiply; the
    slots of the ring; in how many parts a tile is written, through a buffer of that size."""

    strips: int
    slots: int
    parts: int = 1

    @property
    def described(self) -> tuple[Described, Described, Described]:
        """Blocks of A [m, k], B [n, k] and C [m, n]."""
        rows, columns, depth = TILE
        strip = rows // max(1, self.strips)
        return (
            Described((strip, depth)),
            Described((columns, depth)),
            Described((strip, columns // self.parts)),
        )

    @property
    def warps(self) -> int:
        """Of the first set that multiplies; each has 16 rows at once."""
        return 8 // max(1, self.strips)

    @property
    def function(self) -> Any:
        """The kernel."""
        return products.specialised if self.strips else products.alike

    @property
    def fixed(self) -> Mapping[str, int]:
        """Its constants."""
        known = {"SLOTS": self.slots, "ORDER": ORDER, "PARTS": self.parts}
        return known | {"STRIPS": self.strips} if self.strips else known

    def __call__(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """C = A B^T, in place of c."""
        (m, k), n = a.shape, b.shape[0]
        rows, columns = m // TILE[0], n // TILE[1]
        assert m % TILE[0] == n % TILE[1] == k % TILE[2] == 0
        descs = [described(t, d) for t, d in zip((a, b, c), self.described, strict=True)]
        grid = (min(multiprocessors(a.device), rows * columns),)
        self.function[grid](*descs, rows, columns, k, **self.fixed, num_warps=self.warps, **OPTIONS)
        return c

    def build(self) -> Any:
        """For a GPU that is not here."""
        return built(self.function, (*self.described, 1, 1, 1), self.fixed, self.warps)


@dataclass(frozen=True)
class Attention:
    """A form of attention: `strips` sets of warps share a tile's rows, starting their products in turn or not; the
    wait for a product is held behind the softmax or left to ptxas; a program goes over many tiles or has one."""

    strips: int
    turns: bool
    hold: bool = True
    persistent: bool = True
    slots: int = 2

    @property
    def described(self) -> tuple[Described, ...]:
        """Blocks of Q, K, V and the result."""
        strip, keys = Described((QUERIES // self.strips, DEPTH)), Described((QUERIES, DEPTH))
        return strip, keys, keys, strip

    @property
    def warps(self) -> int:
        """Of a set; each warp has 16 rows."""
        return QUERIES // 16 // self.strips

    def fixed(self, causal: bool, group: int) -> dict[str, int | bool]:
        """The kernel's constants."""
        form: dict[str, int | bool] = {"STRIPS": self.strips, "TURNS": self.turns, "HOLD": self.hold}
        return {"GROUP": group, "CAUSAL": causal, "SLOTS": self.slots} | form

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """The result for q, k, v [batch, heads, length, 128]."""
        batch, heads, length, depth = q.shape
        blocks, tiles = length // QUERIES, batch * heads * (length // QUERIES)
        assert depth == DEPTH and length % QUERIES == 0
        out = torch.empty_like(q)
        flat = [t.view(-1, depth) for t in (q, k, v, out)]
        descs = [described(t, d) for t, d in zip(flat, self.described, strict=True)]
        grid = (min(multiprocessors(q.device), tiles) if self.persistent else tiles,)
        scale = math.log2(math.e) / math.sqrt(depth)
        # As many heads at once as keep their keys and values in the cache, and as divide all heads.
        group = math.gcd(batch * heads, max(1, KEPT // (2 * length * depth * q.element_size())))
        fixed = self.fixed(causal, group)
        attention.attention[grid](*descs, scale, tiles, blocks, **fixed, num_warps=self.warps, **OPTIONS)
        return out

    def build(self, causal: bool) -> Any:
        """For a GPU that is not here."""
        return built(attention.attention, (*self.described, 1.0, 1, 1), self.fixed(causal, 16), self.warps)


PRODUCTS: Mapping[str, Product] = MappingProxyType(
    {
        "gluon, loads apart": Product(strips=1, slots=3),
        "gluon, loads apart, 4 slots": Product(strips=1, slots=4, parts=2),
        "gluon, loads and strips apart": Product(strips=2, slots=3),
        "gluon, loads and strips apart, 4 slots": Product(strips=2, slots=4, parts=2),
        "gluon, warps alike": Product(strips=0, slots=3),
    }
)
ATTENTIONS: Mapping[str, Attention] = MappingProxyType(
    {
        "gluon, two strips in turn": Attention(strips=2, turns=True),
        "gluon, two strips": Attention(strips=2, turns=False),
        "gluon, one strip": Attention(strips=1, turns=False),
        "gluon, two strips in turn, waits as ptxas has them": Attention(strips=2, turns=True, hold=False),
        "gluon, two strips in turn, a tile a program": Attention(strips=2, turns=True, persistent=False),
    }
)


def described(tensor: Tensor, block: Described) -> Any:
    """A descriptor of a tensor, made on the host."""
    return TensorDescriptor.from_tensor(tensor, list(block.block), block.layout)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
