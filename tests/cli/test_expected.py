"""How long something still takes: told from its last time, and from how far a counted phase is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewright.cli.expected import Expected, about
from tilewright.progress import Event


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(path: Path, clock: Clock, name: str = "compiling m", build: float = 30.0) -> Expected:
    """10 s of scheduling, some of building (with a phase inside), 5 s that no phase has."""
    expected = Expected(name, path, clock)
    for phase, seconds in (("schedule", 10.0), ("build", build)):
        expected.hear(Event(phase))
        expected.hear(Event("inside"))
        clock.now += seconds
        expected.hear(Event("inside", seconds))
        expected.hear(Event(phase, seconds))
    clock.now += 5.0
    expected.keep()
    return expected


def test_what_is_left_is_what_the_last_time_took(tmp_path: Path) -> None:
    clock = Clock()
    assert run(tmp_path / "e.json", clock).left is None
    second = Expected("compiling m", tmp_path / "e.json", clock)
    assert second.known == {"schedule": 10.0, "build": 30.0, "": 5.0} and second.left == 45.0
    second.hear(Event("schedule"))
    clock.now += 4
    assert second.left == 41.0
    clock.now += 16  # longer than the last time
    second.hear(Event("schedule", 20.0))
    assert second.left == 35.0
    assert Expected("compiling other", tmp_path / "e.json", clock).left is None


def test_a_count_tells_more_than_the_last_time(tmp_path: Path) -> None:
    clock = Clock()
    run(tmp_path / "e.json", clock)
    for expected, rest in (
        (Expected("compiling m", tmp_path / "e.json", clock), 35.0),
        (Expected("new", None, clock), 0.0),
    ):
        expected.hear(Event("schedule"))
        expected.hear(Event("schedule", None, 0, 40))
        clock.now += 6
        expected.hear(Event("schedule", None, 12, 40))
        assert expected.left == pytest.approx(6 / 12 * 28 + rest)


def test_the_last_time_counts_and_short_things_are_not_kept(tmp_path: Path) -> None:
    path, clock = tmp_path / "e.json", Clock()
    for build in (30.0, 2.0):
        run(path, clock, build=build)
    assert json.loads(path.read_text())["compiling m"]["build"] == 2.0
    short = Expected("short", path, clock)
    clock.now += 0.5
    short.keep()
    for k in range(120):
        run(path, clock, f"m{k}")
    kept = json.loads(path.read_text())
    assert len(kept) == 100 and "short" not in kept and "m119" in kept


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[[[", '{"compiling m": 3}', '{"compiling m": {"build": "x"}}', "\xff"]
)
def test_a_file_that_says_nothing_is_nothing(text: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(text, encoding="latin-1")
    assert Expected("compiling m", path).left is None
    assert Expected("compiling m", tmp_path / "absent" / "e.json").left is None
    run(tmp_path / "absent" / "e.json", Clock())


def test_words() -> None:
    assert [about(s) for s in (None, 0.4, 12.2, 300.0)] == ["", "", "about 12 s left", "about 5 min left"]
