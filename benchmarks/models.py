"""`python -m benchmarks.models`: the named models on the CPU, every contestant in one process, in turn.

Each model has a process of its own with empty caches, so that first calls are cold and a crash costs one
model.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import record
from benchmarks.named import ZOO
from benchmarks.record import Facts
from tilewright import accuracy, measure
from tilewright.measure import PreparedContestant, Timing, Unavailable, Workload
from tilewright.report.environment import environment

OURS = "tilewright"


def run(workload: Workload, threads: int, seconds: float, names: tuple[str, ...]) -> Facts:
    """All figures of one model: a dict per contestant."""
    contestants = {name: measure.prepare(name, workload, threads) for name in names}
    ready = {name: item for name, item in contestants.items() if isinstance(item, PreparedContestant)}
    verdicts = judge(ready, workload, threads)
    timings = measure.compare(ready, workload, threads, seconds=seconds)
    shapes: Facts = {
        "inputs": [
            f"{str(x.dtype).removeprefix('torch.')} {'x'.join(map(str, x.shape))}" for x in workload.inputs
        ]
    }
    facts: dict[str, Facts] = {}
    for name, item in contestants.items():
        if isinstance(item, Unavailable):
            facts[name] = {"not_available": item.reason}
        else:
            facts[name] = figures(item, name, timings, verdicts.get(name, {}))
    return {**shapes, "contestants": facts}


def figures(item: PreparedContestant, name: str, timings: Mapping[str, Timing], verdict: Facts) -> Facts:
    """What is recorded of one contestant. `speed_over_X` is X's time over its own, by rounds."""
    speeds = {
        f"speed_over_{other}": measure.ratio(timings[other], timings[name])
        for other in ("eager", "inductor", "onnxruntime")
        if other in timings
    }
    return {
        "first_call_s": item.ready_seconds,
        "build_s": item.build_seconds,
        "peak_bytes": item.peak_bytes,
        "latency_ms": timings[name].summary(),
        **speeds,
        "accuracy": verdict,
        "coverage": item.coverage,
    }


def judge(ready: Mapping[str, PreparedContestant], workload: Workload, threads: int) -> dict[str, Facts]:
    """The fp64 rule for each contestant's result; empty if eager cannot run."""
    if "eager" not in ready:
        return {}
    with measure.settings(threads):
        results = {name: item.call(*workload.inputs) for name, item in ready.items()}
        module = measure.torch_module(workload.target)
        exact = measure.flatten(accuracy.in_float64(module)(*workload.inputs))
    verdicts = {
        name: accuracy.compare_trees(result, results["eager"], exact) for name, result in results.items()
    }
    return {
        name: {
            "passed": verdict.passed,
            "smallest_k": verdict.smallest_k,
            "of_eager": verdict.relative_k,
            "verdict": str(verdict),
        }
        for name, verdict in verdicts.items()
    }


def geomeans(models: Mapping[str, Facts]) -> Facts:
    """Geometric means of our speed over each peer, over the models where both ran, and their counts."""
    result: Facts = {}
    for peer in ("eager", "inductor", "onnxruntime"):
        ours = [facts["contestants"][OURS] for facts in models.values() if "contestants" in facts]  # type: ignore[index,call-overload]
        speeds = [item[f"speed_over_{peer}"] for item in ours if f"speed_over_{peer}" in item]
        if speeds:
            result[f"speed_over_{peer}"] = {
                "geomean": measure.geomean(speeds),
                "worst": min(speeds),
                "models": len(speeds),
            }
    return result


def table(models: Mapping[str, Facts], threads: int) -> Table:
    """One row per model and contestant."""
    result = Table(title=f"fp32, {threads} threads, {environment()['cpu']}", title_justify="left")
    result.add_column("", no_wrap=True)
    for column in ("first call s", "median ms", "min ms", "p90 ms", "x eager", "x Inductor", "fp64 rule"):
        result.add_column(column, justify="right", no_wrap=True)
    result.add_column("coverage")
    for name, facts in models.items():
        result.add_row(f"[bold]{ZOO[name].title}[/bold]", *[""] * 7, escape(str(facts.get("failed", ""))))
        for contestant, item in facts.get("contestants", {}).items():  # type: ignore[union-attr]
            result.add_row(*row(contestant, item))
        result.add_section()
    return result


def row(name: str, item: Facts) -> list[str]:
    """The cells of one contestant."""
    if "not_available" in item:
        return [f"  {name}", *[""] * 7, escape(f"not available: {item['not_available']}")]
    latency: Facts = item["latency_ms"]  # type: ignore[assignment]
    verdict: Facts = item["accuracy"]  # type: ignore[assignment]
    word = "-"
    if verdict:
        word = f"{'pass' if verdict['passed'] else 'fail'} {verdict['of_eager']:.2f}"
    speeds = [
        f"{item[key]:.2f}" if key in item else "" for key in ("speed_over_eager", "speed_over_inductor")
    ]
    times = [f"{latency[key]:.3g}" for key in ("median", "min", "p90")]
    short = escape(str(item["coverage"]).partition(";")[0])  # the whole line is in the JSON file
    return [f"  {name}", f"{item['first_call_s']:.1f}", *times, *speeds, word, short]


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--only", multiple=True, type=click.Choice(list(ZOO)), help="some of the models")
@click.option("--against", default="eager,inductor,onnxruntime", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="timing per contestant")
@click.option("--child-json", type=click.Path(dir_okay=False, path_type=Path), hidden=True)
def main(
    path: Path | None,
    only: tuple[str, ...],
    against: str,
    threads: int,
    seconds: float,
    child_json: Path | None,
) -> None:
    """Run the models and print one table."""
    names = (*[name for name in measure.PEERS if name in against.split(",")], OURS)
    if child_json is not None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(threads)
        record.write_json(child_json, run(ZOO[only[0]].build(), threads, seconds, names))
        return
    console = Console() if Console().is_terminal else Console(width=170)
    models: dict[str, Facts] = {}
    for name in only or ZOO:
        with console.status(f"{name}: {', '.join(names)}"):
            arguments = ["--only", name, "--against", against, "--seconds", str(seconds)]
            models[name] = record.cold_child("benchmarks.models", arguments, threads)
        console.print(table({name: models[name]}, threads))
        if path is not None:  # after each model: a long run that is stopped keeps its figures
            facts = record.provenance(threads) | {"models": models, "geomeans": geomeans(models)}
            record.write_json(path, facts)
    for key, item in geomeans(models).items():
        console.print(f"{key.replace('_', ' ')}: {item}", highlight=False)


if __name__ == "__main__":
    main()
