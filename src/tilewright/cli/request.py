"""What every verb is asked, and the exit codes that it answers with."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from .show import Screen


class ExitCode(IntEnum):
    """What a verb answers with."""

    OK = 0
    FAILED = 1
    WRONG_USE = 2
    UNSUPPORTED = 3
    CHECK_FAILED = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """What every verb is asked, as plain data: the model's name, its inputs as typed, how to compile."""

    model: str
    files: tuple[str, ...]
    shapes: tuple[str, ...]
    threads: int | None
    strict: bool
    freeze: bool | None
    options: tuple[str, ...]
    seed: int

    def asked(self) -> dict[str, Any]:
        """These fields by name, without those of a subclass."""
        return {f.name: getattr(self, f.name) for f in fields(Asked)}


@dataclass(frozen=True, slots=True)
class Request(Asked):
    """What is asked, and where to write."""

    screen: Screen

    @contextmanager
    def progress(self, text: str) -> Generator[None]:
        """Shows on stderr what goes on, while it does."""
        with self.screen.err.status(text):
            yield
