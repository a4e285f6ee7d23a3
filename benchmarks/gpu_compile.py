"""`python -m benchmarks.gpu_compile`: how long networks, and steps of training through attention, take to compile for
a GPU that need not be here.

Each has a process of its own with empty caches, and nothing is timed on a device: kernels are chosen by the model of
the machine, and Triton builds them. Seconds are those of a processor, of building those of the clock.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast
from unittest import mock

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

import tilewright
from benchmarks import record
from benchmarks.attention.workloads import WORKLOADS, Sizes
from benchmarks.gpu_models import NETWORKS, load
from benchmarks.record import Facts, Json
from tilewright.emit.triton.kernel import TritonSource
from tilewright.ir.kernel import Kernel
from tilewright.options import Options
from tilewright.pipeline import compiler
from tilewright.pipeline.backends import cuda
from tilewright.pipeline.compiler import Compiled, watch_compilations
from tilewright.pipeline.place import DevicePlace
from tilewright.runtime.call.fallback import Captured
from tilewright.runtime.cuda.build import BuiltKernel
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.known_sizes import Result
from tilewright.runtime.store.cache import ContentStore, digest
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Layouts, Solver
from tilewright.target import Target, preset

BATCHES = (1, 64)
BUILDING, TORCH = ("build", "load"), ("trace", "install")
"""Phases that the compiler behind us, and torch, spend."""
STEPS = tuple(f"{name} step" for name in WORKLOADS)
"""Both passes, each a graph."""
GRADIENTS = tuple(f"{name} gradient" for name in WORKLOADS)
"""Both passes in one graph."""
CASES = (*(f"{name} {batch}" for batch in BATCHES for name in NETWORKS), *STEPS, *GRADIENTS)
WANTED_SECONDS = 10.0
"""To choose the kernels of one network, or step."""
ATTENTION = Sizes(1024, 16, 128)


class Unrun(Captured):
    """Gives results of the right types and sizes, and computes nothing."""

    def __call__(self, args: list[Argument], out: Sequence[Tensor] | None = None) -> list[Result]:
        """Memory as it is."""
        args.clear()
        (output,) = self._gm.graph.find_nodes(op="output")
        made: list[Result] = []
        for node in output.args[0]:
            value = node.meta["val"] if isinstance(node, fx.Node) else node
            if isinstance(value, Tensor):
                value = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype)
            made.append(value)
        return made


NO_EXECUTABLE = Captured(fx.GraphModule({}, fx.Graph()), {})


@contextmanager
def elsewhere(machine: str) -> Generator[list[Compiled]]:
    """Compile for a machine by its preset's name; what is compiled, none of which runs."""
    made: list[Compiled] = []
    target = preset(machine)

    def place_of(gm: fx.GraphModule, frozen: Mapping[str, Tensor], kind: str) -> DevicePlace:
        return DevicePlace("cuda:0", (), kind != "inference", target)

    def unrun(gm: fx.GraphModule, frozen: Mapping[str, Tensor], done: Compiled, options: Options) -> Compiled:
        made.append(done)
        return replace(done, executable=Unrun(gm, frozen))

    with (
        mock.patch.object(compiler, "place_of", place_of),
        mock.patch.object(compiler, "find_missing", lambda options, where: ""),
        mock.patch.object(compiler, "executable", lambda *given, **named: NO_EXECUTABLE),
        watch_compilations(unrun),
    ):
        yield made


def network(case: str) -> Callable[[], object]:
    """What compiles a network in half precision, weights frozen."""
    name, _, batch = case.rpartition(" ")
    device = torch.device("cpu")
    made = load(NETWORKS[name], device, torch.float32).model.half()
    x = NETWORKS[name].inputs(int(batch), device, torch.float16)
    return lambda: tilewright.compile(made, (x,), freeze=True, options={"measure": False})


def step(case: str) -> Callable[[], object]:
    """What compiles both passes of an attention core in half precision."""
    name = case.removesuffix(" step")
    inputs = ATTENTION.inputs(name, dtype=torch.float16)
    inputs = tuple(x.requires_grad_(x.dtype is torch.float16) for x in inputs)
    compiled = torch.compile(
        _summed(WORKLOADS[name]()), backend=tilewright.backend, options={"measure": False}
    )
    return lambda: compiled(*inputs).backward()


