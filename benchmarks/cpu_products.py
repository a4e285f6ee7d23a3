"""`python -m benchmarks.cpu_products --json FILE`: products of fp32 with weights on the CPU, beside eager and ONNX
Runtime.

Each is one linear layer, with a bias alone or with GELU behind it, over 128, 512 and 2048 rows. All contestants run in
turn, in one process per layer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product as choices

import torch
from torch import Tensor, nn

from benchmarks import cpu_layers

ROWS, COLUMNS, DEPTHS = (128, 512, 2048), (768, 1024, 3072), (768, 1024, 2816)


@dataclass(frozen=True)
class Product:
    """A product of `rows` by `inner` with `inner` by `columns`."""

    rows: int
    columns: int
    inner: int
    gelu: bool = False
    depth: int = 1

    def chain(self) -> nn.Module:
        """The layer."""
        linear = nn.Linear(self.inner, self.columns)
        return nn.Sequential(linear, nn.GELU()) if self.gelu else linear

    def given(self) -> Tensor:
        """An input."""
        return torch.randn(self.rows, self.inner)

    @property
    def flops(self) -> int:
        """Operations, two for each product."""
        return 2 * self.rows * self.columns * self.inner


LAYERS: Mapping[str, Product] = {
    f"{m}x{n}x{k}{' gelu' if gelu else ''}": Product(m, n, k, gelu)
    for gelu, m, n, k in choices((False, True), ROWS, COLUMNS, DEPTHS)
}


if __name__ == "__main__":
    sys.exit(cpu_layers.main("benchmarks.cpu_products", __doc__, LAYERS))
