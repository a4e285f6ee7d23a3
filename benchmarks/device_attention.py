"""Checks of the attention cores on a GPU: lengths, types, shared heads, loud scores, rows that see nothing.

Each compiles a core once with free lengths, and once for fixed ones; each length is judged by the fp64 rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from tests.support.attention.cores import HALVES, LOUD, Guarded, deciding, free
from tests.support.fp64_rule import Tensors, built, wrong
from torch import nn

from benchmarks.attention.workloads import WORKLOADS, Sizes

Pair = tuple[int, int]

LENGTHS: tuple[Pair, ...] = (
    (1, 1), (2, 2), (17, 17), (127, 127), (129, 129), (1000, 1000), (4097, 4097),
    (1, 4097), (17, 33), (2, 129), (129, 1000), (33, 4097), (128, 4095), (512, 4608),
    (40, 25), (89, 25), (192, 64),
)  # fmt: skip
"""Queries and keys; more queries than keys are rows that see nothing."""
TYPES = (torch.float32, *HALVES)
LOUD_LENGTHS = ((17, 33), (129, 129), (129, 1000))
FEW = 1 << 16
"""Below this many scores a head several draws are judged together: few elements say little about the worst."""
MORE = 4
"""Times as many draws, the first among them, judge what these refuse: the worst of a few thousand elements is luck, of
eager's and of ours."""


def lengths(
    name: str, dtype: torch.dtype, device: str = "cuda", pairs: Sequence[Pair] = LENGTHS, depth: int = 64
) -> str:
    """Free lengths, contractions inside kernels, eight heads that share keys and values."""
    module = WORKLOADS[name]().eval()
    first = Sizes(40, 8, depth, keys=56, kv_heads=1).inputs(name, dtype=dtype, device=device)
    compiled = built(module, first, "inside", free(name))
    for queries, keys in pairs:
        sizes = Sizes(queries, 8, depth, keys=keys, kv_heads=1)
        for scale in (1.0, LOUD[dtype]) if (queries, keys) in LOUD_LENGTHS else (1.0,):
            judge(name, module, compiled, sizes, dtype, device, scale)
    return f"{len(pairs)} lengths"


def fixed(name: str, dtype: torch.dtype, device: str = "cuda", pairs: Sequence[Pair] = LENGTHS[4:7]) -> str:
    """Fixed lengths, as the compiler chooses, heads of 128 with keys of their own."""
    module = WORKLOADS[name]("bhsd").eval()
    for queries, keys in pairs:
        sizes = Sizes(queries, 2, 128, keys=keys)
        given = sizes.inputs(name, layout="bhsd", dtype=dtype, device=device)
        compiled = built(module, given, "modelled")
        for scale in (1.0, LOUD[dtype]):
            judge(name, module, compiled, sizes, dtype, device, scale)
    return f"{len(pairs)} lengths"


def guarded(dtype: torch.dtype, device: str = "cuda", pairs: Sequence[Pair] = LENGTHS) -> str:
    """A softmax that gives zeros where a query sees nothing."""
    module = Guarded().eval()
    first = Sizes(40, 4, 64, keys=56).inputs("h2o", dtype=dtype, device=device)
    compiled = built(module, first, "inside", free("h2o"))
    for queries, keys in pairs:
        judge("h2o", module, compiled, Sizes(queries, 4, 64, keys=keys), dtype, device, 1.0)
    return f"{len(pairs)} lengths"


def judge(
    name: str, module: nn.Module, compiled: Callable[..., object], sizes: Sizes, dtype: torch.dtype, device: str,
    scale: float,
) -> None:  # fmt: skip
    """The fp64 rule for one pair of lengths, over more draws where it refuses some. Raises AssertionError where it
    refuses these as well."""
    layout = getattr(module, "layout", "bshd")
    scores = sizes.queries * (sizes.keys or sizes.queries)
    count, draws, text = max(1, min(32, FEW // scores)), list[Tensors](), ""
    for more in (count, (MORE - 1) * count):
        draws += [
            sizes.inputs(name, layout=layout, dtype=dtype, device=device, scale=scale) for _ in range(more)
        ]
        text = wrong(module, compiled, draws, deciding(module))
        if not text:
            return
    raise AssertionError(f"{sizes.queries} queries, {sizes.keys} keys, scale {scale:g}: {text}")


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """All of them by name."""
    for dtype in TYPES:
        for name in WORKLOADS:
            yield f"attention-{name}-{str(dtype)[6:]}", partial(lengths, name, dtype)
            yield f"attention-{name}-{str(dtype)[6:]}-fixed", partial(fixed, name, dtype)
        yield f"attention-guarded-{str(dtype)[6:]}", partial(guarded, dtype)
