"""`python -m benchmarks.gemm --json FILE --budget SECONDS`: our own matrix products on a GPU beside cuBLAS.

x [m, k] @ weight [n, k] transposed, fp16, as linear layers have them: squares, and the four products of a layer of
Llama-2-7b for few and many rows. Of each shape, the kernel with its usual schedule and with all that are proposed is
built and timed in replayed graphs over cold inputs, in turn with torch.mm. Each shape has a process of its own. With
`--device cpu` everything is built for an H100 and nothing runs.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import gpu_report, gpu_turns, record
from benchmarks.gpu_clock import Call, Timed, release, sets_needed, time_runs
from benchmarks.gpu_turns import BUILDING, DONE, TIMING, Limits, Turns
from benchmarks.record import Facts
from tilewright.capture.aten import decompositions
from tilewright.capture.fx import from_fx
from tilewright.emit.triton.kernel import TritonSource, emit_triton
from tilewright.errors import KernelRefused
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Kernel, Scheduled
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.lower.variants import Variant
from tilewright.options import Options
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.cuda.build import BuiltKernel, build_kernels
from tilewright.runtime.cuda.device import gpu_target
from tilewright.runtime.cuda.driver import device as driver_device
from tilewright.runtime.cuda.kernels import CudaUnit, VariantCompiler, usual
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.schedule.solver import Solver
from tilewright.target import Target, preset

SQUARES = (4096, 8192)
ROWS = (1, 16, 64, 256, 1024)
LAYER = ((4096, 4096), (4096, 12288), (4096, 22016), (11008, 4096))
"""Of a layer of Llama-2-7b: k and n of the output projection, of queries, keys and values, of gate and up, of down."""

CUBLAS, USUAL = "cublas", "usual"
CHECKED_ROWS = 64
"""Rows of a result that are held against a product of fp32."""

ALLOWED = 2.0
"""Times cuBLAS's error that ours may have."""

JOBS = 8
"""Shapes that build at once."""


@dataclass(frozen=True)
class Shape:
    """x of m rows and k columns, a weight of n rows."""

    m: int
    k: int
    n: int

    @property
    def name(self) -> str:
        """For the command line and the record."""
        return f"{self.m}x{self.k}x{self.n}"

    @property
    def flops(self) -> int:
        """Operations, two for each product."""
        return 2 * self.m * self.k * self.n

    @property
    def moved(self) -> int:
        """Bytes that are read and written at least."""
        return 2 * (self.m * self.k + self.n * self.k + self.m * self.n)

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        """x, the weight, and where the result goes."""
        made = (torch.randn(rows, self.k, device=device).half() for rows in (self.m, self.n))
        return (*made, torch.empty(self.m, self.n, dtype=torch.float16, device=device))


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (*(Shape(n, n, n) for n in SQUARES), *(Shape(m, *layer) for m in ROWS for layer in LAYER))
}


def multiplied(x: Tensor, weight: Tensor) -> Tensor:
    """What is compiled."""
    return torch.mm(x, weight.t())


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """What it is compared with."""
    return torch.mm(x, weight.t(), out=out)


@dataclass
class Kernels:
    """The kernel of a shape under several schedules: what each is called, its text and machine code, or why it has
    none."""

    scheduled: dict[str, Scheduled]
    places: tuple[int, ...]
    """For each parameter of the kernel, which of (x, weight, out) it is."""
    sources: dict[str, TritonSource] = field(default_factory=dict)
    built: dict[str, BuiltKernel] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def kernels(shape: Shape, target: Target) -> Kernels:
    """The kernel of a shape with its usual schedule, and with each that is proposed, the best by the model first."""
    given = [torch.empty(rows, shape.k, dtype=torch.float16) for rows in (shape.m, shape.n)]
    graph, kernel = captured(multiplied, given)
    solver = Solver(target, Options())
    made = {USUAL: solver.solve(kernel, graph.layouts)}
    for k, solution in enumerate(solver.proposals(kernel, graph.layouts)):
        made[f"p{k}"] = solver.solve(kernel, graph.layouts, solution.schedule)
    tensors = [*graph.inputs, *kernel.outputs]
    return Kernels(made, tuple(tensors.index(v) for v in made[USUAL].params))


def captured(function: Call, given: Sequence[Tensor]) -> tuple[Graph, Kernel]:
    """The graph of a function for inputs as they are `given`, and all of it as one kernel."""
    traced = make_fx(function, dict(decompositions()), tracing_mode="fake")(*given)  # type: ignore[arg-type]
    graph = normalise(from_fx(traced))
    results = tuple(v for v in graph.outputs if isinstance(v, Value))
    return graph, Kernel(tuple(op for op in graph.ops if op.expr is not None), results)


