"""`python -m benchmarks.tune --table FILE [--json FILE]`: which blocks are fastest on this device?

For each kind of kernel, several block sizes and numbers of warps are compiled and timed in turn, and the fastest
becomes an entry of the table of block sizes (`src/tilewright/tuning/<target>.json`). Cases build side by side in
processes of their own and are timed one at a time.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright
from benchmarks import gpu_clock, record
from tilewright.errors import IllegalSchedule, TilewrightError
from tilewright.runtime.cuda.device import gpu_target
from tilewright.schedule import solver, table
from tilewright.schedule.table import FastestBlock, Tuning
from tilewright.tuning.search_limits import MATMUL_BLOCKS

MEBIBYTES = 128
"""Size of the largest input."""

PER_THREAD = (2, 64)
"""Fewest and most elements of a block per thread that are tried."""

NOISE = 0.01
"""Differences of time that mean nothing."""

LARGER = 0.03
"""What a larger block may cost."""

USUAL = 12
"""Elements per thread."""

DTYPES = {2: torch.float16, 4: torch.float32}


HEADS, PLACES = 32, 4096
"""Of the attention whose products are timed."""

SHARDS = 6
"""Processes that build the candidates of a kernel with products: each takes seconds."""


@dataclass(frozen=True)
class Case:
    """One kind of kernel: a function of some tensors, and the length of its rows or of its first product's sums."""

    kind: str
    bytes: int
    length: int
    run: Callable[..., Tensor]
    odd: bool = False

    @property
    def group(self) -> str:
        """Of the cases that share an entry."""
        return f"{self.kind}-{self.bytes}-{self.length}{'-odd' if self.odd else ''}"

    @property
    def name(self) -> str:
        """For the command line."""
        return f"{self.group}-{self.run.__name__.strip('_')}"

    @property
    def multiplies(self) -> bool:
        """Whether blocks are multiplied."""
        return self.kind in ("products", "scores")

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        """Random ones; of attention queries, keys, values, and what the sums of the rows' exponentials may be."""
        dtype = DTYPES[self.bytes]
        if self.kind == "flat":
            count, length = (MEBIBYTES << 20) // self.bytes, self.length - 2 * self.odd
            places, heads = count // (HEADS * self.length), HEADS - self.odd
            shapes: list[tuple[int, ...]] = [(count // 2,)] * 2
            if self.run is _rotated:
                shapes = [(places, heads, length), *[(places, 1, length // 2)] * 2]
            elif self.run is _swapped:
                shapes = [(places, heads, length)]
            elif self.run is _shifted:
                shapes = [(count // self.length, length + self.odd), (length + self.odd,)]
            elif self.run is _halved:
                shapes = [(count // (2 * self.length), 2 * (length + self.odd))]
            return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)
        if not self.multiplies:
            rows, length = (MEBIBYTES << 20) // (self.bytes * self.length) - self.odd, self.length - self.odd
            x = torch.randn(rows, length, device=device).to(dtype)
            return (x, torch.randn(length, device=device).to(dtype)) if self.run in WEIGHTED else (x,)
        shape = (1, HEADS, PLACES, self.length)
        made = tuple(torch.randn(shape, device=device).to(dtype) for _ in range(3))
        return (*made, 8 + torch.rand(*shape[:3], 1, device=device))


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    above = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).float().masked_fill(above, -torch.inf)


def _attention(q: Tensor, k: Tensor, v: Tensor, lse: Tensor) -> Tensor:
    return torch.softmax(_scores(q, k), -1).to(v.dtype) @ v


def _statistics(q: Tensor, k: Tensor, v: Tensor, lse: Tensor) -> Tensor:
    return (_scores(q, k) - lse).exp().sum(-2)


def _normalised(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def _activated(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    return F.silu(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * w).to(x.dtype)


def _place(x: Tensor) -> Tensor:
    return x.argmax(-1)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def _total(x: Tensor) -> Tensor:
    return x.float().logsumexp(-1)


def _turned(x: Tensor) -> Tensor:
    return x.t().contiguous()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.cat(turned, -1).to(x.dtype)


def _gated(x: Tensor, y: Tensor) -> Tensor:
    return (F.silu(x.float()) * y.float()).to(x.dtype)


def _curved(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(x.float() + 1).to(x.dtype)


def _shifted(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(x + y)


def _halved(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _swapped(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


def _added(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x + y)


def _columns(x: Tensor) -> Tensor:
    return x.sum(0)


WEIGHTED = (_normalised, _activated)


def _cases() -> Iterator[Case]:
    for size, odd in product(DTYPES, (False, True)):
        yield Case("flat", size, 128, _rotated, odd)
        if odd:
            yield Case("flat", size, 4096, _shifted, odd)
            yield Case("flat", size, 4096, _halved, odd)
        else:
            yield Case("flat", size, 128, _swapped)
            for run in (_gated, _curved, _added):
                yield Case("flat", size, 4096, run)
        yield Case("square", size, 8192, _turned, odd)
        yield Case("columns", size, 4096, _columns, odd)
        for length in (1024, 4096, 8192) if odd else (256, 1024, 4096, 8192, 16384):
            for run in (_softmax, _normalised, _activated):
                yield Case("rows", size, length, run, odd)
            for run in (_place, _sum):
                yield Case("row_totals", size, length, run, odd)
        for length in (32768, 131072):
            yield Case("streams", size, length, _softmax, odd)
            yield Case("stream_totals", size, length, _total, odd)
    for size, depth in product(DTYPES, (64, 128)):
        yield Case("products", size, depth, _attention)
        yield Case("scores", size, depth, _statistics)


CASES: Mapping[str, Case] = {case.name: case for case in _cases()}


def _warps(elements: int) -> list[int]:
    fewest, most = PER_THREAD
    return [w for w in (1, 2, 4, 8, 16, 32) if fewest <= elements // (32 * w) <= most]


def candidates(case: Case) -> list[FastestBlock]:
    """What is tried for a case."""
    powers = lambda low, high: [1 << k for k in range(low, high + 1)]  # noqa: E731
    if case.multiplies:
        half = case.bytes == 2
        stages = MATMUL_BLOCKS.stages if half else (1, *MATMUL_BLOCKS.stages)
        tried = product(
            MATMUL_BLOCKS.grid_tiles,
            MATMUL_BLOCKS.streamed_tiles,
            MATMUL_BLOCKS.warps,
            stages,
            (False, True) if half else (False,),
        )
        return [FastestBlock(case.kind, case.bytes, case.length, *numbers) for numbers in tried]
    found: list[tuple[int, int, int]] = []
    match case.kind:
        case "flat":
            found = [(e, 0, 1) for e in powers(8, 13)]
        case "square":
            found = [(a * b, a, 1) for a in powers(5, 7) for b in powers(5, 7)]
        case "rows" | "row_totals":
            found = [(case.length * r, 0, 1) for r in powers(0, 4) if case.length * r <= 1 << 14]
        case "streams" | "stream_totals":
            found = [(e, 0, s) for e in powers(10, 14) for s in (1, 2)]
        case _:
            found = [
                (a * b, a, s) for a in powers(6, 10) for b in powers(3, 5) for s in (1, 3) if a * b <= 1 << 14
            ]
    return [
        FastestBlock(case.kind, case.bytes, case.length, e, lane, w, stages, odd=case.odd)
        for e, lane, stages in found
        for w in _warps(e)
    ]


def compiled(case: Case, entry: FastestBlock, inputs: tuple[Tensor, ...]) -> Callable[..., object]:
    """The case as a callable under one entry; it has run once. Raises IllegalSchedule if products cannot have it."""
    solver.table = lambda target: Tuning((entry,))
    scope: dict[str, Callable[..., Tensor]] = {"run": case.run}
    names = ", ".join("xyzw"[: len(inputs)])
    exec(f"def fresh({names}):\n    return run({names})", scope)  # Dynamo limits how often code is compiled
    options = {"strict": True} | ({"contractions": "inside"} if case.multiplies else {})
    model = tilewright.compile(scope["fresh"], inputs, options=options)
    if case.multiplies:
        wanted = f"# {entry.warps} warps, {entry.stages} stages"
        tiles = (f":grid/{entry.elements}x", f":streamedx{entry.lane} ")
        schedules = [str(kernel.schedule) for kernel in model.kernels]
        taken = len(schedules) == 1 and all(tile in schedules[0] for tile in tiles)
        if not taken or not model.kernels[0].source.startswith(wanted):
            raise IllegalSchedule("the block does not fit", law="registers and shared memory")
        if [".load([" in kernel.source for kernel in model.kernels] != [entry.descriptors]:
            raise IllegalSchedule("the machine has no descriptors", law="tensor descriptors")
    model(*inputs)
    return model


def measure(case: Case, shard: int, lock: Path) -> dict[str, object]:
    """Seconds of each candidate of a shard, and why others are none."""
    device = torch.device("cuda")
    sets = [case.inputs(device) for _ in range(2)]
    calls = {}
    refused: list[str] = []
    for entry in candidates(case)[shard :: SHARDS if case.multiplies else 1]:
        try:
            calls[json.dumps(asdict(entry))] = (compiled(case, entry, sets[0]), sets)
        except (TilewrightError, RuntimeError) as error:
            refused.append(f"{entry}: {str(error)[:100]}")
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        timed = gpu_clock.time_runs(calls, device, 15)
    seconds = {name: t.timing.median for name, t in timed.items()}
    return {"seconds": seconds, "refused": refused}


def relative(cases: Sequence[Mapping[FastestBlock, float]]) -> dict[FastestBlock, float]:
    """Of each entry that serves all cases: its time over the best one of the case, as the geometric mean."""
    shared = set.intersection(*(set(seconds) for seconds in cases))
    best = [min(seconds[e] for e in shared) for seconds in cases]
    times = {e: [seconds[e] / b for seconds, b in zip(cases, best, strict=True)] for e in shared}
    return {e: math.exp(statistics.fmean(map(math.log, ratios))) for e, ratios in times.items()}


def chosen(seconds: Mapping[FastestBlock, float]) -> FastestBlock:
    """Of the entries that are as good as the best one, that whose threads have the most usual amount of work; of nearly
    as good ones for long rows the one with most threads, as there may be few rows."""
    least = min(seconds.values())
    if next(iter(seconds)).kind in ("streams", "stream_totals"):
        near = [e for e, s in seconds.items() if s <= (1 + LARGER) * least]
        return max(near, key=lambda e: (e.warps, e.elements, -seconds[e]))
    near = [e for e, s in seconds.items() if s <= (1 + NOISE) * least]
    return min(near, key=lambda e: (abs(math.log2(e.elements / (32 * e.warps * USUAL))), seconds[e]))


def joined(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all shards of a case measured, the fastest first."""
    seconds = {name: s for part in shards for name, s in part["seconds"].items()}
    refused = [text for part in shards for text in part["refused"]]
    return {"seconds": dict(sorted(seconds.items(), key=lambda item: item[1])), "refused": refused}


def main() -> None:
    """Run all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--child", nargs=3)
    given = parser.parse_args()
    if given.child:
        name, shard, folder = given.child
        found = measure(CASES[name], int(shard), Path(folder) / "lock")
        (Path(folder) / f"{name}-{shard}.json").write_text(json.dumps(found))
        return
    start = time.time()
    names = [name for name in CASES if any(word in name for word in given.only.split(","))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.tune", "--table", str(given.table), "--child"]
        shards = [(n, str(k)) for n in names for k in range(SHARDS if CASES[n].multiplies else 1)]
        with ThreadPoolExecutor(
            os.cpu_count()
        ) as pool:  # more at once would not build faster, and take memory
            list(pool.map(lambda shard: subprocess.run([*command, *shard, folder], check=False), shards))
        found = {n: [json.loads(p.read_text()) for p in Path(folder).glob(f"{n}-*.json")] for n in names}
    results = {name: joined(parts) for name, parts in found.items() if parts}
    groups: dict[str, list[dict[FastestBlock, float]]] = {}
    for name, facts in results.items():
        order = list(facts["seconds"].items())
        print(name, *(f"{1e6 * s:.1f} us {list(json.loads(n).values())[3:]}" for n, s in order[:4]), sep="  ")
        if order:
            groups.setdefault(CASES[name].group, []).append(
                {FastestBlock(**json.loads(n)): s for n, s in order}
            )
    best = [chosen(relative(cases)) for cases in groups.values()]
    target = gpu_target(0)
    given.table.write_text(table.table(target.name).merged(best).text())
    if given.json:
        given.json.write_text(json.dumps({**record.provenance(1), "target": target.name, "cases": results}))
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
