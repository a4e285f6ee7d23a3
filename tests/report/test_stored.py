"""Facts as JSON: what is read is what was written, and nothing else is read; runs beside each other."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.report_facts import synthetic

from tilewright.errors import InputError
from tilewright.report.compare import compared
from tilewright.report.page import page
from tilewright.report.stored import from_json, read_facts, to_json


def test_facts_come_back() -> None:
    facts = synthetic(20)
    assert from_json(json.loads(json.dumps(to_json(facts))), "here") == facts


@pytest.mark.parametrize(
    "path",
    [
        ("format",),
        ("report", "title"),
        ("report", "graphs", 0, "steps", 1, "flops"),
        ("report", "environment", 0, 1),
    ],
)
@pytest.mark.parametrize("wrong", [[], {}, "x", -1.5, True], ids=repr)
def test_other_data_are_refused(path: tuple[str | int, ...], wrong: object) -> None:
    data: Any = json.loads(json.dumps(to_json(synthetic(3))))
    place = copy.deepcopy(data)
    inner = place
    for key in path[:-1]:
        inner = inner[key]
    if isinstance(wrong, str) and isinstance(inner[path[-1]], str):
        return  # another name is another name
    inner[path[-1]] = wrong
    with pytest.raises(InputError):
        from_json(place, "here")


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format": 2}', "[" * 100_000])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(InputError, match="report"):
        read_facts(str(file))
    with pytest.raises(InputError, match="cannot read"):
        read_facts(str(tmp_path / "absent.json"))


VALUES = (
    None,
    True,
    -1,
    0,
    10**9,
    1 << 90,
    -0.5,
    1e-300,
    1e300,
    float("inf"),
    float("nan"),
    "",
    "x" * 5000,
    [],
    {},
)


def leaves(data: Any) -> list[tuple[Any, Any]]:
    """Every place in nested data, as what holds it and its key."""
    found: list[tuple[Any, Any]] = []
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        found += [(data, key), *leaves(data[key])]
    return found


def test_any_other_file_is_refused_or_shown() -> None:
    """Nothing else than InputError, whatever stands in one place."""
    dice = random.Random(7)
    refused = 0
    for _ in range(150):
        data: Any = json.loads(json.dumps(to_json(synthetic(3))))
        holder, key = dice.choice(leaves(data["report"]))
        holder[key] = dice.choice(VALUES)
        try:
            facts = from_json(data, "here")
        except InputError:
            refused += 1
        else:
            assert page(facts, facts).startswith("<!doctype html>")
    assert 30 < refused < 150


def test_missing_and_unknown_fields_are_refused() -> None:
    for change in (lambda d: d.pop("title"), lambda d: d.update(more=1)):
        data: Any = json.loads(json.dumps(to_json(synthetic(3))))
        change(data["report"])
        with pytest.raises(InputError):
            from_json(data, "here")


def test_steps_of_equal_ops_stand_beside_each_other() -> None:
    (before,) = synthetic(10).graphs
    first, *others = before.steps
    slower = replace(first, measured=(first.measured or 0) + 1.0)
    now = replace(before, steps=(slower, *others[:-1], replace(others[-1], ops=("aten.new",))))
    found = compared(before, now)
    assert found.steps[0].number == 0 and found.steps[0].change == pytest.approx(1.0)
    assert [s.before is None for s in found.steps].count(True) == 1
    assert [s.now is None for s in found.steps].count(True) == 1
    assert len(found.steps) == 11 and found.rest == 0
