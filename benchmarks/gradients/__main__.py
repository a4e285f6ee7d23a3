"""`python -m benchmarks.gradients --json FILE [--device cuda] [--budget SECONDS] [--programs A,B] [--shard 1/4]`: one
training step of small programs, compiled.

Each program runs in five layouts of its inputs (`variants.LAYOUTS`), in fp32, under bf16 autocast and under fp16
autocast with a scaled loss, with a fixed batch and with one that may change (two sizes). Results, gradients of inputs
and weights, and buffers are judged by the fp64 rule, strides of results are eager's. Layouts share a graph. Cases run
in child processes and are noted in FILE.jsonl, so that a run that was cut off goes on; remove that file to start anew.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import torch

from benchmarks.gradients import functions, nets, training
from benchmarks.gradients.judge import PRECISIONS, Case, judged
from benchmarks.gradients.variants import LAYOUTS
from benchmarks.record import provenance, write_json
from benchmarks.sweep import Facts, Sweep, serve, spread

PROGRAMS = {p.name: p for p in (*nets.PROGRAMS, *functions.PROGRAMS, *training.PROGRAMS)}
STATES = ("right", "wrong", "crashed", "refused", "excluded")


def names(programs: str, precisions: str) -> list[str]:
    """All cases as `program|precision|static or dynamic`: of the named programs and precisions, or of all. Each program
    comes once before any comes twice, in another variant than the one before it."""
    wanted = [w for w in programs.split(",") if w]
    types = [w for w in precisions.split(",") if w] or list(PRECISIONS)
    variants = [(precision, batch) for precision in types for batch in ("dynamic", "static")]
    taken = [p for p in PROGRAMS.values() if p.name in wanted or not wanted]
    return [
        f"{p.name}|{precision}|{batch}"
        for turn in range(len(variants))
        for k, p in enumerate(taken)
        for precision, batch in [variants[(k + turn) % len(variants)]]
        if not (p.fixed and batch == "dynamic") and not (p.plain and precision != "fp32")
    ]


def entry(name: str, device: str, layouts: Sequence[str]) -> Facts:
    """One case, in some layouts."""
    program, precision, batch = name.split("|")
    case = Case(PROGRAMS[program], PRECISIONS[precision], batch == "dynamic", device, tuple(layouts))
    outcomes = judged(case)
    count = Counter(o.state for o in outcomes.values())
    failures = [
        {"state": o.state, "layout": layout, "said": o.said[:500]}
        for layout, o in outcomes.items()
        if o.state != "right"
    ]
    return {**{s: count[s] for s in STATES}, "failures": failures}


def report(name: str, facts: Facts) -> None:
    """Print what is not right."""
    if "died" in facts:
        click.echo(f"{name}: died: {facts['died']}")
    for failure in facts.get("failures", []):
        if failure["state"] != "excluded":
            click.echo(f"{name}|{failure['layout']}: {failure['state']}: {failure['said']}")


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="where to write the figures")
@click.option("--device", default="cpu", show_default=True)
@click.option("--budget", type=float, default=float("inf"), help="seconds")
@click.option("--programs", default="", help="by name, separated by commas")
@click.option("--precisions", default="", help="fp32, bf16, fp16, separated by commas")
@click.option("--layouts", default=",".join(LAYOUTS), show_default=True, help="separated by commas")
@click.option("--shard", default="", help="n/m: every m-th case, from the n-th")
@click.option("--workers", default=1, show_default=True)
@click.option("--worker", is_flag=True, hidden=True)
def main(
    path: Path | None, device: str, budget: float, programs: str, precisions: str, layouts: str, shard: str,
    workers: int, worker: bool,
) -> None:  # fmt: skip
    """Run and print one line per case that is not right, then the sums."""
    if worker:
        warnings.simplefilter("ignore")
        torch.backends.cudnn.allow_tf32 = False  # rules of eleven bits would hide what is wrong
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        serve(lambda name: entry(name, device, layouts.split(",")))
        return
    cases = spread(names(programs, precisions), shard)
    ledger = path.with_suffix(path.suffix + "l") if path is not None else None
    arguments = ("--device", device, "--layouts", layouts)
    entries = Sweep("benchmarks.gradients", arguments, workers, budget, ledger=ledger).run(cases, report)
    sums = {s: sum(e.get(s, 0) for e in entries.values()) for s in STATES}
    totals: Facts = {
        "programs": len({c.split("|")[0] for c in entries}), "cases": sum(sums.values()), **sums,
        "died": sorted(c for c, e in entries.items() if "died" in e),
    }  # fmt: skip
    click.echo(str(totals))
    if path is not None:
        facts: Facts = {
            **provenance(torch.get_num_threads()), "totals": totals,
            "missing": [c for c in cases if c not in entries], "entries": entries,
        }  # fmt: skip
        write_json(path, facts)


if __name__ == "__main__":
    main()
