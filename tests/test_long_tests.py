"""The table of long tests names tests that exist, and is what a report says."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.long_tests import LAWS, MOST_SECONDS, chosen, long_tests, measured

ROOT = Path(__file__).parents[1]


def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


def test_long_tests_exist_and_none_is_a_whole_file() -> None:
    table = long_tests()
    assert len(table) > 100
    for file, names in table.items():
        there = functions(file)
        assert not {*names} - there, f"python -m tests.long_tests writes the table: {file} has changed"
        assert there - {*names}, f"all tests of {file} are left to `make test-all`"


def test_a_report_is_read(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = [("a", "x", 3 * MOST_SECONDS), ("a", "y[1-b]", MOST_SECONDS / 2), ("a", "y[2]", 2 * MOST_SECONDS)]
    cases += [("b", "only", 9 * MOST_SECONDS), ("c", "short", 0.0), ("a", "z", 0.0)]
    rows = (f'<testcase classname="tests.m.{f}" name="test_{n}" time="{s}"/>' for f, n, s in cases)
    report.write_text(f"<testsuites><testsuite>{''.join(rows)}</testsuite></testsuites>")
    assert chosen(measured(report)) == {"tests/m/a.py": ["test_x", "test_y"]}


def test_laws_of_the_code_are_never_long() -> None:
    seconds = {file: {"test_a": [9 * MOST_SECONDS], "test_b": [0.0]} for file in (*LAWS, "tests/m/a.py")}
    assert chosen(seconds) == {"tests/m/a.py": ["test_a"]}
    assert not LAWS & long_tests().keys()


def test_what_a_report_does_not_know_stays_long() -> None:
    seconds = {"tests/m/a.py": {"test_a": [2.0], "test_b": [0.0], "test_c": [0.9]}}
    known = {"tests/m/a.py": ["test_b", "test_z"], "tests/m/b.py": ["test_y"]}
    assert chosen(seconds, 1.0, known) == {"tests/m/a.py": ["test_a", "test_z"], "tests/m/b.py": ["test_y"]}
