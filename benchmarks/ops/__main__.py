"""`python -m benchmarks.ops --json FILE [--device cuda] [--budget SECONDS] [--ops A,B] [--shard 1/4]`: torch's samples
of the core ATen ops, compiled.

Each entry of `op_db` about a core op (`scope.is_core`), at most `--samples` samples per type and way, evenly taken from
its list: fp32, fp16, bf16, int64 and bool with static sizes; with dynamic sizes; on strided tensors; with gradients. A
sample is right if its results (and gradients) pass the fp64 rule, integers are equal, and types and strides are
eager's. Samples of an op share graphs. Entries run in child processes and are noted in FILE.jsonl, so that a run that
was cut off goes on; remove that file to start anew.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path

import click
import torch

from benchmarks.ops import scope
from benchmarks.ops.judge import Outcome, judged
from benchmarks.ops.programs import Program, program, strided
from benchmarks.record import provenance, write_json
from benchmarks.sweep import Facts, Sweep, serve, spread

STATES = ("right", "wrong", "crashed", "refused", "excluded")
WAYS = ("static", "dynamic", "strided", "gradient")
LESS = 4
"""Of the samples with static sizes, one in so many runs in each of the other ways."""


def samples(
    op: scope.OpInfo, dtype: torch.dtype, device: str, most: int, gradient: bool, seed: int
) -> list[Program]:
    """Programs of at most `most` samples; none where torch says that the op does not take the type."""
    kind = torch.device(device).type
    admitted = op.supported_backward_dtypes(kind) if gradient else op.supported_dtypes(kind)
    if dtype not in admitted or (gradient and not op.supports_autograd):
        return []
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(op.sample_inputs(device, dtype, requires_grad=gradient))
    step = max(1, -(-len(found) // most))
    return [program(op, s) for s in found[::step]]


def programs(op: scope.OpInfo, way: str, device: str, most: int, seed: int = 0) -> list[tuple[str, Program]]:
    """The programs of one way with the names of their types."""
    floats = scope.DTYPES[:3]
    dtypes = {"static": scope.DTYPES, "dynamic": (torch.float32, torch.int64), "strided": scope.DTYPES[:1]}
    count = most if way == "static" else max(1, most // LESS)
    found = [
        (str(d)[6:], p)
        for d in dtypes.get(way, floats)
        for p in samples(op, d, device, count, way == "gradient", seed)
    ]
    return [(d, strided(p)) for d, p in found] if way == "strided" else found


def entry(name: str, device: str, most: int) -> Facts:
    """All samples of one entry of `op_db`."""
    op = next(o for o in scope.operators() if o.full_name == name)
    facts: dict[str, int] = Counter()
    failures: list[Facts] = []
    ways: dict[str, Facts] = {}
    for way in WAYS:
        mine = programs(op, way, device, most)

        def again(place: int, seed: int, way: str = way) -> Program | None:
            drawn = programs(op, way, device, most, seed + 1)
            return drawn[place][1] if place < len(drawn) else None

        plain = [p for _, p in mine]
        outcomes = judged(plain, again, dynamic=way == "dynamic", gradients=way == "gradient")
        count: Counter[str] = Counter(o.state for o in outcomes)
        ways[way] = {s: count[s] for s in STATES if count[s]}
        for (dtype, p), o in zip(mine, outcomes, strict=True):
            facts[o.state] += 1
            if o.state != "excluded":
                facts["samples"] += 1
                if way != "gradient":
                    facts[o.how] += 1
            if o.state in ("wrong", "crashed", "refused"):
                failures.append(_failure(way, dtype, p, o))
    kept = ("samples", *STATES, "generated", "chosen", "library")
    return {"kind": scope.kind(op), **{k: facts[k] for k in kept}, "ways": ways, "failures": failures}


def _failure(way: str, dtype: str, p: Program, outcome: Outcome) -> Facts:
    return {
        "state": outcome.state, "way": way, "type": dtype, "call": p.shown()[:300], "said": outcome.said[:500],
    }  # fmt: skip


def totals(entries: dict[str, Facts]) -> Facts:
    """Sums over entries, and the share that is generated of each kind of op."""
    words = ("samples", *STATES, "generated", "chosen", "library")
    sums: dict[str, int] = {w: sum(e.get(w, 0) for e in entries.values()) for w in words}
    shares: dict[str, float] = {}
    for kind in ("pointwise", "reduction", "view", "product", "other"):
        of = [e for e in entries.values() if e.get("kind") == kind]
        made, chosen, all_ = (
            sum(e[w] for e in of for w in ws)
            for ws in (("generated",), ("chosen",), ("generated", "chosen", "library"))
        )
        shares[kind] = round(made / all_, 4) if all_ else 0.0
        if kind == "product":
            shares["product, library by choice"] = round(chosen / all_, 4) if all_ else 0.0
    died = sorted(name for name, e in entries.items() if "died" in e)
    return {**sums, "died": died, "generated share": shares}


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="where to write the figures")
@click.option("--device", default="cpu", show_default=True)
@click.option("--budget", type=float, default=float("inf"), help="seconds")
@click.option("--ops", default="", help="entries by name, separated by commas")
@click.option("--scope", "which", type=click.Choice(["core", "all"]), default="core", show_default=True)
@click.option("--shard", default="", help="n/m: every m-th entry, from the n-th")
@click.option("--samples", "most", default=32, show_default=True, help="per entry, type and way")
@click.option("--workers", default=1, show_default=True)
@click.option("--worker", is_flag=True, hidden=True)
def main(
    path: Path | None, device: str, budget: float, ops: str, which: str, shard: str, most: int, workers: int,
    worker: bool,
) -> None:  # fmt: skip
    """Run and print one line per entry that is not all right, then the sums."""
    if worker:
        warnings.simplefilter("ignore")
        torch.backends.cudnn.allow_tf32 = False  # rules of eleven bits would hide what is wrong
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        serve(lambda name: entry(name, device, most))
        return
    taken = scope.chosen(which, ops)
    excluded = {op.full_name: why for op in taken if (why := scope.excluded(op))}
    names = spread([op.full_name for op in taken if op.full_name not in excluded], shard)
    ledger = path.with_suffix(path.suffix + "l") if path is not None else None
    arguments = ("--device", device, "--samples", str(most))

    def report(name: str, facts: Facts) -> None:
        bad = {w: facts[w] for w in ("wrong", "crashed", "refused", "died") if facts.get(w)}
        if bad:
            click.echo(f"{name}: {bad} of {facts.get('samples', '?')}")
        for failure in facts.get("failures", [])[:3]:
            click.echo(f"    {failure['state']} {failure['way']} {failure['call']}: {failure['said']}")

    entries = Sweep("benchmarks.ops", arguments, workers, budget, ledger=ledger).run(names, report)
    facts: Facts = {
        **provenance(torch.get_num_threads()), "totals": totals(entries), "excluded": excluded,
        "missing": [n for n in names if n not in entries], "entries": entries,
    }  # fmt: skip
    click.echo(str(facts["totals"]))
    if path is not None:
        write_json(path, facts)


if __name__ == "__main__":
    main()
