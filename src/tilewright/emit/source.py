"""What emit hands over: program text in some language, with the entry points in it."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.target import Language


@dataclass(frozen=True, slots=True)
class Source:
    """One translation unit: `language`, its `text`, and the names of the kernels in it, in plan order."""

    language: Language
    text: str
    entries: tuple[str, ...]
