"""`python -m benchmarks.model_fit --json FILE [--device cuda] [--budget SECONDS]`: does the model know
what kernels cost?

Kernels over sizes from what a core's cache holds to what memory must give, each compiled by itself: on the CPU every
launch has the clock of `explain --time`, on a GPU graphs of kernels are replayed over cold inputs. Beside them, with
`--products FILE` (what `benchmarks.gemm` wrote) and `--convolutions FILE` (`benchmarks.convolutions`), schedules that
were timed there, priced by today's model; these need no GPU. Of each kind, and of all: Spearman's correlation of
ranks, the median of |modelled / measured - 1|, and the floor of a launch as the figures have it beside the one of the
model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import tilewright
from benchmarks import convolutions, gemm, gpu_clock, gpu_report, kernels, record
from benchmarks.record import Facts
from tilewright import measure
from tilewright.errors import IllegalSchedule
from tilewright.options import Options
from tilewright.partition.products import ProductWay
from tilewright.pipeline.compiler import Compiled, watch_compilations
from tilewright.pipeline.product_ways import ProductKernels, beside_product, kernels_of
from tilewright.report.records import Compiled as Reported
from tilewright.report.taken import explained_steps
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.cuda.device import gpu_target
from tilewright.runtime.plan.clocked import StepClock, clocked
from tilewright.runtime.plan.executable import Executable
from tilewright.schedule.solver import Solver
from tilewright.target import Target, preset

SIZES = tuple(1 << k for k in range(14, 27))
"""Bytes of the largest tensor."""
ROWS = (16, 32, 64, 96, 128)
"""Of products that are small enough to be kernels on a CPU."""

WARM, CALLS = 3, 15
"""Calls before and while steps are timed."""
ROUNDS = 15
WANTED = (0.9, 0.25)
"""Spearman's correlation at least, and the median error at most."""

Tensors = tuple[Tensor, ...]
Program = Callable[..., object]


@dataclass(frozen=True)
class Pair:
    """What the model says of a kernel, and what a clock does, in seconds."""

    kind: str
    name: str
    modelled: float
    measured: float

    def facts(self) -> Facts:
        """As it is recorded."""
        told = {"modelled_us": round(self.modelled * 1e6, 3), "measured_us": round(self.measured * 1e6, 3)}
        return {"kind": self.kind, "name": self.name, **told}


