"""Where the command writes: terminals of few characters, colours or columns, streams that are closed or full."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tilewright.cli.show import Screen, say

SOURCE = Path(__file__).parents[2] / "src"
ASCII = {"PYTHONIOENCODING": "ascii"}
COLUMNS = ("runs", "whose", "why it ends there")
ROWS = (("k0", "generated", "separate kernels are faster"), ("k1", None, "its result is an output"))


def command(words: str, redirected: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a shell that redirects its streams, in a process that is its own."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -m tilewright {words} {redirected}', sys.executable], check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment}, capture_output=True, text=True,
    )  # fmt: skip


def told(encoding: str = "utf-8", width: int = 80) -> tuple[Screen, io.BytesIO]:
    """A screen that is a terminal of this width, and the bytes that it gets."""
    raw, screen = io.BytesIO(), Screen(None)
    text = io.TextIOWrapper(raw, encoding, "backslashreplace", write_through=True)
    screen.out = screen.err = Console(file=text, width=width, force_terminal=True, color_system=None)
    return screen, raw


def test_names_that_a_terminal_cannot_show_are_escaped() -> None:
    done = command("run größe.onnx", **ASCII)
    assert done.returncode == 2 and r"no such file (at gr\xf6\xdfe.onnx)" in done.stderr
    assert "größe.onnx" in command("run größe.onnx", PYTHONIOENCODING="utf-8").stderr


def test_results_of_any_name_are_written(tmp_path: Path) -> None:
    """Results go to stdout, which is strict where Python chooses."""
    done = command("cache", TILEWRIGHT_CACHE_DIR=str(tmp_path / "größe"), **ASCII)
    assert done.returncode == 0 and r"gr\xf6\xdfe" in done.stdout, done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_progress_turns_in_characters_of_the_terminal(encoding: str) -> None:
    screen, raw = told(encoding)
    with screen.watching("compiling m"):
        pass
    text = raw.getvalue().decode(encoding)
    assert "compiling m" in text and "\\u" not in text


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_wrong_use_is_told_without_colours_where_none_are_wanted(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    for given in ({"TERM": "xterm", "NO_COLOR": ""}, environment):
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stderr", stream)
        say("error: no", "red")
        shown.append(stream.getvalue())
    assert "\x1b[31m" in shown[0] and shown[1] == "error: no\n"


def test_rows_are_blocks_where_words_would_be_cut() -> None:
    for width, blocks in ((80, False), (24, True)):
        screen, raw = told(width=width)
        screen.table("kernels", COLUMNS, ROWS)
        lines = raw.getvalue().decode().splitlines()
        assert all(len(line) <= width for line in lines)
        words = [word for line in lines for word in line.split()]
        assert all(word in words for row in ROWS for cell in row if cell for word in cell.split())
        assert any(line.split() == ["whose", "generated"] for line in lines) == blocks


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_columns_stand_below_each_other_in_any_encoding(encoding: str) -> None:
    screen, raw = told(encoding)
    screen.table("inputs", ("name", "type"), (("größe", "f32"), ("x", "f32")))
    _, *lines = raw.getvalue().decode(encoding).splitlines()
    assert len({line.index(word) for line, word in zip(lines, ("type", "f32", "f32"), strict=True)}) == 1


def test_a_table_without_rows_is_left_out() -> None:
    screen, raw = told()
    screen.table("kernels", COLUMNS, ())
    assert raw.getvalue() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
@pytest.mark.parametrize(
    "words", ["cache", "cache --json -", "--help", "--version", "help", "help run", "run --help"]
)
def test_a_full_device_is_one_line(words: str, tmp_path: Path) -> None:
    done = command(words, ">/dev/full", TILEWRIGHT_CACHE_DIR=str(tmp_path))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "No space left on device" in line and "stdout" in line and "make room there" in line


@pytest.mark.parametrize(("redirected", "code"), [(">&-", 0), ("2>&-", 0), ("| head -c 1", 0)])
def test_streams_that_are_closed_harm_nothing(redirected: str, code: int, tmp_path: Path) -> None:
    done = command("cache --json -", redirected, TILEWRIGHT_CACHE_DIR=str(tmp_path))
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_errors_keep_their_code_without_streams(closed: str) -> None:
    assert command("run nothing.onnx", closed).returncode == 2
