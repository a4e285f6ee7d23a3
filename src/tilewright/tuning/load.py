"""Reads the records of `thresholds` from the tables beside this file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from tilewright.errors import InputError


class DataRecord(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


R = TypeVar("R", bound=DataRecord)

FILES = ("cpu.json", "gpu.json", "common.json")
UNITS = frozenset(
    (
        "accesses", "bytes", "chunks", "columns", "cores", "elements", "instructions", "instructions/second", "kernels",
        "lanes", "launches", "levels", "loads", "nodes", "operations", "ops", "parts", "pieces", "points", "products",
        "ratio", "registers", "rows", "seconds", "stages", "steps", "taps", "tasks", "tiles", "warps",
    )
)  # fmt: skip
PARTS = frozenset(("value", "unit", "why", "source"))
SOURCES = ("benchmarks/results/", "fact: ", "estimate: ")
"""How a source begins: the file of results that shows the value, and the way to it there (`FILE#KEY/KEY`); what makes
it so, of hardware, an interface or arithmetic; or why this value was guessed, in a few words."""


def load(record: type[R], name: str) -> R:
    """The record `name` of the tables."""
    return read_record(record, name, _tables())


def read_record(record: type[R], name: str, tables: Mapping[str, Any]) -> R:
    """The entries of `tables` under `name`, by file, as a record: each of its fields stands in one file, and nothing
    else does."""
    entries: dict[str, Any] = {}
    for file, table in tables.items():
        for field, entry in table.get(name, {}).items():
            if field in entries:
                raise _refused(f"{name}.{field} stands in two tables", file)
            entries[field] = _value(f"{name}.{field}", entry, file)
    kinds = {f.name: str(f.type) for f in fields(record)}
    if kinds.keys() != entries.keys():
        raise _refused(f"{name} lacks or has too much: {sorted(kinds.keys() ^ entries.keys())}", "tuning")
    for field, kind in kinds.items():
        if _kind(entries[field]) != kind:
            raise _refused(f"{name}.{field} is no {kind}: {entries[field]!r}", "tuning")
    return record(**entries)


@cache
def _tables() -> dict[str, Any]:
    folder = Path(__file__).parent
    return {file: json.loads((folder / file).read_text(encoding="utf-8")) for file in FILES}


def _value(name: str, entry: Any, file: str) -> object:
    """What an entry says, if it says all that it should."""
    if not isinstance(entry, dict) or entry.keys() != PARTS:
        raise _refused(f"{name} needs {', '.join(sorted(PARTS))}", file)
    if entry["unit"] not in UNITS:
        raise _refused(
            f"{name} has the unit {entry['unit']!r}, which is none of {', '.join(sorted(UNITS))}", file
        )
    if not entry["why"]:
        raise _refused(f"{name} does not say why", file)
    if not str(entry["source"]).removesuffix(" ").startswith(SOURCES):
        raise _refused(f"{name} has a source that is none of {', '.join(SOURCES)}: {entry['source']!r}", file)
    value = entry["value"]
    return tuple(value) if isinstance(value, list) else value


def _kind(value: object) -> str:
    """The type of a value as a field declares it."""
    if isinstance(value, tuple) and value and {type(x) for x in value} == {int}:
        return "tuple[int, ...]"
    if isinstance(value, float) and not math.isfinite(value):
        return "no number"
    return type(value).__name__


def _refused(what: str, file: str) -> InputError:
    return InputError(f"thresholds: {what}", phase="input", place=file)
