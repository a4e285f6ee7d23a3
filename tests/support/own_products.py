"""Code of our own for products with frozen weights, as tests ask for it."""

from __future__ import annotations

import functools

from torch import Tensor

from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.own.product import ProductCalls
from tilewright.runtime.store.cache import ContentStore, default_root


@functools.cache
def products(threads: int, *, pack_lazily: bool = False) -> ProductCalls:
    """What makes calls for so many threads."""
    options = Options.make({"threads": threads})
    return ProductCalls(host_target(), ContentStore(default_root(options)), options, pack_lazily=pack_lazily)


def sizes(t: Tensor) -> tuple[dims.Expr, ...]:
    """The shape of a tensor."""
    return tuple(map(dims.integer, t.shape))
