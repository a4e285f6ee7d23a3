"""Tables of measured block sizes: reading, refusing, merging, and what schedules make of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.tune import relative
from tests.support.corpus import Case
from tests.support.one_kernel import capture, one_kernel

from tilewright.errors import InputError
from tilewright.ir.schedule import Schedule
from tilewright.options import Options
from tilewright.schedule.product_table import parse_products
from tilewright.schedule.solver import Solver
from tilewright.schedule.table import FOLDER, FastestBlock, Tuning, parse_table
from tilewright.target import PRESETS
from tilewright.tuning.load import FILES

ROWS = FastestBlock("rows", 4, 1024, 4096, 0, 2)


def test_tables_of_the_package_are_sorted_and_complete() -> None:
    tables = [path for path in FOLDER.glob("*.json") if path.name not in FILES]  # the others hold thresholds
    assert tables
    for path in tables:
        assert path.stem.removesuffix("_products") in PRESETS
        parse = parse_products if path.stem.endswith("_products") else parse_table
        assert parse(path.read_text(), path.name).text() == path.read_text()


def test_text_and_back() -> None:
    made = Tuning().merged([ROWS, FastestBlock("flat", 2, 4096, 2048)])
    assert parse_table(made.text(), "x") == made


def test_a_new_entry_replaces_the_old_one() -> None:
    made = Tuning((ROWS,)).merged([FastestBlock("rows", 4, 1024, 8192)])
    assert [e.elements for e in made.entries] == [8192]


@pytest.mark.parametrize(("length", "found"), [(1024, True), (2000, True), (512, True), (4096, False)])
def test_the_nearest_length_is_found(length: int, found: bool) -> None:
    assert (Tuning((ROWS,)).find("rows", 4, length) is not None) == found


@pytest.mark.parametrize("text", ["{", "[1]", '[{"kind": "rows"}]', '[{"kind": "other", "bytes": 4}]'])
def test_refusals(text: str) -> None:
    with pytest.raises(InputError, match="not a table"):
        parse_table(text, "there")


def test_a_schedule_follows_the_table() -> None:
    graph = capture(Case("softmax", lambda x: torch.softmax(x, -1), ((9000, 1000),)), False)
    solver = Solver(PRESETS["sm_90"], Options(), Tuning((ROWS,)))
    schedule = solver.solve(one_kernel(graph), graph.layouts).schedule
    assert isinstance(schedule, Schedule)
    assert [c.tile for c in schedule.tiling.classes] == [4, 1024] and schedule.launch.warps == 2


UNMEASURED = frozenset({"columns", "row_totals", "rows", "square", "stream_totals", "streams"})
"""Kinds of which some entries wait for a new measurement: what was measured once is in no file of results."""


def test_every_entry_was_measured_and_is_among_the_fastest() -> None:
    results = Path(__file__).parents[2] / "benchmarks/results/h200"
    files = [json.loads(p.read_text())["cases"] for p in sorted(results.glob("tune*.json"))]
    groups: dict[str, list[dict[FastestBlock, float]]] = {}
    for name, facts in (item for cases in files for item in cases.items()):
        timed = {FastestBlock(**json.loads(e)): s for e, s in facts["seconds"].items()}
        groups.setdefault("-".join(name.split("-")[: 4 if "-odd" in name else 3]), []).append(timed)
    missing: list[FastestBlock] = []
    for entry in parse_table((FOLDER / "sm_90.json").read_text(), "sm_90").entries:
        group = f"{entry.kind}-{entry.bytes}-{entry.length}{'-odd' if entry.odd else ''}"
        if group not in groups:
            missing.append(entry)
            continue
        ratios = relative(groups[group])
        assert ratios[entry] <= 1.03 * min(ratios.values()), entry
    assert {e.kind for e in missing} == UNMEASURED and len(missing) == 52, (
        "what is measured again leaves the list"
    )
