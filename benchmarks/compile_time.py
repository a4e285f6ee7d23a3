"""`python -m benchmarks.compile_time`: how long a first result takes, in a cold process and in a second,
warm one.

Every figure comes from a process of its own. Cold: empty kernel caches. Warm: a second process with the
caches that the first one filled. Tilewright's own phases are shown beside the rest (imports, torch's
tracing), and beside the first call, which packs frozen weights.
"""

from __future__ import annotations

import importlib
import math
import os
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.named import ZOO
from benchmarks.record import Facts
from tilewright import measure
from tilewright.measure import Unavailable

CONTESTANTS = ("inductor", "tilewright")


def run(name: str, contestant: str, threads: int) -> Facts:
    """Seconds of one contestant on one model, in this process."""
    importlib.import_module("torch._inductor.compile_fx" if contestant == "inductor" else "tilewright.api")
    imports = process_age()
    workload = ZOO[name].build()
    phases: dict[str, float] = {}

    def ours(workload: measure.Workload, threads: int) -> measure.BuiltPeer | Unavailable:
        import tilewright

        target = str(workload.target) if isinstance(workload.target, Path) else workload.target
        compiled = tilewright.compile(target, workload.inputs, freeze=True)
        for phase in compiled.trace.phases:
            phases[phase.name] = phases.get(phase.name, 0.0) + phase.seconds
        return measure.BuiltPeer(
            lambda *inputs: measure.flatten(compiled(*inputs)), lambda: str(compiled.coverage)
        )

    prepared = measure.prepare(contestant, workload, threads, ours if contestant == "tilewright" else None)
    if isinstance(prepared, Unavailable):
        return {"not_available": prepared.reason}
    facts: Facts = {
        "imports_s": imports,
        "first_result_s": prepared.ready_seconds,
        "first_call_s": prepared.first_call_seconds,
        "coverage": prepared.coverage,
    }
    if phases:
        own = sum(phases.values())
        facts |= {"phases_s": phases, "own_phases_s": own, "torch_and_run_s": prepared.ready_seconds - own}
    return facts


def process_age() -> float:
    """Seconds since this process started: what the interpreter and the imports have taken. NaN where unknown."""
    try:
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return math.nan


def both(name: str, contestant: str, threads: int) -> dict[str, Facts]:
    """A cold process, then a warm one with the same caches."""
    arguments = ["--only", name, "--contestant", contestant]
    with tempfile.TemporaryDirectory(prefix="cold-") as folder:
        return {
            kind: record.child("benchmarks.compile_time", arguments, threads, Path(folder))
            for kind in ("cold", "warm")
        }


def cell(facts: Facts, key: str = "first_result_s") -> str:
    """Seconds, or why there are none."""
    if key in facts:
        return f"{facts[key]:.2f}"
    return str(facts.get("not_available") or facts.get("failed") or "-")[:40]


def table(models: Mapping[str, Mapping[str, Mapping[str, Facts]]], threads: int) -> Table:
    """One row per model."""
    result = Table(title=f"seconds from model to first result, {threads} threads", title_justify="left")
    result.add_column("model", no_wrap=True)
    for contestant in CONTESTANTS:
        for kind in ("cold", "warm"):
            result.add_column(f"{contestant} {kind}", justify="right")
    for column in ("own phases warm", "first call warm"):
        result.add_column(column, justify="right")
    for name, facts in models.items():
        cells = [cell(facts[contestant][kind]) for contestant in CONTESTANTS for kind in ("cold", "warm")]
        warm = facts["tilewright"]["warm"]
        result.add_row(name, *cells, cell(warm, "own_phases_s"), cell(warm, "first_call_s"))
    return result


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--only", multiple=True, type=click.Choice(list(ZOO)), help="some of the models")
@click.option("--threads", default=2, show_default=True)
@click.option("--contestant", type=click.Choice(CONTESTANTS), hidden=True)
@click.option("--child-json", type=click.Path(dir_okay=False, path_type=Path), hidden=True)
def main(
    path: Path | None, only: tuple[str, ...], threads: int, contestant: str | None, child_json: Path | None
) -> None:
    """Run all processes and print one table."""
    if child_json is not None and contestant is not None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(threads)
        record.write_json(child_json, run(only[0], contestant, threads))
        return
    console = Console() if Console().is_terminal else Console(width=150)
    models: dict[str, dict[str, dict[str, Facts]]] = {}
    for name in only or ZOO:
        with console.status(name):
            models[name] = {item: both(name, item, threads) for item in CONTESTANTS}
        if path is not None:
            record.write_json(path, record.provenance(threads) | {"models": models})
    console.print(table(models, threads))


if __name__ == "__main__":
    main()
