"""What a schedule tells the printer of C++: rounding of reductions, division by one number, rows side by side."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.corpus import Case, columns
from tests.support.cpp_harness import build, host_target, print_unit
from tests.support.one_kernel import check, solved

from tilewright.ir.program import Stmt, TileProgram, Update, rewrite_body

SQUARES = Case("squares", lambda x, y: (x * y).sum(-1), ((5, 130), (5, 130)))
SOFTMAX = Case("softmax", lambda x: torch.softmax(x, -1), ((6, 100),))
COLUMNS = columns(67, 4096)
DOWN, ACROSS = r"for \(i64 u2 = 0; u2 < \d+; u2\+\+\) \{", r"for \(i64 u1 = 0; u1 < \d+; u1\+\+\) \{"


def apart(program: TileProgram) -> TileProgram:
    """Products rounded before they are added."""

    def change(s: Stmt) -> list[Stmt] | None:
        return [replace(s, fused=False)] if isinstance(s, Update) else None

    return replace(program, body=rewrite_body(program.body, change))


def quotients(program: TileProgram) -> TileProgram:
    """Division as such."""
    return replace(program, reciprocals=False)


def in_turn(program: TileProgram) -> TileProgram:
    """Rows one after the other."""
    return replace(program, beside=None)


@pytest.mark.parametrize(
    ("case", "other", "told"),
    [
        (SQUARES, apart, r"= fma\("),
        (SOFTMAX, quotients, r"divided\("),
        (COLUMNS, in_turn, rf"{ACROSS}\n.*\n *{DOWN}\n.*\n.*\n *const vec.* = load"),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else "",
)
def test_the_printer_does_as_it_is_told(
    case: Case, other: Callable[[TileProgram], TileProgram], told: str, tmp_path: Path
) -> None:
    graph, made = solved(case, False)
    programs = [made.program, other(made.program)]
    texts = [print_unit([p], (), host_target()).text for p in programs]
    assert [bool(re.search(told, t)) for t in texts] == [True, False]
    unit = build(tmp_path, programs)
    for number in (0, 1):
        check(unit, number, graph, made, case, 1)
