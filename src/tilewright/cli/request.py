"""What every verb is asked, and the exit codes that it answers with."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from tilewright.cli.show import Screen

OK, FAILED, WRONG_USE, UNSUPPORTED, CHECK_FAILED = 0, 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Request:
    """What every verb knows: the model's name, its inputs as typed, how to compile, where to write."""

    model: str
    files: tuple[str, ...]
    shapes: tuple[str, ...]
    threads: int | None
    strict: bool
    freeze: bool | None
    options: tuple[str, ...]
    seed: int
    screen: Screen

    @contextmanager
    def progress(self, text: str) -> Generator[None]:
        """Shows on stderr what goes on, while it does."""
        with self.screen.err.status(text):
            yield
