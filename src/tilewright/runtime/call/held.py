"""Whether dicts hold the objects that they held, by one native function.

A dict of which Python has changed nothing costs a look at its version; names are looked up only in others. Python keeps
such versions up to 3.12 (in 3.13, attributes change without one): in later ones each name is looked up. What a Python
does is tried when this module is loaded."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.runtime.plan import reading

Compare = Callable[[], bool]


@dataclass(slots=True)
class Held:
    """What a dict held: names with their objects, and how many if that matters."""

    dict: Mapping[Any, object]
    items: list[tuple[object, object]] = field(default_factory=list[tuple[object, object]])
    counted: bool = False


class _Named(ctypes.Structure):
    _fields_ = (("name", ctypes.c_void_p), ("value", ctypes.c_void_p))


class _Dict(ctypes.Structure):
    _fields_ = (
        ("dict", ctypes.c_void_p),
        ("version", ctypes.c_uint64),
        ("size", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("item", ctypes.c_void_p),
    )


class _Held(ctypes.Structure):
    _fields_ = (
        ("dicts", ctypes.c_int64),
        ("dict", ctypes.c_void_p),
        ("typed", ctypes.c_int64),
        ("object", ctypes.c_void_p),
        ("version", ctypes.c_int64),
    )


UNSEEN = (1 << 64) - 1
"""No version: the first look goes name by name, as a dict may have changed since its names were read."""


def comparer(dicts: Sequence[Held], objects: Sequence[object]) -> Compare | None:
    """Whether `dicts` hold what they held and `objects` have the types that they have now. None where there is no
    native side, or where a dict is of a kind of its own."""
    found = [_plain(h.dict) for h in dicts]
    if not reading.COMPARERS or any(d is None for d in found):
        return None
    place = id  # what is meant is the object itself, which the last line keeps
    rows = (_Dict * max(1, len(dicts)))()
    tables: list[object] = [found, rows]
    for row, held, d in zip(rows, dicts, found, strict=False):
        items = (_Named * max(1, len(held.items)))(*((place(n), place(v)) for n, v in held.items))
        row.dict, row.version, row.size = place(d), UNSEEN, len(held.dict) if held.counted else -1
        row.count, row.item = len(held.items), ctypes.addressof(items)
        tables.append(items)
    types = (_Named * max(1, len(objects)))(*((place(x), place(type(x))) for x in objects))
    table = _Held(len(dicts), ctypes.addressof(rows), len(objects), ctypes.addressof(types), VERSION)
    return reading.COMPARERS[0](
        (ctypes.addressof(table), table, types, tables, dicts, objects, list(map(type, objects)))
    )


def _plain(of: Mapping[Any, object]) -> dict[Any, object] | None:
    """The dict itself: what a class shows of its own stands for one."""
    shown: list[object] = gc.get_referents(of) if type(of).__name__ == "mappingproxy" else [of]
    (found,) = shown if len(shown) == 1 else (None,)
    return found if type(found) is dict or type(found) is OrderedDict else None


class _Sample:
    """An object whose dict is changed by attributes."""


def _version() -> int:
    """Bytes from the start of a dict to its version; 0 where it has none that changes with all that is put there."""
    if sys.version_info >= (3, 14):
        return 0
    at = 3 * ctypes.sizeof(ctypes.c_void_p)  # behind the head that all objects have, and the number of items
    sample = _Sample()
    shown, ordered = vars(sample), OrderedDict[str, object]()
    for d in (shown, ordered):
        word, seen = ctypes.c_uint64.from_address(id(d) + at), list[int]()
        changes: tuple[Callable[[], object], ...] = (
            lambda d=d: d.__setitem__("a", 1), lambda d=d: d.__setitem__("a", []), lambda d=d: d.update(b=2),
            lambda d=d: d.pop("b"), lambda d=d: d.setdefault("c", 3), lambda d=d: d.clear(),
            lambda: setattr(sample, "x", 1), lambda: setattr(sample, "x", 2), lambda: delattr(sample, "x"),
        )  # fmt: skip
        for change in changes if d is shown else changes[:6]:
            seen.append(word.value)
            change()
            before, _ = word.value, d.get("a")
            if word.value != before:
                return 0
        seen.append(word.value)
        if len(set(seen)) < len(seen):
            return 0
    return at


VERSION = _version()
