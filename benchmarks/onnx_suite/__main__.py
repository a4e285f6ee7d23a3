"""ONNX's backend suite, compiled: every node case, base and expanded, through `tilewright.compile` of its file.

    python -m benchmarks.onnx_suite --json benchmarks/results/cpu/onnx_suite.json

`total` is `passed` + `wrong` + `refused` + `crashed`; `excluded` counts the rest by reason (see excluded.txt).
"""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Mapping
from pathlib import Path

import click
import onnx
from rich.console import Console

from benchmarks import record
from benchmarks.onnx_suite.cases import OLDEST_OPSET, cases, is_expanded, opset_of, reason_for
from benchmarks.onnx_suite.pool import run_cases
from benchmarks.onnx_suite.run import CRASHED, PASSED, REFUSED, WRONG, Outcome
from benchmarks.record import Facts


def summary(outcomes: Mapping[str, Outcome]) -> Facts:
    """Counts, and each case that did not simply pass."""
    counts = collections.Counter(o.status for o in outcomes.values())
    base = [o for n, o in outcomes.items() if not is_expanded(n)]
    seconds = sorted(o.cpu_seconds for o in outcomes.values())
    listed = {s: {n: o.detail for n, o in sorted(outcomes.items()) if o.status == s} for s in _FAILED}
    return {
        "total": len(outcomes),
        **{status: counts[status] for status in (PASSED, *_FAILED)},
        "base": {"total": len(base), "passed": sum(o.status == PASSED for o in base)},
        "ops": sum(o.ops for o in outcomes.values()),
        "ops_generated": sum(o.generated for o in outcomes.values()),
        "cpu_seconds": {
            "sum": round(sum(seconds), 1),
            "median": seconds[len(seconds) // 2] if seconds else 0.0,
            "largest": seconds[-1] if seconds else 0.0,
        },
        "cases": {s: found for s, found in listed.items() if found},
        "noise": {n: o.noise for n, o in sorted(outcomes.items()) if o.noise},
    }


_FAILED = (WRONG, REFUSED, CRASHED)


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--match", default="", help="only cases whose name fits this pattern")
@click.option("--processes", default=2, show_default=True, help="how many run side by side")
def main(path: Path | None, match: str, processes: int) -> None:
    """Run the suite; exit code 1 if a case is wrong or crashed."""
    wanted = [c for c in cases() if re.search(match, c.name)]
    excluded: collections.Counter[str] = collections.Counter(
        filter(None, (reason_for(c.name) for c in wanted))
    )
    names = [c.name for c in wanted if not reason_for(c.name)]
    opsets = sorted({opset_of(c.model) for c in wanted if not reason_for(c.name)})
    console = Console(width=140)
    start = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    for name, outcome in run_cases(names, processes):
        outcomes[name] = outcome
        if outcome.status != PASSED:
            console.print(f"{outcome.status:8} {name}: {outcome.detail}", markup=False, soft_wrap=True)
    facts = summary(outcomes)
    console.print(", ".join(f"{key} {facts[key]}" for key in ("total", PASSED, *_FAILED)))
    console.print(f"excluded {sum(excluded.values())}; {time.monotonic() - start:.0f} s", markup=False)
    if path is not None:
        suite: Facts = {"onnx": onnx.__version__, "opsets": [max(opsets[0], OLDEST_OPSET), opsets[-1]]}
        left: Facts = {"excluded": dict(sorted(excluded.items()))}
        record.write_json(path, record.provenance(1) | suite | facts | left)
    if facts[WRONG] or facts[CRASHED]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
