"""Facts as JSON and back: what one run wrote, a later one reads to compare. Every field is checked as it is read."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tilewright.errors import InputError

from .facts import ReportFacts

FORMAT = 1
"""Raised when the meaning of a field changes; other numbers are refused."""


def to_json(facts: ReportFacts) -> dict[str, Any]:
    """The facts as data for `json.dumps`."""
    return {"format": FORMAT, "report": dataclasses.asdict(facts)}


def from_json(data: object, place: str) -> ReportFacts:
    """The facts that `to_json` wrote, alone or among what a verb wrote. Raises InputError for anything else."""
    known = cast(Mapping[str, object], data) if isinstance(data, Mapping) else {}
    number = known.get("format")
    if type(number) is not int or number != FORMAT:
        raise InputError(
            "this is no report that this version can read", phase="report", place=place,
            hint="write one: `tilewright report MODEL --json FILE`",
        )  # fmt: skip
    return cast(ReportFacts, _read(ReportFacts, known.get("report"), place))


def read_facts(path: str) -> ReportFacts:
    """The facts in a file. Raises InputError."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read a report: {error}", phase="report", place=path) from error
    return from_json(data, path)


@functools.cache
def _fields(of: type) -> dict[str, Any]:
    return typing.get_type_hints(of)


def _read(of: Any, data: object, place: str) -> object:
    """`data` as a value of the type `of`."""
    origin = typing.get_origin(of)
    if origin is types.UnionType:
        kinds = [a for a in typing.get_args(of) if a is not type(None)]
        return None if data is None else _read(kinds[0], data, place)
    if origin is tuple and isinstance(data, list):
        parts = typing.get_args(of)
        items = cast("list[object]", data)
        if parts[-1] is Ellipsis:
            return tuple(_read(parts[0], x, f"{place}[{k}]") for k, x in enumerate(items))
        if len(parts) == len(items):
            return tuple(_read(p, x, place) for p, x in zip(parts, items, strict=True))
    elif dataclasses.is_dataclass(of) and isinstance(data, Mapping):
        known, given = _fields(cast(type, of)), cast(Mapping[str, object], data)
        if known.keys() == given.keys():
            return cast(Any, of)(**{n: _read(t, given[n], f"{place}.{n}") for n, t in known.items()})
    elif of is float and isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    elif of in (str, int) and type(data) is of:
        return data
    raise InputError(f"{place} is not what a report has there", phase="report", place=place)