def printed(scheduled: Scheduled, target: Target) -> tuple[TritonSource, Variant]:
    """The variant that aligned tensors of this shape run."""
    variant = usual(scheduled.program)[0]
    return emit_triton(legalise_for_gpu(scheduled.program, target), (), variant, "k0"), variant


def build(found: Kernels, target: Target, store: ContentStore) -> None:
    """Build all side by side; those that Triton refuses are missing."""
    found.sources = {name: printed(s, target)[0] for name, s in found.scheduled.items()}
    build_sources(found, target, store)


def build_sources(found: Kernels, target: Target, store: ContentStore) -> None:
    """Build all that are printed side by side; those that Triton refuses are missing."""
    left = list(found.sources)
    while left:
        try:
            built = build_kernels([found.sources[name] for name in left], target, store)
        except KernelRefused as refused:
            bad = [left[k] for k in refused.kernels] or list(left)
            found.missing |= dict.fromkeys(bad, refused.message[:200])
            left = [name for name in left if name not in bad]
            continue
        found.built = dict(zip(left, built, strict=True))
        return


def unit_of(found: Kernels, target: Target, store: ContentStore, device: torch.device) -> CudaUnit:
    """The kernels that are built, in order."""
    names = list(found.built)
    programs = [found.scheduled[name].program for name in names]

    def text(kernel: int, variant: Variant) -> TritonSource:
        return emit_triton(legalise_for_gpu(programs[kernel], target), (), variant, f"k{kernel}")

    known = {
        (k, printed(found.scheduled[name], target)[1]): (found.sources[name], found.built[name])
        for k, name in enumerate(names)
    }
    compiler = VariantCompiler(text, partial(build_kernels, target=target, store=store))
    return CudaUnit(programs, (), compiler, driver_device(device.index or 0, store, Options()), known)


def calls(found: Kernels, target: Target, store: ContentStore, device: torch.device) -> dict[str, Call]:
    """Each built kernel as a function of (x, weight, out)."""
    unit = unit_of(found, target, store, device)
    prepared: dict[tuple[int, ...], object] = {}

    def call(kernel: int, *tensors: Tensor) -> Tensor:
        pointers = [tensors[p].data_ptr() for p in found.places]
        key = (kernel, *pointers)
        if key not in prepared:
            slots = [(slot, 0) for slot in range(len(pointers))]
            prepared[key] = unit.prepare([(kernel, slots)], array("Q", pointers), array("q"))
        prepared[key]()  # type: ignore[operator]
        return tensors[-1]

    return {name: partial(call, k) for k, name in enumerate(found.built)}


def errors(found: Mapping[str, Call], inputs: Sequence[Tensor]) -> dict[str, float]:
    """The largest error of each result in some rows, as part of the largest element."""
    x, weight, out = inputs
    right = x[:CHECKED_ROWS].float() @ weight.float().t()
    made: dict[str, float] = {}
    for name, call in found.items():
        out.fill_(torch.nan)
        call(*inputs)
        wrong = (out[:CHECKED_ROWS].float() - right).abs().max() / right.abs().max()
        made[name] = float(wrong) if not bool(out.isnan().any()) else float("inf")
    return made


def measured(
    shape: Shape, found: Kernels, target: Target, store: ContentStore, arguments: argparse.Namespace
) -> Facts:
    """All times of one shape. Needs the device alone."""
    device = torch.device(arguments.device)
    sets = [shape.inputs(device) for _ in range(sets_needed(shape.moved, device))]
    run = {CUBLAS: multiply, **calls(found, target, store, device)}
    wrong = errors(run, sets[0])
    timed = time_runs({name: (call, sets) for name, call in run.items()}, device, arguments.rounds)
    right = [
        n for n in found.built if wrong[n] <= ALLOWED * max(wrong[CUBLAS], torch.finfo(torch.float16).eps)
    ]
    theirs = timed[CUBLAS].timing.median
    best = min(right, key=lambda n: timed[n].timing.median, default=None)
    speed = theirs / timed[best].timing.median if best is not None else None
    ran = {name: times(timed[name], wrong[name], name in right) for name in found.built}
    return described(shape, found, ran) | {
        "cublas_us": theirs * 1e6,
        "cublas_TFLOP_per_s": shape.flops / theirs / 1e12,
        "cublas_error": wrong[CUBLAS],
        "sets": len(sets),
        "best": best,
        "speed_over_cublas": speed,
    }


