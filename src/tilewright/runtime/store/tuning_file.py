"""Tuning files: what clocks decided on some devices, as JSON that people read, merge and take along.

    {"schema": 3, "version": ..., "devices": {DEVICE: {"KIND KEY": {...}, ...}, ...}}

A file is data: its names are compared, its texts parsed, nothing in it is run. What it says is held against what a
kernel, or the offers of a library, can be before it is taken.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import cast

from tilewright.errors import InputError, shown
from tilewright.ir.kernel import PREPARATIONS
from tilewright.ir.text.schedule import check_text
from tilewright.tuning.input_limits import TUNING_FILES
from tilewright.tuning.text_limits import TEXTS
from tilewright.tuning.timing_limits import PRODUCTS

from .code_identity import DECIDING, code_identity, package_version

SCHEMA = 3
HINT = "take it out, or write the file again: tilewright tune MODEL -o FILE"
_KEY = re.compile(r"([a-z_]+) [0-9a-f]{32}")
_TOP = ("schema", "version", "devices")

Entry = Mapping[str, object]
"""What was decided of one task: the fields of its kind, and in words `what` it is about."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a file is ignored; whether it is a tuning file all the same, of others than this version and schema."""

    reason: str
    other: bool = False


@dataclass(frozen=True, slots=True)
class TuningFile:
    """Entries by device, and there by kind and key (`entry_name`)."""

    devices: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict[str, Mapping[str, Entry]])

    def merged(self, other: TuningFile) -> TuningFile:
        """With the entries of another one, which win."""
        names = sorted({*self.devices, *other.devices})
        return TuningFile({n: {**self.devices.get(n, {}), **other.devices.get(n, {})} for n in names})

    def text(self) -> str:
        """As JSON, in an order that does not depend on who measured first."""
        devices = {name: dict(sorted(entries.items())) for name, entries in sorted(self.devices.items())}
        facts = {"schema": SCHEMA, "version": version_here(), "devices": _rounded(devices)}
        return json.dumps(facts, indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Replace the file at `path` as a whole: whoever reads it, or finds it after a crash, sees the old one or the
        new one. Raises OSError."""
        target = path.resolve()
        fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with fresh.open("x", encoding="utf-8") as file:
                file.write(self.text())
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, target)
        finally:
            fresh.unlink(missing_ok=True)


def _rounded(value: object) -> object:
    """With seconds of as many digits as a clock has."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in cast("Mapping[str, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in cast("Sequence[object]", value)]
    return value


def entry_name(kind: str, key: str) -> str:
    """The name of an entry."""
    return f"{kind} {key[:32]}"


@cache
def version_here() -> str:
    """The version of the package, and of the code that decides: kernels of another one may be cut otherwise."""
    return f"{package_version()}+{code_identity(DECIDING)[:12]}"


def read(path: Path) -> TuningFile | Unusable:
    """The file at `path`. Raises InputError, with the place, for one of this version and schema that says what none
    says."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            return Unusable("it is no file")
        if size > TUNING_FILES.max_bytes:
            return Unusable(f"it has {size} bytes, more than {TUNING_FILES.max_bytes}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        return Unusable(f"it cannot be read ({error.strerror})")
    except UnicodeDecodeError:
        return Unusable("it is damaged (no UTF-8)")
    return parse(text, str(path))


def parse(text: str, place: str) -> TuningFile | Unusable:
    """The file with this text, from `place`; raises as `read`."""
    try:
        facts = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)
    except _Twice as twice:
        raise _refused(f"{twice} stands there twice", place) from None
    except (ValueError, RecursionError) as error:
        return Unusable(f"it is damaged ({error})")
    if not isinstance(facts, dict) or not {"schema", "version"} <= facts.keys():
        return Unusable("it is damaged (it has no schema or no version)")
    given = cast("dict[str, object]", facts)
    if given["schema"] != SCHEMA or isinstance(given["schema"], bool):
        return Unusable(f"it has schema {given['schema']!r}, here {SCHEMA} is read", other=True)
    if given["version"] != version_here():
        return Unusable(f"it is of version {given['version']!r}, this is {version_here()!r}", other=True)
    _check_names(given, _TOP, place)
    devices = _mapping(given["devices"], f"{place}: devices")
    return TuningFile({name: _entries(entries, f"{place}: {name}") for name, entries in devices.items()})


class _Twice(Exception):
    """A name that stands twice in one object of JSON: of which a reader would see the last one alone."""


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(repr(next(name for name in names if names.count(name) > 1)))
    return made


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _mapping(given: object, place: str) -> Mapping[str, object]:
    if not isinstance(given, dict):
        raise _refused(f"{given!r} is no object", place)
    return cast("dict[str, object]", given)


def _check_names(given: Mapping[str, object], wanted: Sequence[str], place: str) -> None:
    for name in given:
        if name not in wanted:
            raise _refused(f"unknown key {name!r}, all are {', '.join(wanted)}", place)
    for name in wanted:
        if name not in given:
            raise _refused(f"the key {name!r} is missing", place)


def _entries(given: object, place: str) -> Mapping[str, Entry]:
    found: dict[str, Entry] = {}
    for name, fields in _mapping(given, place).items():
        match = _KEY.fullmatch(name)
        if match is None or match[1] not in KINDS:
            raise _refused(f"unknown key {name!r}: a kind ({', '.join(KINDS)}) and 32 digits", place)
        here, checks = f"{place}: {name}", KINDS[match[1]]
        entry = _mapping(fields, here)
        if "what" in entry and not isinstance(entry["what"], str):
            raise _refused(f"what cannot be {entry['what']!r}: a text", here)
        _check_names({n: v for n, v in entry.items() if n != "what"}, tuple(checks), here)
        for field_name, check in checks.items():
            wrong = check(entry[field_name])
            if wrong:
                value, why = (shown(x, TEXTS.max_place_characters) for x in (repr(entry[field_name]), wrong))
                raise _refused(f"{field_name} cannot be {value}: {why}", here)
        found[name] = entry
    return found


def as_entry(kind: str, given: object) -> Entry | None:
    """What is given, if it has the fields that entries of a kind have."""
    if not isinstance(given, dict):
        return None
    entry = cast("dict[str, object]", given)
    fits = set(entry) - {"what"} == set(KINDS[kind]) and not any(
        check(entry[name]) for name, check in KINDS[kind].items()
    )
    return entry if fits else None


def _refused(message: str, place: str) -> InputError:
    return InputError(f"a tuning file does not fit: {message}", phase="input", place=place, hint=HINT)


# --- what a field may hold: a check says what is wrong, nothing where nothing is ----------------------


def _seconds(given: object) -> str:
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given <= sys.float_info.max:
        return ""
    return "seconds, 0 or more"


def _seconds_or_none(given: object) -> str:
    return "" if given is None else _seconds(given)


def _flag(given: object) -> str:
    return "" if isinstance(given, bool) else "true or false"


def _text(given: object) -> str:
    return "" if isinstance(given, str) and given else "a text"


def _parts(given: object) -> str:
    fits = isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= PRODUCTS.max_parts
    return "" if fits else f"a number of parts, 1 to {PRODUCTS.max_parts}"


def _cascade_parts(given: object) -> str:
    fits = isinstance(given, int) and not isinstance(given, bool) and 1 <= given
    return "" if fits else "a number of parts, 1 or more"


def _preparation(given: object) -> str:
    return "" if given in PREPARATIONS else f"one of {', '.join(PREPARATIONS)}"


def _schedule(given: object) -> str:
    if not isinstance(given, str):
        return "the text of a schedule"
    try:
        check_text(given)
    except ValueError as wrong:
        return str(wrong)
    return ""


def _several_seconds(given: object) -> str:
    if given is None:
        return ""
    listed = cast("list[object]", given) if isinstance(given, list) else []
    return "" if listed and not any(map(_seconds, listed)) else "a list of seconds, or null"


def _named_seconds(given: object) -> str:
    named = cast("dict[str, object]", given) if isinstance(given, dict) else None
    return "" if named is not None and not any(map(_seconds, named.values())) else "seconds by name"


KINDS: Mapping[str, Mapping[str, Callable[[object], str]]] = {
    "product": {
        "schedule": _schedule, "parts": _parts, "operands": _preparation, "seconds": _seconds,
        "library_seconds": _seconds,
    },
    "attention": {"kernels": _flag, "parts": _cascade_parts, "seconds": _seconds, "library_seconds": _seconds},
    "way": {"schedule": _schedule, "seconds": _seconds, "usual_seconds": _seconds},
    "front": {"joined": _flag, "seconds": _seconds_or_none, "apart_seconds": _seconds},
    "cover": {"seconds": _several_seconds},
    "call": {"fastest": _text, "seconds": _named_seconds},
    "convolution": {"seconds": _seconds_or_none},
    "fused_convolution": {"right": _flag},
}  # fmt: skip
"""The fields of each kind: a product and what stands behind it (without a schedule: the library's); attention, with its
keys in parts, beside a library's call; a kernel (without a schedule: as the model prefers); kernels with what is in
front of them (null: it cannot be built so); covers of a region beside each other, in order (null: the model decides, no
clock can); the ways to do a call; a convolution of a library (null: it cannot be run); and whether a fused one is
right."""
