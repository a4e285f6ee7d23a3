"""`python -m benchmarks.row_folds --json FILE`: what it costs a block of a GPU to fold the rows of a tile whose columns
lie side by side in memory: each warp has rows of its own, so that every column has a part in each warp.

One block pools 49 rows of 768 columns, 256 columns in each of three steps, with more and more warps; a kernel of many
narrow blocks, and a norm of what is pooled that goes row by row, stand beside it."""

# Triton's decorated functions have no types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownMemberType=false
# pyright: reportAttributeAccessIssue=false, reportUntypedFunctionDecorator=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks import gpu_report, record
from benchmarks.call_cost import device_us
from benchmarks.record import Facts

ROWS, COLUMNS, STEP = 49, 768, 256
WARPS = (1, 2, 4, 8, 16, 32)
RUNS = 20
"""In one graph."""


@triton.jit
def tiles(x, y, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr):
    """One block, tiles of all rows."""
    a = tl.arange(0, 64)
    for start in range(0, columns, step):
        b = start + tl.arange(0, step)
        v = tl.load(x + a[:, None] * columns + b[None, :], mask=(a < rows)[:, None], other=0.0)
        tl.store(y + b, (tl.sum(v.to(tl.float32), 0) / rows).to(tl.float16))


@triton.jit
def columns_apart(x, y, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr):
    """A block for 32 columns."""
    a, b = tl.arange(0, 64), tl.program_id(0) * 32 + tl.arange(0, 32)
    v = tl.load(x + a[:, None] * columns + b[None, :], mask=(a < rows)[:, None], other=0.0)
    tl.store(y + b, (tl.sum(v.to(tl.float32), 0) / rows).to(tl.float16))


@triton.jit
def row_by_row(x, y, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr):
    """One block that adds one row after the other, and norms the sums."""
    b = tl.arange(0, 1024)
    inside = b < columns
    s = tl.full([1024], 0.0, tl.float32)
    for row in range(0, rows):
        s += tl.load(x + row * columns + b, mask=inside, other=0.0).to(tl.float32)
    s = s / rows
    d = tl.where(inside, s - tl.sum(s, 0) / columns, 0.0)
    r = tl.rsqrt(tl.sum(d * d, 0) / columns + 1e-6)
    tl.store(y + b, (d * r).to(tl.float16), mask=inside)


KERNELS: dict[str, tuple[Any, int]] = {
    "tiles of all rows, one block": (tiles, 1),
    "32 columns a block": (columns_apart, COLUMNS // 32),
    "row by row and a norm, one block": (row_by_row, 1),
}


def measure(kernel: Any, blocks: int, warps: int) -> float:
    """Microseconds of one launch, of many in a graph."""
    x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.float16)
    y = torch.empty(COLUMNS, device="cuda", dtype=torch.float16)

    def run() -> None:
        kernel[(blocks,)](x, y, ROWS, COLUMNS, STEP, num_warps=warps)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            run()
    return device_us(graph.replay, 5) / RUNS


def main(arguments: Sequence[str]) -> None:
    """Time all, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found: dict[str, Facts] = {}
    for name, (kernel, blocks) in KERNELS.items():
        found[name] = {str(warps): round(measure(kernel, blocks, warps), 2) for warps in WARPS}
        print(name, found[name], flush=True)
    if given.json is not None:
        facts = gpu_report.provenance(torch.device("cuda"), "")
        record.write_json(given.json, facts | {"us_by_warps": found})


if __name__ == "__main__":
    main(sys.argv[1:])
