"""Tests that take long: `make test` leaves them to `make test-all`.

`long_tests.json` names them, by file. It is written from a report of pytest's:

    python -m pytest -m "not slow" -n 15 --junitxml=REPORT
    python -m tests.long_tests REPORT

A test is long if its cases take more than `MOST_SECONDS` on average; the shortest of a file stays, and so do the laws
of the code itself. Long tests that a report of `make test` knows nothing of stay long; a slower machine may have more
seconds:

    make test ARGS="--junitxml REPORT"
    python -m tests.long_tests REPORT 1.2
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

TABLE = Path(__file__).with_suffix(".json")
MOST_SECONDS = 0.5
"""Then two cores run the others in a quarter of an hour."""
LAWS = frozenset(
    {"tests/test_layers.py", "tests/test_folders.py", "tests/test_init.py", "tests/end_to_end/test_corpus.py"}
)
"""Every landing holds them."""

Names = Mapping[str, Sequence[str]]
"""Names of functions, by file."""


def long_tests() -> Names:
    """The tests that are long."""
    return json.loads(TABLE.read_text())


def measured(report: Path) -> dict[str, dict[str, list[float]]]:
    """The seconds of each case, by file and function of a report."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        found[file][case.get("name", "").partition("[")[0]].append(float(case.get("time", "0")))
    return found


def chosen(
    seconds: Mapping[str, Mapping[str, Sequence[float]]],
    most: float = MOST_SECONDS,
    known: Names = MappingProxyType({}),
) -> Names:
    """The long ones of these, and those that are `known` and did not run."""
    found: dict[str, list[str]] = {}
    for file in sorted((seconds.keys() | known.keys()) - LAWS):
        ran = seconds.get(file, {})
        means = {name: sum(each) / len(each) for name, each in ran.items()}
        shortest = min(means, key=lambda name: means[name], default="")
        left = {name for name in known.get(file, ()) if name not in ran}
        names = sorted(left | {n for n, mean in means.items() if mean > most and n != shortest})
        if names:
            found[file] = names
    return found


def main(report: str, most: str = str(MOST_SECONDS)) -> None:
    """Write the table anew."""
    TABLE.write_text(json.dumps(chosen(measured(Path(report)), float(most), long_tests()), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
