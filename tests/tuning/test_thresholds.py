"""Numbers that somebody chose: tables and records agree, and what does not is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tilewright.errors import InputError
from tilewright.tuning import runtime_thresholds, thresholds
from tilewright.tuning.load import FILES, read_record

FOLDER = Path(thresholds.__file__).parent
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Some:
    """A record."""

    max_rows: int
    min_gain_ratio: float
    lengths_elements: tuple[int, ...]


def entry(value: object, **other: object) -> dict[str, object]:
    return {
        "value": value,
        "unit": "rows",
        "why": "More are slower.",
        "source": "estimate: half of ten",
    } | other


TABLES: Mapping[str, Any] = {
    "cpu.json": {"some": {"max_rows": entry(4)}},
    "common.json": {"some": {"min_gain_ratio": entry(1.5), "lengths_elements": entry([4, 8])}},
}


def test_a_record_is_read_from_several_tables() -> None:
    assert read_record(Some, "some", TABLES) == Some(4, 1.5, (4, 8))


@pytest.mark.parametrize(
    ("file", "field", "wrong", "why"),
    [
        ("cpu.json", "max_rows", entry(4.0), "is no int"),
        ("cpu.json", "max_rows", entry(True), "is no int"),
        ("cpu.json", "max_rows", entry(4, unit="furlongs"), "has the unit"),
        ("cpu.json", "max_rows", entry(4, why=""), "does not say why"),
        ("cpu.json", "max_rows", entry(4, source=""), "has a source"),
        ("cpu.json", "max_rows", entry(4, source="estimate"), "has a source"),
        ("cpu.json", "max_rows", entry(4, source="estimate: "), "has a source"),
        ("cpu.json", "max_rows", entry(4, source="a friend"), "has a source"),
        ("cpu.json", "max_rows", entry(4, since=1), "needs"),
        ("cpu.json", "max_rows", 4, "needs"),
        ("cpu.json", "min_gain_ratio", entry(1.5), "in two tables"),
        ("cpu.json", "more", entry(1), "lacks or has too much"),
        ("common.json", "min_gain_ratio", entry(float("nan")), "is no float"),
        ("common.json", "lengths_elements", entry([4, 0.5]), "is no tuple"),
    ],
)
def test_what_does_not_agree_is_refused(file: str, field: str, wrong: object, why: str) -> None:
    tables = deepcopy(dict(TABLES))
    tables[file]["some"][field] = wrong
    with pytest.raises(InputError, match=re.escape(why)):
        read_record(Some, "some", tables)


def test_a_field_without_an_entry_is_refused() -> None:
    with pytest.raises(InputError, match="max_rows"):
        read_record(Some, "some", {"common.json": TABLES["common.json"]})


def test_every_table_is_read() -> None:
    both = {**vars(thresholds), **vars(runtime_thresholds)}
    records = {name.lower() for name in both if name.isupper()}
    tables = [json.loads((FOLDER / file).read_text(encoding="utf-8")) for file in FILES]
    assert {name for table in tables for name in table} == records
    assert len(records) > 20


def sources() -> dict[str, str]:
    """The source of each number."""
    tables = [json.loads((FOLDER / file).read_text(encoding="utf-8")) for file in FILES]
    return {f"{n}.{f}": e["source"] for table in tables for n, r in table.items() for f, e in r.items()}


def shown(source: str) -> object:
    """What stands in a file of results where a source points to. Raises KeyError if nothing does."""
    file, _, way = source.partition("#")
    found = json.loads((ROOT / file).read_text(encoding="utf-8"))
    for key in (k.replace("~1", "/") for k in way.split("/")):  # as RFC 6901 writes them
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def test_sources_show_their_numbers() -> None:
    for name, source in sources().items():
        if source.startswith("benchmarks/"):
            assert shown(source) is not None, name


def test_a_source_that_is_not_there_is_noticed() -> None:
    with pytest.raises(FileNotFoundError):
        shown("benchmarks/results/cpu/nothing.json#sweeps")
    with pytest.raises(KeyError):
        shown("benchmarks/results/cpu/thresholds.json#nothing")


def test_a_reason_for_a_guess_is_short() -> None:
    long = {n: s for n, s in sources().items() if s.startswith("estimate: ") and len(s.split()) > 13}
    assert not long


def test_what_was_measured_is_what_is_read() -> None:
    """A value that is changed is measured again."""
    tables = [json.loads((FOLDER / file).read_text(encoding="utf-8")) for file in FILES]
    values = {f"{n}.{f}": e["value"] for t in tables for n, r in t.items() for f, e in r.items()}
    for name, source in sources().items():
        if source.startswith("benchmarks/results/cpu/thresholds.json#sweeps/"):
            measured = shown(source)
            assert isinstance(measured, dict)
            value = values[name]
            assert measured["value"] == str(tuple(value) if isinstance(value, list) else value), name
