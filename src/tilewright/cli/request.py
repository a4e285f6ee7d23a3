"""What every verb is asked, and the exit codes that it answers with."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from typing import Any

from .show import Screen


class ExitCode(IntEnum):
    """What a verb answers with."""

    OK = 0
    FAILED = 1
    WRONG_USE = 2
    UNSUPPORTED = 3
    CHECK_FAILED = 4
    INTERRUPTED = 130


class Precision(Enum):
    """In which type a model computes."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class Asked:
    """What every verb is asked, as plain data: the model's name, its inputs as typed, how to compile."""

    model: str
    files: tuple[str, ...]
    shapes: tuple[str, ...]
    dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    device: str | None
    precision: str | None
    threads: int | None
    strict: bool
    freeze: bool | None
    options: tuple[str, ...]
    seed: int
    trust: bool

    def asked(self) -> dict[str, Any]:
        """These fields by name, without those of a subclass."""
        return {f.name: getattr(self, f.name) for f in fields(Asked)}


@dataclass(frozen=True, slots=True)
class CommandRequest(Asked):
    """What is asked, and where to write."""

    screen: Screen

    @contextmanager
    def progress(self, text: str) -> Generator[None]:
        """Shows on stderr what goes on, while it does."""
        with self.screen.watching(text):
            yield