def times(timed: Timed, error: float, right: bool) -> Facts:
    """What is recorded of one schedule that ran."""
    found: Facts = {
        "median_us": timed.timing.median * 1e6,
        "min_us": timed.timing.minimum * 1e6,
        "method": timed.method,
        "error": error,
    }
    return found if right else found | {"wrong": True}


def described(shape: Shape, found: Kernels, ran: Mapping[str, Facts]) -> Facts:
    """What is known of a shape's schedules, those that `ran` with their times."""
    schedules: dict[str, record.Json] = {**schedule_facts(found, ran)}
    return {"m": shape.m, "k": shape.k, "n": shape.n, "schedules": schedules}


def schedule_facts(found: Kernels, ran: Mapping[str, Facts]) -> dict[str, Facts]:
    """What is known of each schedule of a kernel, with the times of those that `ran`."""
    schedules: dict[str, Facts] = {}
    for name, scheduled in found.scheduled.items():
        facts: Facts = {"schedule": str(scheduled.schedule), "modelled_us": (scheduled.seconds or 0.0) * 1e6}
        if name in found.missing:
            facts["not_available"] = found.missing[name]
        elif name in found.built:
            told = found.built[name].facts
            facts |= {"registers": told.registers, "spills": told.spills, "shared_bytes": told.shared}
        schedules[name] = facts | ran.get(name, {})
    return schedules


def child(shape: Shape, arguments: argparse.Namespace) -> None:
    """Build and time one shape, and write its facts."""
    torch.manual_seed(0)
    device, turns, facts = torch.device(arguments.device), Turns(arguments.turns), Facts()

    def write(**news: record.Json) -> None:
        facts.update(news)
        if arguments.child_json is not None:
            record.write_json(arguments.child_json, facts)

    target = gpu_target(device.index or 0) if device.type == "cuda" else preset("sm_90")
    store = ContentStore(default_root(Options()))
    with turns.building():
        write(phase=BUILDING)
        start = time.perf_counter()
        found = kernels(shape, target)
        build(found, target, store)
        write(phase=TIMING, build_s=time.perf_counter() - start, **described(shape, found, {}))
    if device.type == "cuda":
        with turns.timing():
            write(**measured(shape, found, target, store, arguments))
            release(device)
    write(phase=DONE)


def summary(found: Mapping[str, Facts]) -> str:
    """One line for each shape: cuBLAS, the usual schedule, the model's choice, the best, and its rank in the model."""
    lines: list[list[str]] = []
    for name, facts in found.items():
        schedules: Mapping[str, Facts] = facts.get("schedules", {})  # type: ignore[assignment]
        best = str(facts.get("best") or "-")

        def cell(key: str, schedules: Mapping[str, Facts] = schedules) -> str:
            value = schedules.get(key, {}).get("median_us")
            return f"{value:.1f}" if isinstance(value, float) else "-"

        theirs, speed = facts.get("cublas_us"), facts.get("speed_over_cublas")
        lines.append([
            name, f"{theirs:.1f}" if isinstance(theirs, float) else "-", cell(USUAL), cell("p0"), cell(best),
            best, f"{speed:.2f}" if isinstance(speed, float) else str(facts.get("failed", "-"))[:40],
        ])  # fmt: skip
    heads = ["m x k x n", "cuBLAS us", "usual", "model's", "best", "which", "speed"]
    return gpu_report.text_table("fp16 products, median of replayed graphs over cold inputs", heads, lines)


def options(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = gpu_report.parser(__doc__)
    gpu_report.child_options(parser)
    made = parser.parse_args(given)
    for name in made.only:
        if name not in SHAPES:
            parser.error(f"no {name!r}; there are: {', '.join(SHAPES)}")
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Run, print the table, write the JSON."""
    warnings.filterwarnings("ignore")
    arguments = options(given)
    device = torch.device(arguments.device)
    if reason := gpu_report.unusable(device):
        print(reason, file=sys.stderr)
        return 2
    if arguments.child:
        child(SHAPES[arguments.child], arguments)
        return 0
    head = gpu_report.provenance(device, arguments.commit) | {"rounds": arguments.rounds}

    def report(found: Mapping[str, Facts]) -> None:
        if arguments.json is not None:
            record.write_json(arguments.json, head | {"shapes": found})

    limits = Limits(arguments.build or 0.6 * arguments.budget, arguments.budget, arguments.gpus)
    passed = [f"--device={arguments.device}", f"--rounds={arguments.rounds}"]
    names = arguments.only or list(SHAPES)
    found = gpu_turns.run("benchmarks.gemm", names, passed, limits, arguments.jobs or JOBS, report)
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
