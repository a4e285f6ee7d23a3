"""Plants defects and searches each: `python -m benchmarks.bisect --json FILE`.

A defect counts if it makes a result wrong. It passes if the culprit that `check --bisect` would name is the planted
one, within log2(candidates) + 2 runs of the model."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks import record
from benchmarks.bisect.cases import BUGS
from benchmarks.bisect.judge import find


def main() -> int:
    """1 if a planted defect was not named, or took too many runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="defects whose name contains this")
    arguments = parser.parse_args()
    rows: list[record.Facts] = []
    for bug in BUGS:
        if arguments.only not in str(bug):
            continue
        start = time.process_time()
        found = find(bug)
        if found is None:
            print(f"{bug}: makes no result wrong", flush=True)
            continue
        rows.append({
            "bug": str(bug), "kind": bug.kind, "passed": found.passed, "named": found.named, "runs": found.runs,
            "candidates": found.candidates, "culprit": found.culprit,
            "cpu_seconds": round(time.process_time() - start, 1),
        })  # fmt: skip
        told = "" if found.passed else f" NAMED {found.culprit}"
        print(f"{bug}: {found.runs} runs of {found.most_runs:.1f}{told}", flush=True)
    passed = sum(bool(r["passed"]) for r in rows)
    kinds = Counter(str(r["kind"]) for r in rows)
    facts: record.Facts = {"planted": len(rows), "passed": passed, "kinds": dict(kinds), "bugs": rows}
    print(f"{passed} of {len(rows)} named within the runs")
    if arguments.json is not None:
        record.write_json(arguments.json, record.provenance(1) | facts)
    return 0 if passed == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
