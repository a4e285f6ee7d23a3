"""JSON in one form alone: what is written is canonical, and what is read must be just that."""

from __future__ import annotations

import json
from typing import NoReturn

from tilewright.errors import ArtifactError
from tilewright.ir.text.values import Json
from tilewright.tuning.input_limits import ARTIFACTS

CHANGED = "make it again with `tilewright compile MODEL -o FILE`"
"""What to do where a file is damaged."""


def dump(value: Json) -> bytes:
    """The one text of a value: keys sorted, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def parse(data: bytes, place: str) -> Json:
    """The value of a text that `dump` wrote. Raises ArtifactError for any other text."""
    if len(data) > ARTIFACTS.max_text_bytes:
        raise damaged(f"{len(data)} bytes of text are too many", place)
    try:
        value = json.loads(data.decode("ascii"), object_pairs_hook=_distinct, parse_constant=_no_constant)
        if _depth(value) <= ARTIFACTS.max_depth and dump(value) == data:
            return value
    except (ValueError, RecursionError) as bad:  # RecursionError: nested too deeply for Python
        raise damaged(f"no JSON: {type(bad).__name__}: {bad}", place) from bad
    raise damaged("the text is not in its one form", place)


def damaged(what: str, place: str) -> ArtifactError:
    """The error for something that `save` never writes."""
    return ArtifactError(f"the artifact is damaged: {what}", place=place, hint=CHANGED)


def _distinct(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice")
    return made


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _depth(value: Json) -> int:
    """Levels of a value, counted without recursion; at most one more than are allowed."""
    level: list[Json] = [value]
    for depth in range(ARTIFACTS.max_depth + 1):
        if not level:
            return depth
        parts: list[Json] = []
        for x in level:
            if isinstance(x, dict):  # not Mapping, whose check takes most of the time of reading
                parts += x.values()
            elif isinstance(x, list):
                parts += x
        level = parts
    return ARTIFACTS.max_depth + 1
