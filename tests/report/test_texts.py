"""Numbers and names as people read them; the machine that they come from."""

from __future__ import annotations

import pytest
import torch

from tilewright.report import texts
from tilewright.report.environment import environment


def test_bytes_have_units() -> None:
    found = [texts.size(n) for n in (12, 2048, 5 << 20, 3 << 30, None)]
    assert found == ["12 B", "2.0 KiB", "5.0 MiB", "3.00 GiB", "-"]


def test_three_digits_and_a_unit() -> None:
    seconds = (0.0, 1.234e-6, 12.34e-6, 123.4e-6, 999.6e-6, 1.5e-3, 12.0, -2e-3, None)
    found = [texts.duration(s) for s in seconds]
    assert found == [
        "0 us",
        "1.23 us",
        "12.3 us",
        "123 us",
        "1.00 ms",
        "1.50 ms",
        "12.0 s",
        "-2.00 ms",
        "-",
    ]
    counts = (0, 7, 999, 1000, 12_345, 1.5e6, 2e9, 3e12, None)
    assert [texts.count(n) for n in counts] == ["0", "7", "999", "1 k", "12.3 k", "1.50 M", "2 G", "3 T", "-"]
    assert [texts.count(5, "flop"), texts.count(5e9, "flop/s")] == ["5 flop", "5 Gflop/s"]
    assert (texts.percent(0.1234), texts.ratio(1.25), texts.ratio(None)) == ("12.3 %", "1.25x", "-")


@pytest.mark.parametrize(
    ("text", "plain", "lines"),
    [
        ("plain", "plain", "plain"),
        ("a\tb\nc", "a\ufffdb\ufffdc", "a\tb\nc"),
        ("\u202eabc\u200f", "\ufffdabc\ufffd", "\ufffdabc\ufffd"),
        ("\x1b[31m\r\u2028", "\ufffd[31m\ufffd\ufffd", "\ufffd[31m\ufffd\ufffd"),
    ],
)
def test_what_shows_nothing_is_marked(text: str, plain: str, lines: str) -> None:
    assert (texts.printable(text), texts.printable(text, lines=True)) == (plain, lines)


def test_long_texts_are_shortened() -> None:
    assert texts.shortened("abcdef", 6) == "abcdef" and texts.shortened("abcdefg", 6) == "abcde\u2026"


def test_environment_names_the_machine_and_torch() -> None:
    facts = environment()
    assert facts["torch"] == torch.__version__ and facts["cpu"] and int(facts["cores"]) >= 1
