"""`python -m benchmarks.attention_compile`: how long each attention core takes to compile without measuring.

Every core is compiled in a process of its own with empty caches, once for the CPU and once for a GPU that need
not be here: its phases end where Triton would be called. Building (the C++ compiler on the CPU) is shown beside
the other phases.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar
from unittest import mock

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import record
from benchmarks.attention.workloads import WORKLOADS, Attention, Sizes
from benchmarks.record import Facts, Json
from tilewright.capture.aten.decompose import decompositions
from tilewright.options import Options
from tilewright.partition.choose_kernels import ChosenRegions
from tilewright.pipeline import compiler
from tilewright.pipeline.backends import cpu, cuda
from tilewright.pipeline.place import DevicePlace
from tilewright.pipeline.trace import PhaseRecorder, Trace
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.target import preset

GPU, CPU = "sm_90", "cpu"
TARGETS = (GPU, CPU)
QUERIES = 4096
BUILDING = ("build", "load")
PUBLISHED = {"vanilla": 4, "gemma2": 4, "h2o": 5, "roco": 7, "snapkv": 5, "corm": 5, "keyformer": 10}
"""Kernels that FlashTensor (PPoPP'25) has left to choose from."""

T = TypeVar("T")


class _Reached(Exception):
    """All phases before building are done."""


def captured(name: str, target: str) -> fx.GraphModule:
    """The graph of a core on tensors that take no memory."""
    module, sizes = WORKLOADS[name](), Sizes(QUERIES)
    with FakeTensorMode():
        inputs = sizes.inputs(name, dtype=torch.float32 if target == CPU else torch.float16)
    made = make_fx(
        _listed(module),
        decomposition_table=decompositions(),  # pyright: ignore[reportArgumentType]
        tracing_mode="fake",
    )
    return made(*inputs)


def _listed(module: Attention) -> Callable[..., list[torch.Tensor]]:
    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        made = module(*inputs)
        return list(made) if isinstance(made, tuple) else [made]

    return run


def compiled(graph: fx.GraphModule, target: str) -> Trace:
    """The phases of a compilation; for a machine that is not this one, those before building."""
    machine = host_target() if target == CPU else preset(target)
    here = DevicePlace("cpu" if machine.language == "cpp" else "cuda:0")
    recorders: list[PhaseRecorder] = []

    class Noted(PhaseRecorder):
        def __init__(self) -> None:
            super().__init__()
            recorders.append(self)

        def __call__(self, name: str, phase: Callable[[], T], *shown: Callable[[T], object]) -> T:
            if name in BUILDING and target != CPU:
                raise _Reached
            return super().__call__(name, phase, *shown)

    options = Options.make({"measure": False, "cache": False})
    with (
        mock.patch.object(compiler, "PhaseRecorder", Noted),
        mock.patch.object(compiler, "place_of", lambda *_: here),
        mock.patch.object(cpu, "host_target", lambda: machine),
        mock.patch.object(cuda, "gpu_target", lambda ordinal: machine),
        mock.patch.object(cuda, "missing", lambda where: ""),
        mock.patch.object(cuda, "singles_may_round", lambda: False),
    ):
        try:
            compiler.compile_fx(graph, options, trusted=True)
        except _Reached:
            pass
    return recorders[0].trace


def run(name: str, target: str) -> Facts:
    """Seconds of one core's phases, and how many kernels were considered for it, in this process."""
    trace = compiled(captured(name, target), target)
    phases: dict[str, float] = {}
    for phase in trace.phases:
        phases[phase.name] = phases.get(phase.name, 0.0) + phase.seconds
    mapped = trace["map"]
    assert isinstance(mapped, ChosenRegions)
    return {
        "phases_s": phases,
        "seconds": sum(s for phase, s in phases.items() if phase not in BUILDING),
        "building_s": sum(phases.get(phase, 0.0) for phase in BUILDING),
        "map_s": phases["map"],
        "kernels": sum(len(r.kernels) for r in mapped.regions),
        "considered": sum(considered(note) for r in mapped.regions for note in r.notes),
        "published": PUBLISHED[name],
        "decisions": [str(r).splitlines()[0] for r in mapped.regions],
    }


def considered(note: str) -> int:
    """How many kernels a note on a region says were left to choose from; 0 if it says something else."""
    count, _, rest = note.partition(" ")
    return int(count) if rest.startswith("kernels considered of") else 0


def table(cores: Mapping[str, Mapping[str, Facts]], threads: int) -> Table:
    """One row per core and target."""
    title = f"seconds to compile attention without measuring, {QUERIES} queries, {threads} threads"
    result = Table(title=title, title_justify="left")
    for column in ("core", "target", "seconds", "map phase", "building", "candidates", "published"):
        result.add_column(column, justify="left" if column in ("core", "target") else "right")
    for name, targets in cores.items():
        for target, facts in targets.items():
            if "failed" in facts:
                result.add_row(name, target, str(facts["failed"])[:60])
                continue
            numbers = [f"{facts[key]:.2f}" for key in ("seconds", "map_s", "building_s")]
            result.add_row(name, target, *numbers, str(facts["considered"]), str(facts["published"]))
    return result


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--only", multiple=True, type=click.Choice(list(WORKLOADS)), help="some of the cores")
@click.option("--threads", default=2, show_default=True)
@click.option("--target", multiple=True, type=click.Choice(TARGETS), help="one of the targets")
@click.option("--child-json", type=click.Path(dir_okay=False, path_type=Path), hidden=True)
def main(
    path: Path | None, only: tuple[str, ...], threads: int, target: tuple[str, ...], child_json: Path | None
) -> None:
    """Run all processes and print one table."""
    if child_json is not None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(threads)
        record.write_json(child_json, run(only[0], target[0]))
        return
    console = Console() if Console().is_terminal else Console(width=150)
    cores: dict[str, dict[str, Facts]] = {}
    for name in only or WORKLOADS:
        cores[name] = {}
        for where in target or TARGETS:
            with console.status(f"{name} {where}"):
                arguments = ["--only", name, "--target", where]
                cores[name][where] = record.cold_child("benchmarks.attention_compile", arguments, threads)
    facts: Mapping[str, Json] = {"queries": QUERIES, "cores": cores}
    if path is not None:
        record.write_json(path, record.provenance(threads) | facts)
    console.print(table(cores, threads))


if __name__ == "__main__":
    main()
