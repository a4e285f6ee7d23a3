"""How results look: tables on a terminal, and the same facts as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tilewright.errors import InputError
from tilewright.progress import Event, told_to
from tilewright.report.texts import printable
from tilewright.tuning.text_limits import TEXTS

from .expected import Expected, about, place

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"
Cell = str | int | float | None


OWN_PROCESS = "a process of its own"
"""What a command is told that is all that its process does."""


class Clock:
    """What a command spent its time on, from the start of its process, in named phases one after the other."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []
        self._last = time.perf_counter()
        self._first = self._last - _seconds_since_start()
        self.phases.append(("start", self._last - self._first))

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """What runs inside is phase `name`, with all that was not named before it."""
        yield
        self.until_now(name)

    def until_now(self, name: str, parts: Sequence[tuple[str, float]] = ()) -> None:
        """All since the last phase was phase `name`, but for `parts` of it that are known by themselves."""
        now = time.perf_counter()
        self.phases += parts
        self.phases.append((name, now - self._last - sum(seconds for _, seconds in parts)))
        self._last = now

    @property
    def seconds(self) -> float:
        """From the start of the process to now."""
        return time.perf_counter() - self._first


def _seconds_since_start() -> float:
    """How long this process runs already, where the system tells (to a hundredth of a second)."""
    try:
        ticks = int(
            Path("/proc/self/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()[19]
        )
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class Screen:
    """Where a command writes: results to stdout, progress to stderr, facts to the JSON file.

    With `json_path` `-`, JSON takes stdout and the tables go to stderr too.
    """

    def __init__(self, json_path: str | None, *, quiet: bool = False, verbose: bool = False) -> None:
        """`quiet` leaves out all but verdicts; `verbose` says a line of each phase."""
        self.json_path = json_path
        self.quiet = quiet
        self.verbose = verbose
        self.is_alone = False
        """Whether the process is the command's, and ends with it."""
        self.clock = Clock()
        self.warnings: list[str] = []
        self.facts: dict[str, Json] = {}
        out = sys.stderr if json_path == "-" else sys.stdout
        width = None if out.isatty() else TEXTS.table_columns
        self.out = Console(file=out, width=width, highlight=False)
        self.err = Console(stderr=True, highlight=False)

    def line(self, text: str, style: str = "", *, verdict: bool = False) -> None:
        """One line of result, whatever characters it holds."""
        if self.quiet and not verdict:
            return
        self._print(plain(text), style=style, soft_wrap=True)

    @contextmanager
    def watching(self, text: str) -> Generator[None]:
        """Shows what goes on while it does: on a terminal the phase, how far it is, the time since and about how long
        it still takes; elsewhere, if `verbose`, a line of each phase that is over."""
        if self.quiet:
            yield
            return
        expected = Expected(text, place())
        if self.err.is_terminal:
            spinner = SpinnerColumn("dots" if self.err.encoding.startswith("utf") else "line")
            columns = (spinner, TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            with Progress(*columns, _Left(expected), console=self.err, transient=True) as shown:
                task = shown.add_task(one_line(text))

                def heard(event: Event) -> None:
                    expected.hear(event)
                    shown.update(task, description=f"{one_line(text)}: {_going_on(event)}")

                with told_to(heard):
                    yield
        else:
            if self.verbose and expected.known:
                usual = sum(expected.known.values())
                self.err.print(f"{one_line(text)}: {usual:.1f} s the last time", markup=False, soft_wrap=True)
            with told_to(lambda event: self._heard(expected, event)):
                yield
        expected.keep()

    def _heard(self, expected: Expected, event: Event) -> None:
        expected.hear(event)
        if self.verbose and event.seconds is not None:
            self._said(event)

    def _said(self, event: Event) -> None:
        self.err.print(f"{event.phase}: {event.seconds:.2f} s", markup=False, soft_wrap=True)

    def block(self, text: str) -> None:
        """Several lines as they are, for instance a kernel's source."""
        for each in text.splitlines():
            self.line(each)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table, if it has rows; numbers stand right. Where words would be cut for lack of width, each row is a block
        of lines."""
        if self.quiet or not rows:
            return
        rows = [[self._told(cell) for cell in row] for row in rows]
        if len(columns) > 2 and _least_width(columns, rows) > self.out.width:
            self._blocks(title, columns, rows)
            return
        table = Table(title=plain(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
        for i, column in enumerate(columns):
            number = any(isinstance(row[i], int | float) for row in rows)
            table.add_column(plain(column), justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*(plain(cell_text(cell)) for cell in row))
        self._print(table)

    def _blocks(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Rows one below the other, each cell behind the name of its column; empty cells are left out."""
        self._print(plain(title), style="italic")
        for row in rows:
            block = Table(box=None, pad_edge=False, show_header=False)
            block.add_column(overflow="fold")
            block.add_column(overflow="fold")
            for column, cell in zip(columns, row, strict=True):
                if cell is not None:
                    block.add_row(plain(column), plain(cell_text(cell)))
            self._print(block)
            self._print("")

    def _told(self, cell: Cell) -> Cell:
        """A cell with escapes for what the stream cannot show: they count where columns are laid out."""
        if not isinstance(cell, str):
            return cell
        encoding = self.out.encoding
        return cell.encode(encoding, "backslashreplace").decode(encoding)

    def _print(self, shown: RenderableType, style: str = "", *, soft_wrap: bool = False) -> None:
        """To where results go. Raises InputError where that takes no more."""
        try:
            self.out.print(shown, style=style, soft_wrap=soft_wrap)
        except OSError as error:
            raise InputError(
                f"the results cannot be written: {error.strerror}", phase="cli", place="stdout",
                hint="make room there, or write to another place",
            ) from error  # fmt: skip

    def try_json(self) -> None:
        """Open the file for facts, so that one that cannot be written is known before the work. Raises OSError."""
        if self.json_path not in (None, "-"):
            with Path(str(self.json_path)).open("a", encoding="utf-8"):
                pass

    def write_json(self) -> None:
        """Write the collected facts, if asked for. Raises OSError where the file cannot be written."""
        if self.json_path is None:
            return
        text = json.dumps(strict_json(self.facts), indent=2, allow_nan=False) + "\n"
        if self.json_path == "-":
            sys.stdout.write(text)
            sys.stdout.flush()  # at the end of the process nobody would be told what fails
        else:
            Path(self.json_path).write_text(text, encoding="utf-8")


def say(text: str, style: str) -> None:
    """One line on stderr, in colour where the terminal and its user want that."""
    Console(stderr=True, highlight=False).print(plain(text), style=style, soft_wrap=True)


class _Left(ProgressColumn):
    """About how long it still takes."""

    def __init__(self, expected: Expected) -> None:
        super().__init__()
        self._expected = expected

    def render(self, task: Task) -> Text:
        """The words of now."""
        del task
        return Text(about(self._expected.left))


def one_line(text: str) -> str:
    """Text as it may stand in a line of progress, which holds names of models."""
    return plain(" ".join(text.split())).plain


def _going_on(event: Event) -> str:
    return f"{event.phase} {event.done + 1} of {event.total}" if event.total else event.phase


def plain(text: str) -> Text:
    """Text that a terminal shows as it is: no markup, no control characters (names come from model files)."""
    return Text(printable(text.expandtabs(4)))


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> int:
    """The columns that a table needs so that no word is cut."""
    texts = ([name, *(cell_text(row[i]) for row in rows)] for i, name in enumerate(columns))
    words = (max((cell_len(word) for text in each for word in text.split()), default=0) for each in texts)
    return sum(words) + 2 * (len(columns) - 1)


def cell_text(cell: Cell) -> str:
    """A cell: three significant digits for floats, thousands apart for integers, `-` for nothing."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    if not math.isfinite(cell):
        return str(cell)
    return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"


def strict_json(value: object) -> Json:
    """A value that every JSON reader takes: infinities and NaN as strings, paths and types as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): strict_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(each) for each in value]
    return str(value)