def _two(size: int) -> Tensors:
    return torch.randn(size // 4), torch.randn(size // 4)


def _rows(size: int) -> Tensors:
    return (torch.randn(max(1, size // 4096), 1024),)


MORE: Mapping[str, tuple[Program, Callable[[int], Tensors]]] = {
    "sum and ReLU": (lambda x, y: torch.relu(x + y), _two),
    "gate": (lambda x, y: F.silu(x) * y, _two),
    "joined": (lambda x, y: torch.cat((x, y * 2)), _two),
    "row totals": (lambda x: x.sum(-1), _rows),
    "row maxima": (lambda x: x.amax(-1), _rows),
    "log-sum-exp": (lambda x: torch.logsumexp(x, -1), _rows),
    "log-softmax": (lambda x: torch.log_softmax(x, -1), _rows),
    "norms": (lambda x: x / x.norm(dim=-1, keepdim=True), _rows),
}


def programs(device: torch.device) -> Iterator[tuple[str, str, Program, Tensors]]:
    """Kind, name, function and inputs of what is timed: one size of all kinds after the other, so that a budget that
    ends early leaves out sizes and no kind."""
    seen: set[tuple[str, tuple[torch.Size, ...]]] = set()
    for size in SIZES:
        made: list[tuple[str, Program, Tensors]] = [
            *((name, case.function, case.inputs(size)) for name, case in kernels.CASES.items()),
            *((name, run, inputs(size)) for name, (run, inputs) in MORE.items()),
        ]
        for kind, run, given in made:
            key = kind, tuple(t.shape for t in given)
            if key in seen:
                continue  # the smallest of its kind stands for smaller sizes
            seen.add(key)
            yield kind, f"{kind}, {size} bytes", run, tuple(t.to(device) for t in given)
    for rows in ROWS if device.type == "cpu" else ():
        for columns in ROWS:
            x, w = torch.randn(rows, columns), torch.randn(rows, columns)
            yield "small products", f"{rows}x{columns}x{rows}", lambda x, w: F.gelu(F.linear(x, w)), (x, w)


def on_cpu(kind: str, name: str, run: Program, inputs: Tensors) -> list[Pair]:
    """Each launch of a program that has no calls, by the clock around its steps."""
    clocks: list[StepClock] = []

    def watched(
        gm: fx.GraphModule, frozen: Mapping[str, Tensor], done: Compiled, options: Options
    ) -> Compiled:
        del gm, frozen, options
        if type(done.executable) is not Executable:
            return done
        runs, clock = clocked(done.executable)
        clocks.append(clock)
        return Compiled(runs, done.compilation)

    with watch_compilations(watched):
        made = tilewright.compile(kernels.Kernel(run), inputs, options={"measure": False})  # type: ignore[arg-type]
    graphs = cast("Reported", made).compilations
    if len(graphs) != 1 or len(clocks) != 1:
        return []
    for count in (WARM, CALLS):
        clocks[0].forget()
        for _ in range(count):
            made(*inputs)
    steps = [s for s in explained_steps(graphs[0], clocks[0]) if s.is_kernel]
    return [
        Pair(kind, name, step.record.seconds, step.measured)
        for step in steps
        if step.record.seconds and step.measured
    ]


def on_gpu(kind: str, name: str, run: Program, inputs: Tensors, device: torch.device) -> list[Pair]:
    """A program that is one kernel, replayed over cold inputs."""
    made = tilewright.compile(kernels.Kernel(run), inputs, options={"tune_seconds": 0})  # type: ignore[arg-type]
    graphs = cast("Reported", made).compilations
    found = [kernel for graph in graphs for kernel in graph.kernels]
    if len(found) != 1 or any(graph.calls for graph in graphs) or not found[0].seconds:
        return []
    sets = [inputs]
    needed = gpu_clock.sets_needed(sum(t.nbytes for t in inputs), device)
    sets += [tuple(t.clone() for t in inputs) for _ in range(needed - 1)]
    timed = gpu_clock.time_runs({name: (made, sets)}, device, ROUNDS)[name]
    return [Pair(kind, name, found[0].seconds, timed.timing.median)]


def timed_pairs(device: torch.device, seconds: float) -> Iterator[Pair]:
    """All programs, as far as the time goes."""
    end = time.monotonic() + seconds
    for kind, name, run, inputs in programs(device):
        if time.monotonic() > end:
            print(f"no time is left for {name} and what stands behind it", file=sys.stderr)
            return
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
        with torch.no_grad():
            if device.type == "cpu":
                yield from on_cpu(kind, name, run, inputs)
            else:
                yield from on_gpu(kind, name, run, inputs, device)
                gpu_clock.release(device)


def recorded_pairs(path: Path, target: Target) -> Iterator[Pair]:
    """Schedules of products that `benchmarks.gemm` timed, priced by today's model."""
    for name, facts in json.loads(path.read_text())["shapes"].items():
        shape = gemm.Shape(facts["m"], facts["k"], facts["n"])
        given = [torch.empty(rows, shape.k, dtype=torch.float16) for rows in (shape.m, shape.n)]
        graph, kernel = gemm.captured(gemm.multiplied, given)
        solver = Solver(target, Options())
        for tried in facts["schedules"].values():
            if "median_us" not in tried or "wrong" in tried:
                continue
            try:
                found = solver.read_solution(kernel, graph.layouts, tried["schedule"], 0.0)
            except (ValueError, IllegalSchedule):
                continue  # today's kernels have other classes
            seconds = solver.scheduler.tile_seconds(found.form, found.schedule, target, solver.hints)
            yield Pair("products", name, seconds, tried["median_us"] * 1e-6)


def recorded_convolutions(path: Path, target: Target) -> Iterator[Pair]:
    """Ways of convolutions that `benchmarks.convolutions` timed, priced by today's model: whole sums, sums in parts and
    over padded channels, with the kernels in front and behind."""
    solver = Solver(target, Options())
    for name, facts in json.loads(path.read_text())["layers"].items():
        layer, batch = convolutions.row(name)
        graph, kernel = convolutions.kernel_of(layer, batch)
        known: dict[ProductWay, tuple[ProductKernels, float]] = {}
        for label, told in facts["ways"].items():
            if "median_us" not in told:
                continue
            way = convolutions.way_of(label)
            if way not in known:
                made = kernels_of(kernel, graph.layouts, way, graph.fresh_id())
                assert made is not None, "it was timed"
                known[way] = made, beside_product(made, {**graph.layouts, **made.between}, solver)
            made, beside = known[way]
            layouts = {**graph.layouts, **made.between}
            try:
                text = facts["kernels"][label]["schedule"]
                found = solver.read_solution(made.kernels[0], layouts, text, 0.0)
            except (ValueError, IllegalSchedule):
                continue  # today's kernels have other classes
            seconds = solver.scheduler.tile_seconds(found.form, found.schedule, target, solver.hints)
            yield Pair("convolutions", f"{name} {label}", seconds + beside, told["median_us"] * 1e-6)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of ranks; equal values share theirs. 0 where one side is constant."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, place, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[place]

    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size else 0.0


def fit(pairs: Sequence[Pair], launch: float) -> Facts:
    """How well the model knows some kernels. `floor_us` and `scale` are those with which floor + scale * (modelled less
    its own floor) comes nearest to what was measured, relative to that."""
    modelled, measured = [p.modelled for p in pairs], [p.measured for p in pairs]
    made: Facts = {
        "kernels": len(pairs),
        "spearman": round(spearman(modelled, measured), 4),
        "median_error": round(
            statistics.median(abs(m / t - 1) for m, t in zip(modelled, measured, strict=True)), 4
        ),
        "median_ratio": round(statistics.median(m / t for m, t in zip(modelled, measured, strict=True)), 4),
    }
    if len(pairs) > 2:
        rows = np.array([[1 / t, max(0.0, m - launch) / t] for m, t in zip(modelled, measured, strict=True)])
        floor, scale = _no_less_than_nothing(rows)
        made |= {"floor_us": round(float(floor) * 1e6, 3), "scale": round(float(scale), 4)}
    return made


def _no_less_than_nothing(rows: np.ndarray) -> tuple[float, float]:
    """The two factors of least squares for ones, without a floor below nothing."""
    ones = np.ones(len(rows))
    (floor, scale), *_ = np.linalg.lstsq(rows, ones, rcond=None)
    if floor >= 0:
        return float(floor), float(scale)
    (scale,), *_ = np.linalg.lstsq(rows[:, 1:], ones, rcond=None)
    return 0.0, float(scale)


def fits(pairs: Sequence[Pair], launch: float) -> Facts:
    """Of all kinds together, and of each."""
    kinds = dict.fromkeys(p.kind for p in pairs)
    each: Facts = {kind: fit([p for p in pairs if p.kind == kind], launch) for kind in kinds}
    return {"all": fit(pairs, launch), "kinds": each} if pairs else {}


def shown(found: Mapping[str, record.Json]) -> str:
    """The fits as a table."""
    kinds: Mapping[str, Mapping[str, object]] = found["kinds"]  # type: ignore[assignment]
    rows = [["all", *map(str, found["all"].values())]]  # type: ignore[union-attr]
    rows += [[kind, *map(str, facts.values())] for kind, facts in kinds.items()]
    heads = ["kind", "kernels", "Spearman", "median error", "modelled / measured", "floor us", "scale"]
    width = len(heads)
    return gpu_report.text_table(
        "the model against a clock", heads, [r + [""] * (width - len(r)) for r in rows]
    )


def options(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for kernels that are timed now")
    parser.add_argument(
        "--threads", type=int, default=host_target().cores, help="as many as the model takes for granted"
    )
    parser.add_argument("--products", type=Path, help="a file of benchmarks.gemm")
    parser.add_argument(
        "--convolutions", type=Path, action="append", default=[], help="a file of benchmarks.convolutions"
    )
    parser.add_argument("--target", default="sm_90", help="the machine of these files")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Time, fit, print, write."""
    warnings.filterwarnings("ignore")
    arguments = options(given)
    device = torch.device(arguments.device)
    if reason := gpu_report.unusable(device):
        print(reason, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    target = host_target() if device.type == "cpu" else gpu_target(device.index or 0)
    with measure.settings(arguments.threads):
        pairs = list(timed_pairs(device, arguments.budget)) if arguments.budget > 0 else []
    other = preset(arguments.target)
    products = list(recorded_pairs(arguments.products, other)) if arguments.products else []
    products += [p for file in arguments.convolutions for p in recorded_convolutions(file, other)]
    facts: Facts = {
        **record.provenance(arguments.threads),
        "target": target.name,
        "launch_us": target.launch_seconds * 1e6,
        "wanted": dict(zip(("spearman", "median_error"), WANTED, strict=True)),
    }
    for name, found, launch in (
        ("timed", pairs, target.launch_seconds),
        ("products", products, other.launch_seconds),
    ):
        if found:
            facts[name] = {"fit": (fitted := fits(found, launch)), "pairs": [p.facts() for p in found]}
            print(shown(fitted))
    if arguments.json is not None:
        record.write_json(arguments.json, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