def gradient(case: str) -> Callable[[], object]:
    """What compiles the gradient of an attention core as a function."""
    name = case.removesuffix(" gradient")
    inputs = ATTENTION.inputs(name, dtype=torch.float16)

    def made(*given: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(_summed(WORKLOADS[name]()), argnums=(0, 1, 2))(*given)

    return lambda: tilewright.compile(made, inputs, options={"measure": False})


def _summed(module: nn.Module) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        made = module(*inputs)
        results = made if isinstance(made, tuple) else (made,)
        return torch.stack([r.float().square().mean() for r in results]).sum()

    return run


@dataclass
class Counted:
    """Work that was done: kernels that a schedule was sought for, and texts that were built."""

    solved: int = 0
    sources: list[TritonSource] = field(default_factory=list[TritonSource])

    def built(self) -> list[str]:
        """What was built, each once."""
        return sorted({f"{s.text}\n{s.signature}\n{s.divisible}\n{s.warps} {s.stages}" for s in self.sources})

    @contextmanager
    def counting(self, *, build: bool) -> Generator[None]:
        """Count meanwhile. Without `build`, nothing is built."""
        best, plain = Solver._best, cuda.build_kernels

        def counted_best(solver: Solver, kernel: Kernel, layouts: Layouts, key: str) -> Solution:
            self.solved += 1
            return best(solver, kernel, layouts, key)

        def counted_build(
            sources: Sequence[TritonSource], target: Target, store: ContentStore,
            processor_seconds: float | None = None,
        ) -> list[BuiltKernel]:  # fmt: skip
            self.sources += sources
            made = len(sources) * [_NOT_BUILT]
            return plain(sources, target, store, processor_seconds) if build else made

        with (
            mock.patch.object(Solver, "_best", counted_best),
            mock.patch.object(cuda, "build_kernels", counted_build),
        ):
            yield


_NOT_BUILT = cast(BuiltKernel, None)


def run(case: str, machine: str, *, build: bool) -> Facts:
    """Seconds of the phases of one case, and what was made, in this process."""
    counted = Counted()
    compile_ = (step if case in STEPS else gradient if case in GRADIENTS else network)(case)
    with elsewhere(machine) as made, counted.counting(build=build):
        start, worked = time.perf_counter(), time.process_time()
        compile_()
        whole, work = time.perf_counter() - start, time.process_time() - worked
    phases: dict[str, float] = {}
    for done in made:
        for phase in done.trace.phases:
            phases[phase.name] = phases.get(phase.name, 0.0) + (phase.cpu_seconds or phase.seconds)
    building = sum(p.seconds for done in made for p in done.trace.phases if p.name in BUILDING)
    own = sum(s for phase, s in phases.items() if phase not in (*BUILDING, *TORCH))
    return {
        "seconds": own,
        "torch_s": work - own,
        "building_s": building,
        "whole_s": whole,
        "whole_cpu_s": work,
        "phases_s": {name: phases[name] for name in sorted(phases, key=lambda name: -phases[name])},
        "graphs": [f"{done.compilation.kind}: {done.coverage}" for done in made],
        "solved": counted.solved,
        "built": len(counted.built()),
        "texts": len({s.text for s in counted.sources}),
        "chosen": digest(*counted.built()),
    }


def longest_phases(facts: Facts) -> list[str]:
    """The first of our own phases in a case, with their seconds."""
    phases = cast(Mapping[str, float], facts["phases_s"])
    return [f"{phase} {s:.1f}" for phase, s in phases.items() if phase not in (*BUILDING, *TORCH)][:4]


def table(cases: Mapping[str, Facts], machine: str, threads: int) -> Table:
    """One row per case."""
    result = Table(title=f"seconds to compile for {machine}, {threads} threads", title_justify="left")
    result.add_column("what", no_wrap=True)
    for column in ("seconds", "torch", "building", "solved", "built"):
        result.add_column(column, justify="right")
    result.add_column("longest phases")
    for name, facts in cases.items():
        if "failed" in facts:
            result.add_row(name, str(facts["failed"])[:60])
            continue
        longest = longest_phases(facts)
        seconds, traced, building = (cast(float, facts[key]) for key in ("seconds", "torch_s", "building_s"))
        late = " (late)" if seconds > WANTED_SECONDS else ""
        result.add_row(
            name,
            f"{seconds:.1f}{late}",
            f"{traced:.1f}",
            f"{building:.1f}",
            str(facts["solved"]),
            str(facts["built"]),
            ", ".join(longest),
        )
    return result


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--only", multiple=True, type=click.Choice(CASES), help="some of them")
@click.option("--machine", default="sm_90", show_default=True, help="what is compiled for")
@click.option("--build/--no-build", default=True, show_default=True, help="whether Triton builds the kernels")
@click.option("--threads", default=2, show_default=True)
@click.option("--child-json", type=click.Path(dir_okay=False, path_type=Path), hidden=True)
def main(
    path: Path | None, only: tuple[str, ...], machine: str, build: bool, threads: int, child_json: Path | None
) -> None:
    """Run all processes and print one table."""
    if child_json is not None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(threads)
        record.write_json(child_json, run(only[0], machine, build=build))
        return
    console = Console() if Console().is_terminal else Console(width=150)
    cases: dict[str, Facts] = {}
    for name in only or CASES:
        arguments = ["--only", name, "--machine", machine, "--build" if build else "--no-build"]
        with console.status(name):
            cases[name] = record.cold_child("benchmarks.gpu_compile", arguments, threads)
        if path is not None:
            facts: Mapping[str, Json] = {"machine": machine, "load": list(os.getloadavg()), "cases": cases}
            record.write_json(path, record.provenance(threads) | facts)
    console.print(table(cases, machine, threads))


if __name__ == "__main__":
    main()
