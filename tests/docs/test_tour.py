"""The tour through the phases runs and prints every form."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

HEADINGS = (
    "Graph: what is computed",
    "Graph, normalised",
    "Cover: which ops share a kernel",
    "Form of kernel 0",
    "Schedule of kernel 0",
    "TileProgram of kernel 0",
    "Tile-graph: the memory level of every edge",
    "TileProgram, legalised",
    "Source: the emitted C++",
    "Plan: what runs",
    "Trace: the phases",
    "The result",
)


def test_the_tour_prints_every_form_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    tour = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "tour.py"))
    assert tour["main"]()
    text = capsys.readouterr().out
    places = [text.find(f"== {heading}") for heading in HEADINGS]
    assert -1 not in places and places == sorted(places)
    for form in (
        "= sum(r0:48)",
        "library  ",
        "$0 = max(",
        "lane=",
        "state v0",
        "max@0 -> exp@0",
        "bytes that one row of kernel 0 takes: DEVICE",
        "static void k0",
        "launch k0(",
        "PASS",
    ):
        assert form in text, form
