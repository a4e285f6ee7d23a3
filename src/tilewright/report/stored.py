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
_BEYOND = 1 << 80
"""No count, size or time is as large; and sums of smaller ones are finite."""


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
    facts = cast(ReportFacts, _read(ReportFacts, known.get("report"), place))
    for graph in facts.graphs:
        named = [n for e in graph.edges for n in (e.start, e.end) if n is not None]
        sources = [s.source for s in graph.steps if s.source is not None]
        if max(named, default=-1) >= len(graph.steps) or max(sources, default=-1) >= len(facts.sources):
            raise InputError(f"{place} names steps or sources that it lacks", phase="report", place=place)
    return facts


def read_facts(path: str) -> ReportFacts:
    """The facts in a file. Raises InputError."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        hint = "`tilewright report MODEL --json FILE` writes one"
        raise InputError(f"cannot read a report: {error}", phase="report", place=path, hint=hint) from error
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
    elif of is float and type(data) in (int, float):
        if 0 <= cast(float, data) < _BEYOND:
            return float(cast(float, data))
    elif of is int and type(data) is int:
        if 0 <= data < _BEYOND:
            return data
    elif of in (str, bool) and type(data) is of:
        return data
    raise InputError(f"{place} is not what a report has there", phase="report", place=place)
