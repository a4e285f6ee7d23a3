"""`python -m benchmarks.convolutions --json FILE --budget SECONDS`: convolutions of our own on a GPU beside cuDNN.

The eleven layers of ResNet-34 (`C1` to `C11`), fp16, channels innermost, with a bias and ReLU, at batch 1 and 32; with
`--only`, ten of ResNet-50 (`R1` to `R10`), the depthwise ones of MobileNet-v2 (`D1` to `D7`) and ConvNeXt-T (`N1` to
`N4`), and other batches too (`D3x64`). Of each, the kernel with all schedules that are proposed is built and timed in
replayed graphs over cold inputs, in turn with cuDNN: the convolution alone; with bias and ReLU as torch's ops; and in
one pass (`cudnn_convolution_relu`). Where few blocks would have long sums, these are taken in parts too, which a second
kernel merges (`s4p0`: four parts); few channels are padded too (`cp0`),
and weights of windows laid (`lp0`); `--frozen N` times N of these alone, with weights that are laid once before. Each
layer has a process of its own. With
`--device cpu` everything is built for an H100 and nothing runs.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from benchmarks import gpu_report, gpu_turns, record
from benchmarks.gemm import Kernels, build, captured, schedule_facts, times, unit_of
from benchmarks.gpu_clock import Call, release, sets_needed, time_runs
from benchmarks.gpu_turns import BUILDING, DONE, TIMING, Limits, Turns
from benchmarks.record import Facts
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import AS_THEY_LIE, LAID, PADDED, Kernel
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.partition.products import WHOLE, ProductWay
from tilewright.pipeline.product_ways import beside_product, kernels_of
from tilewright.rewrite.split.products import even_part_counts
from tilewright.runtime.cuda.build import BuiltKernel
from tilewright.runtime.cuda.device import gpu_target
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.schedule.solver import Solver
from tilewright.target import Target, preset

aten = torch.ops.aten

ALONE, PASS, FUSED = "cudnn alone", "cudnn + pass", "cudnn fused"
PREPARED = {"c": PADDED, "l": LAID}
"""How operands are prepared, by the first letter of a way's name."""

ALLOWED = 2.0
"""Times cuDNN's error that ours may have."""

JOBS = 8
"""Layers that build at once."""

MOST_PARTS = 16
WORTH_A_TRY = 1.2
"""Times the modelled seconds of the whole sum that parts may take."""

MOST_PROPOSALS = 99
KEPT_COUNTS, KEPT_IN_PARTS = 3, 4
"""Numbers of parts that are built, the fastest by the model, and proposals of each."""


