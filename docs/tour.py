"""A tour: one small model through every phase, each intermediate form printed. Run `python docs/tour.py`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

import tilewright
from tilewright.accuracy import compare, in_float64
from tilewright.form.classes import make_form
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Scheduled, ViewStep
from tilewright.ir.program import TileProgram
from tilewright.pipeline.trace import Trace
from tilewright.plan import Plan
from tilewright.plan.reports import KernelReport
from tilewright.tilegraph.connect import connect
from tilewright.tilegraph.footprint import footprint
from tilewright.tilegraph.propagate import block
from tilewright.tilegraph.traffic import traffic

WIDTH, HIDDEN = 48, 64


class Head(nn.Module):
    """A softmax of shifted scores, then two layers with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, WIDTH] -> [batch, WIDTH]."""
        weights = torch.softmax(x + self.shift, -1)
        return self.down(nn.functional.gelu(self.up(weights)))


def say(title: str, text: str) -> None:
    """A heading and a paragraph."""
    print(f"\n== {title} ==\n\n{textwrap.fill(text, 100)}\n")


def show(text: str) -> None:
    """A form, indented."""
    print(textwrap.indent(text.strip(), "    "))


def capture(trace: Trace) -> None:
    """What comes in, and its normal form."""
    say(
        "Graph: what is computed",
        "Every op is a tensor expression: [axes and extents] = a body over reads, where %k[...] reads operand k at "
        "index expressions. Composites are decomposed by us and remember their origin; the batch size is a symbol.",
    )
    graph = cast(Graph, trace["capture"])
    show(graph.show())
    say(
        "Graph, normalised",
        "Products became library calls (select). Views were composed into access maps, scalar identities applied, "
        "equal ops shared (normalise). Where sizes make it pay, frozen weights are packed and pointwise readers of a "
        "product join it as its epilogue (specialise), and a reduction over much with few results becomes two (split).",
    )
    graph = cast(Graph, trace["split"])
    show(graph.show())
    print(f"\n    the same structure has the same digest: {graph.digest()[:16]}")


def cover(trace: Trace) -> Cover:
    """Which ops go together."""
    say(
        "Cover: which ops share a kernel",
        "Kernels start with one op each and merge along edges while the modelled time does not grow; the reason that "
        "stopped each one is kept. The other steps are library calls and views, which cost nothing.",
    )
    found = cast(Cover, trace["partition"])
    for step in found.steps:
        match step:
            case Kernel():
                ops, made = ", ".join(op.name for op in step.ops), ", ".join(map(repr, step.outputs))
                show(f"kernel   {ops} -> {made}; boundary: {step.reason or 'nothing left to merge with'}")
            case LibraryStep():
                show(f"library  {step.op.name}, by {'choice' if step.choice else 'need'}")
            case ViewStep():
                show(f"view     {step.value} is memory of {step.source}")
    return found


def kernels(trace: Trace, found: Cover) -> None:
    """How each kernel computes."""
    for number, scheduled in enumerate(cast(Sequence[Scheduled], trace["schedule"])):
        say(
            f"Form of kernel {number}: reductions and outputs over loop classes",
            "Pointwise ops have vanished: each reduction ($) and each output (@) holds the whole expression of what "
            "it computes. Reads carry element offsets already. Axes that correspond are one loop class.",
        )
        show(make_form(scheduled.kernel, found.layouts).show())
        say(
            f"Schedule of kernel {number}: the decisions",
            "A role for each loop class (grid: parallel; streamed: a loop in steps; xN: values bound at a time), the "
            "one that runs in vector lanes, and from which cost on a value is kept for a later pass.",
        )
        show(str(scheduled.schedule))
        say(
            f"TileProgram of kernel {number}: how it computes",
            "One pass per dependent reduction over a loop class: a softmax needs three. A name in <> is a block axis; "
            "the loop over what is no multiple of the step is split off and masked.",
        )
        show(scheduled.program.show())


def levels(compiled: tilewright.CompiledModel, trace: Trace, found: Cover) -> None:
    """Where every value lies while it is read."""
    say(
        "Tile-graph: the memory level of every edge",
        "An edge is a value between two ops (op@n: of step n). Between steps it is at DEVICE: it goes through memory. "
        "Inside a kernel it is at REGISTER, or at SHARED where a later pass finds it in scratch. Bytes that move are "
        "counted per level; footprints are those of a tile, from access maps alone.",
    )
    graph = connect(found, cast(Sequence[Scheduled], trace["schedule"]))
    show(graph.show())
    reports = cast(Sequence[KernelReport], compiled.kernels)
    sizes = reports[0].sizes
    moved = ", ".join(f"{level.name} {count}" for level, count in traffic(graph, sizes).items())
    show(f"\nbytes that move, for {dict(sizes)}: {moved}")
    kernel = next(step for step in found.steps if isinstance(step, Kernel))
    row = {v: block([0, 0], [1, v.shape[1]]) for v in kernel.outputs}
    taken = ", ".join(
        f"{level.name} {count}" for level, count in footprint(graph, kernel, row, sizes).items()
    )
    show(f"bytes that one row of kernel 0 takes: {taken}")


def code(compiled: tilewright.CompiledModel, trace: Trace) -> None:
    """What is built and launched."""
    say(
        "TileProgram, legalised: the instructions that are selected",
        "The same programs for this machine: how products go through registers, which accesses are turned there, in "
        "which order sums are added.",
    )
    for program in cast(Sequence[TileProgram], trace["legalise"]):
        show(program.show())
    say(
        "Source: the emitted C++",
        "The tile program, printed statement by statement; emit decides nothing. Vector types and functions come "
        "from headers of ours; neither Python nor torch is included. (A plan's kernels are built "
        "together; here each stands alone.)",
    )
    for report in cast(Sequence[KernelReport], compiled.kernels):
        show(report.source)
    say(
        "Plan: what runs",
        "Buffers with shapes over the size symbols and an owner each (arena: part of one allocation per call), how "
        "each symbol is found from the inputs, and the launches and calls in order.",
    )
    show(cast(Plan, trace["plan"]).show())


def result(model: Head, compiled: tilewright.CompiledModel) -> bool:
    """Run two sizes and judge both."""
    say(
        "The result",
        "Two batch sizes with one graph, judged by the fp64 rule: error against float64 beside eager's own error.",
    )
    passed = True
    for batch in (32, 7):
        x = torch.randn(batch, WIDTH)
        verdict = compare(cast(Tensor, compiled(x)), model(x), in_float64(model)(x))
        show(f"batch {batch}: {verdict}")
        passed &= verdict.passed
    show(f"{compiled.coverage}\n{tilewright.stats()}")
    return passed


@torch.no_grad()
def main() -> bool:
    """Compile, print every form, run; True if the results are right."""
    torch.manual_seed(0)
    model = Head().eval()
    compiled = tilewright.compile(model, (torch.randn(32, WIDTH),), dims={"x": {0: "batch"}}, freeze=True)
    trace = cast(Trace, compiled.trace)
    capture(trace)
    found = cover(trace)
    kernels(trace, found)
    levels(compiled, trace, found)
    code(compiled, trace)
    say("Trace: the phases", "Each phase's name, time and result are kept; this page was printed from them.")
    show(str(trace))
    return result(model, compiled)


if __name__ == "__main__":
    raise SystemExit(not main())