@dataclass(frozen=True)
class Layer:
    """Channels in and out, the side of the input, the side of the kernel, stride, padding, groups."""

    name: str
    channels: int
    features: int
    side: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    groups: int = 1

    @property
    def result(self) -> int:
        """The side of the result."""
        return (self.side + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def products(self) -> int:
        """Products for each element of the result."""
        return self.channels // self.groups * self.kernel**2

    def flops(self, batch: int) -> int:
        """Operations, two for each product."""
        return 2 * batch * self.features * self.result**2 * self.products

    def moved(self, batch: int) -> int:
        """Bytes that are read and written at least."""
        image, made = self.channels * self.side**2, self.features * self.result**2
        return 2 * (batch * (image + made) + self.features * self.products)

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """What is compiled."""
        return torch.relu(torch.conv2d(x, weight, bias, self.stride, self.padding, 1, self.groups))

    def inputs(self, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        """The image, the weight, the bias, and where the result goes."""

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).half().to(memory_format=torch.channels_last)

        x = drawn(batch, self.channels, self.side, self.side)
        weight = (
            drawn(self.features, self.channels // self.groups, self.kernel, self.kernel) / self.products**0.5
        )
        bias = torch.randn(self.features, device=device).half()
        return x, weight, bias, torch.empty_like(drawn(batch, self.features, self.result, self.result))

    def peers(self) -> dict[str, Call]:
        """What it is compared with, as functions of the inputs."""
        s, p, g = self.stride, self.padding, self.groups
        window = ((s, s), (p, p), (1, 1), g)

        def separate(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Tensor:
            return torch.relu_(torch.conv2d(x, weight, bias, s, p, 1, g))

        return {
            ALONE: lambda x, weight, bias, out: torch.conv2d(x, weight, None, s, p, 1, g),
            PASS: separate,
            FUSED: lambda x, weight, bias, out: aten.cudnn_convolution_relu(x, weight, bias, *window),
        }


MOBILENET = ((32, 112, 1), (96, 112, 2), (144, 56, 1), (144, 56, 2), (192, 28, 1), (384, 14, 1), (960, 7, 1))
CONVNEXT = ((96, 56), (192, 28), (384, 14), (768, 7))
"""Depthwise layers: channels, the side of the input, and the stride of those of 3 x 3; 7 x 7."""

LAYERS: Mapping[str, Layer] = {
    layer.name: layer
    for layer in (
        Layer("C1", 3, 64, 224, 7, 2, 3), Layer("C2", 64, 64, 56, 3, 1, 1), Layer("C3", 64, 128, 56, 3, 2, 1),
        Layer("C4", 128, 128, 28, 3, 1, 1), Layer("C5", 128, 256, 28, 3, 2, 1), Layer("C6", 256, 256, 14, 3, 1, 1),
        Layer("C7", 256, 512, 14, 3, 2, 1), Layer("C8", 512, 512, 7, 3, 1, 1), Layer("C9", 64, 128, 56, 1, 2),
        Layer("C10", 128, 256, 28, 1, 2), Layer("C11", 256, 512, 14, 1, 2), Layer("R1", 64, 64, 56),
        Layer("R2", 64, 256, 56), Layer("R3", 256, 64, 56), Layer("R4", 256, 128, 56), Layer("R5", 512, 128, 28),
        Layer("R6", 128, 512, 28), Layer("R7", 1024, 256, 14), Layer("R8", 256, 1024, 14), Layer("R9", 2048, 512, 7),
        Layer("R10", 512, 2048, 7),
        *(Layer(f"D{n}", c, c, side, 3, stride, 1, c) for n, (c, side, stride) in enumerate(MOBILENET, 1)),
        *(Layer(f"N{n}", c, c, side, 7, 1, 3, c) for n, (c, side) in enumerate(CONVNEXT, 1)),
    )
}  # fmt: skip

USUAL_ROWS = tuple(f"C{n}x{batch}" for batch in (1, 32) for n in range(1, 12))

INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma_sync": r"mma\.sync",
    "copies_of_16_bytes": r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x10",
    "shorter_copies": r"cp\.async\.ca\.shared\.global \[[^]]*\], \[[^]]*\], 0x[48]",
    "bulk_copies": r"cp\.async\.bulk\.tensor",
    "loads_of_2_bytes": r"ld\.global[.a-z0-9]*\.b16",
}
"""What is counted in the machine code."""


@dataclass
class Ways:
    """All kernels of a row, and the ways to compute it: kernels in order, each with the places of its parameters in
    (image, weight, bias, result, what lies between kernels)."""

    kernels: Kernels
    steps: dict[str, tuple[tuple[str, tuple[int, ...]], ...]]
    between: dict[str, tuple[int, ...]]
    """Bytes of what lies between kernels, for ways with such."""
    modelled: dict[str, float]
    once: dict[str, tuple[tuple[str, tuple[int, ...]], ...]]
    """What runs before a way's first call, once."""

    @property
    def built(self) -> list[str]:
        """The ways whose kernels are all there."""
        kernels = {w: {k for k, _ in (*self.once.get(w, ()), *steps)} for w, steps in self.steps.items()}
        return [w for w, needed in kernels.items() if needed <= self.kernels.built.keys()]


class _Finder:
    """Looks for all ways of one kernel."""

    def __init__(self, graph: Graph, kernel: Kernel, target: Target) -> None:
        self.graph, self.kernel, self.solver = graph, kernel, Solver(target, Options())
        self.found = Ways(Kernels({}, ()), {}, {}, {}, {})

    def add(self, prefix: str, way: ProductWay, most: int, *, frozen: bool = False) -> None:
        """The fastest of a way by the model, and what its other kernels are. Those in front run once if weights, of
        which they make all that they make, are `frozen`."""
        made = kernels_of(self.kernel, self.graph.layouts, way, self.graph.fresh_id())
        if made is None:
            return
        layouts, between = {**self.graph.layouts, **made.between}, [*made.between]
        tensors = [*self.graph.inputs, *self.graph.outputs, *between]
        first, *rest = made.kernels
        prepare = [Kernel((op,), op.outputs) for op in made.prepare]
        others = {f"{prefix}k{n}": self.solver.solve(k, layouts) for n, k in enumerate([*prepare, *rest])}
        self.found.kernels.scheduled.update(others)
        step = {name: (name, tuple(tensors.index(v) for v in k.params)) for name, k in others.items()}
        before, behind = (
            list(step.values())[part] for part in (slice(len(prepare)), slice(len(prepare), None))
        )
        weights = self.graph.inputs[1:2] if frozen else ()
        beside = beside_product(made, layouts, self.solver, [v for v in weights if isinstance(v, Value)])
        once, before = (before, []) if frozen else ([], before)
        for n, proposal in enumerate(self.solver.proposals(first, layouts)[:most]):
            name = f"{prefix}p{n}"
            solved = self.solver.solve(first, layouts, proposal.schedule)
            self.found.kernels.scheduled[name] = solved
            own = name, tuple(tensors.index(v) for v in solved.params)
            self.found.steps[name] = (*before, own, *behind)
            self.found.once[name] = tuple(once)
            self.found.between[name] = tuple((dims.static(v.numel) or 0) * v.dtype.bytes for v in between)
            self.found.modelled[name] = proposal.seconds + beside

    def seconds(self, count: int) -> float:
        """Modelled for the sum in so many parts."""
        made = kernels_of(self.kernel, self.graph.layouts, ProductWay(count), self.graph.fresh_id())
        assert made is not None
        layouts = {**self.graph.layouts, **made.between}
        first = next(iter(self.solver.proposals(made.kernels[0], layouts)))
        return first.seconds + beside_product(made, layouts, self.solver)


def kernel_of(layer: Layer, batch: int) -> tuple[Graph, Kernel]:
    """A layer as a graph, and as one kernel."""
    given = layer.inputs(batch, torch.device("cpu"))[:3]
    return captured(lambda x, weight, bias: layer.convolved(x, weight, bias), given)


def way_of(label: str) -> ProductWay:
    """The way behind the name of a contestant: `p0`, `s4p0`, `cp0` or `lp0`."""
    parts = re.match(r"s(\d+)p", label)
    return ProductWay(int(parts[1]) if parts else 1, PREPARED.get(label[0], AS_THEY_LIE))


def ways(layer: Layer, batch: int, target: Target, frozen: int = 0) -> Ways:
    """What is proposed for a layer, for its sum in parts, and over operands that are prepared, the fastest by the model
    first; or so many with `frozen` weights that are laid."""
    graph, kernel = kernel_of(layer, batch)
    finder = _Finder(graph, kernel, target)
    if frozen:
        finder.add("l", ProductWay(operands=LAID), frozen, frozen=True)
        return finder.found
    finder.add("", WHOLE, MOST_PROPOSALS)
    seconds = {count: finder.seconds(count) for count in even_part_counts(kernel, MOST_PARTS)}
    limit = WORTH_A_TRY * finder.found.modelled["p0"]
    for count in sorted((c for c, s in seconds.items() if s < limit), key=lambda c: seconds[c])[:KEPT_COUNTS]:
        finder.add(f"s{count}", ProductWay(count), KEPT_IN_PARTS)
    for prefix, operands in PREPARED.items():
        finder.add(prefix, ProductWay(operands=operands), MOST_PROPOSALS)
    return finder.found


def row(name: str) -> tuple[Layer, int]:
    """The layer and the batch of a row. Raises KeyError or ValueError for a name that is none."""
    layer, _, batch = name.partition("x")
    return LAYERS[layer], int(batch)


def errors(layer: Layer, found: Mapping[str, Call], inputs: Sequence[Tensor]) -> dict[str, float]:
    """The largest error of each result in the last image, as part of the largest element."""
    x, weight, bias, out = inputs
    last = x[-1:].float(), weight.float(), bias.float()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        right = layer.convolved(*last)
    made: dict[str, float] = {}
    for name, call in found.items():
        out.fill_(torch.nan)
        result = call(*inputs)
        assert isinstance(result, Tensor)
        wrong = (result[-1:].float() - right).abs().max() / right.abs().max()
        made[name] = float("inf") if bool(result.isnan().any()) else float(wrong)
    return made


def calls(found: Ways, store: ContentStore, device: torch.device) -> dict[str, Call]:
    """Each way as a function of (image, weight, bias, result)."""
    unit = unit_of(found.kernels, gpu_target(device.index or 0), store, device)
    number = {name: k for k, name in enumerate(found.kernels.built)}
    sizes = zip_longest(*found.between.values(), fillvalue=0)
    rooms = [torch.empty(max(n), dtype=torch.uint8, device=device) for n in sizes]
    prepared: dict[tuple[str, int], object] = {}

    def call(way: str, *tensors: Tensor) -> Tensor:
        key = (way, tensors[-1].data_ptr())
        if key not in prepared:
            pointers = array("Q", [t.data_ptr() for t in (*tensors, *rooms)])
            once, steps = (
                [(number[k], [(place, 0) for place in places]) for k, places in listed[way]]
                for listed in (found.once, found.steps)
            )
            if once:
                unit.prepare(once, pointers, array("q"))()
            prepared[key] = unit.prepare(steps, pointers, array("q"))
        prepared[key]()  # type: ignore[operator]
        return tensors[-1]

    return {way: partial(call, way) for way in found.built}


def measured(
    layer: Layer, batch: int, found: Ways, store: ContentStore, arguments: argparse.Namespace
) -> Facts:
    """All times of one row. Needs the device alone."""
    device = torch.device(arguments.device)
    torch.backends.cudnn.benchmark = True
    sets = [layer.inputs(batch, device) for _ in range(sets_needed(layer.moved(batch), device))]
    ours = calls(found, store, device)
    run = layer.peers() | ours
    wrong = errors(layer, run, sets[0])
    timed = time_runs({name: (call, sets) for name, call in run.items()}, device, arguments.rounds)
    limit = ALLOWED * max(wrong[PASS], torch.finfo(torch.float16).eps)
    seconds = {name: timed[name].timing.median for name in run}
    right = [name for name in ours if wrong[name] <= limit]
    best = min(right, key=lambda name: seconds[name], default=None)
    ran = {name: times(timed[name], wrong[name], name in right) for name in ours}
    facts: Facts = {f"{name}_us": seconds[name] * 1e6 for name in layer.peers()}
    if best is not None:
        facts |= {"ours_us": seconds[best] * 1e6, "TFLOP_per_s": layer.flops(batch) / seconds[best] / 1e12}
    return described(found, ran) | facts | {"cudnn_error": wrong[PASS], "sets": len(sets), "best": best}


def described(found: Ways, ran: Mapping[str, Facts]) -> Facts:
    """What is known of kernels and ways of a layer, those that `ran` with their times."""
    facts = schedule_facts(found.kernels, {})
    told = {name: f | instructions(found.kernels.built.get(name)) for name, f in facts.items()}
    ways: dict[str, record.Json] = {
        w: {"modelled_us": found.modelled[w] * 1e6, "kernels": len(steps)} | ran.get(w, {})
        for w, steps in found.steps.items()
    }
    return {"kernels": {**told}, "ways": ways}


def instructions(built: BuiltKernel | None) -> Facts:
    """How often machine code has what products are made of."""
    if built is None:
        return {}
    return {name: len(re.findall(text, built.assembly)) for name, text in INSTRUCTIONS.items()}


def child(name: str, arguments: argparse.Namespace) -> None:
    """Build and time one row, and write its facts."""
    torch.manual_seed(0)
    layer, batch = row(name)
    device, turns, facts = torch.device(arguments.device), Turns(arguments.turns), Facts()

    def write(**news: record.Json) -> None:
        facts.update(news)
        if arguments.child_json is not None:
            record.write_json(arguments.child_json, facts)

    target = gpu_target(device.index or 0) if device.type == "cuda" else preset("sm_90")
    store = ContentStore(default_root(Options()))
    with turns.building():
        write(phase=BUILDING, flops=layer.flops(batch), bytes=layer.moved(batch))
        start = time.perf_counter()
        found = ways(layer, batch, target, arguments.frozen)
        build(found.kernels, target, store)
        write(phase=TIMING, build_s=time.perf_counter() - start, **described(found, {}))
    if device.type == "cuda":
        with turns.timing():
            write(**measured(layer, batch, found, store, arguments))
            release(device)
    write(phase=DONE)


def summary(found: Mapping[str, Facts]) -> str:
    """One line for each row: cuDNN alone, with a pass, in one pass; the model's choice, the best, and its speed."""
    lines: list[list[str]] = []
    for name, facts in found.items():
        told: Mapping[str, Facts] = facts.get("ways", {})  # type: ignore[assignment]
        timed = [way for way in told.values() if "median_us" in way]
        first = min(timed, key=lambda way: float(str(way["modelled_us"])), default={}).get("median_us")
        values = [facts.get(f"{peer}_us") for peer in (ALONE, PASS, FUSED)] + [first, facts.get("ours_us")]
        cells = [f"{v:.1f}" if isinstance(v, float) else "-" for v in values]
        speeds = [_ratio(facts.get(f"{peer}_us"), facts.get("ours_us")) for peer in (ALONE, PASS, FUSED)]
        lines.append([name, *cells, str(facts.get("best") or facts.get("failed", "-"))[:40], *speeds])
    heads = [
        "layer x batch",
        "alone",
        "+ pass",
        "fused",
        "model's",
        "best",
        "which",
        "/ alone",
        "/ pass",
        "/ fused",
    ]
    return gpu_report.text_table("fp16 convolutions with bias and ReLU, us over cold inputs", heads, lines)


def _ratio(theirs: object, ours: object) -> str:
    return f"{theirs / ours:.2f}" if isinstance(theirs, float) and isinstance(ours, float) else "-"


def options(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = gpu_report.parser(__doc__)
    gpu_report.child_options(parser)
    parser.add_argument(
        "--frozen", type=int, default=0, metavar="N", help="N schedules over laid weights alone"
    )
    made = parser.parse_args(given)
    for name in made.only:
        try:
            row(name)
        except (KeyError, ValueError):
            parser.error(f"no {name!r}; there are {', '.join(LAYERS)}, each with a batch: C1x32")
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
        child(arguments.child, arguments)
        return 0
    head = gpu_report.provenance(device, arguments.commit) | {"rounds": arguments.rounds}

    def report(found: Mapping[str, Facts]) -> None:
        if arguments.json is not None:
            record.write_json(arguments.json, head | {"layers": found})

    limits = Limits(arguments.build or 0.6 * arguments.budget, arguments.budget, arguments.gpus)
    passed = [
        f"--device={arguments.device}", f"--rounds={arguments.rounds}", f"--frozen={arguments.frozen}",
    ]  # fmt: skip
    names = arguments.only or list(USUAL_ROWS)
    found = gpu_turns.run("benchmarks.convolutions", names, passed, limits, arguments.jobs or JOBS, report)
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
