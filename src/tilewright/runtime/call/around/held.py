"""Whether dicts and lists hold the objects that they held, by one native function.

Where Python tells of changes (from 3.12 on, see `objects/watching`), dicts are looked at only after one; in 3.13, those
of attributes each time, as it does not tell of these. Else, a dict of which Python has changed nothing costs a look at
its version, and names are looked up only in others. Python keeps such versions up to 3.12 (in 3.13, attributes change
without one). What a Python does is tried when this module is loaded."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from types import CodeType, FunctionType, MappingProxyType
from typing import Any

from tilewright.runtime.objects import reading
from tilewright.runtime.objects.watching import watch

from .words import WORD, Word

Compare = Callable[[], bool]

ABSENT = object()
"""In place of a value: the dict does not have that name."""


def entry(of: Mapping[Any, object], name: object) -> object:
    """What a dict has under a name, or `ABSENT`, whatever its type makes of that."""
    return dict.get(of, name, ABSENT) if isinstance(of, dict) else of.get(name, ABSENT)


def keys(of: Mapping[Any, object]) -> list[object]:
    """All names of a dict in their order, whatever its type makes of that."""
    return list(dict.keys(of)) if isinstance(of, dict) else list(of)


@dataclass(slots=True)
class Held:
    """What a dict held: names with their objects (`ABSENT`: it did not have that name), how many if that matters, and
    all its keys in their order if that does."""

    dict: Mapping[Any, object]
    items: list[tuple[object, object]] = field(default_factory=list[tuple[object, object]])
    counted: bool = False
    keys: tuple[object, ...] | None = None

    def still(self) -> bool:
        """Whether it still holds that, looked at by Python."""
        if self.keys is not None:
            now = keys(self.dict)
            if len(now) != len(self.keys) or any(a is not b for a, b in zip(now, self.keys, strict=True)):
                return False
        return all(entry(self.dict, name) is value for name, value in self.items)


@dataclass(slots=True)
class HeldList:
    """What a list held: how many objects, and those at some places."""

    list: list[Any]
    size: int
    items: dict[int, object] = field(default_factory=dict[int, object])

    def still(self) -> bool:
        """Whether it still holds that, looked at by Python."""
        return len(self.list) == self.size and all(self.list[k] is value for k, value in self.items.items())


@dataclass(frozen=True, slots=True)
class HeldFunction:
    """What a function ran, and what stood for arguments that it was not given."""

    function: Any
    code: CodeType
    defaults: tuple[Any, ...] | None
    named: dict[str, Any] | None

    @classmethod
    def of(cls, function: FunctionType) -> HeldFunction:
        """What it has now."""
        return cls(function, function.__code__, function.__defaults__, function.__kwdefaults__)

    def still(self) -> bool:
        """Whether it still does, looked at by Python."""
        f = self.function
        same = f.__code__ is self.code and f.__defaults__ is self.defaults
        return same and f.__kwdefaults__ is self.named


class _Named(ctypes.Structure):
    _fields_ = (("name", ctypes.c_void_p), ("value", ctypes.c_void_p))


class _Dict(ctypes.Structure):
    _fields_ = (
        ("dict", ctypes.c_void_p),
        ("version", ctypes.c_uint64),
        ("size", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("item", ctypes.c_void_p),
        ("keys", ctypes.c_int64),
        ("key", ctypes.c_void_p),
    )


class _Place(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int64), ("value", ctypes.c_void_p))


class _List(ctypes.Structure):
    _fields_ = (
        ("list", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("item", ctypes.c_void_p),
    )


class _Word(ctypes.Structure):
    _fields_ = (("place", ctypes.c_void_p), ("value", ctypes.c_void_p))


class _Function(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("function", "code", "defaults", "named"))


class _Held(ctypes.Structure):
    _fields_ = (
        ("dicts", ctypes.c_int64),
        ("dict", ctypes.c_void_p),
        ("lists", ctypes.c_int64),
        ("list", ctypes.c_void_p),
        ("words", ctypes.c_int64),
        ("word", ctypes.c_void_p),
        ("owners", ctypes.c_int64),
        ("owner", ctypes.c_void_p),
        ("functions", ctypes.c_int64),
        ("function", ctypes.c_void_p),
        ("version", ctypes.c_int64),
        ("untold", ctypes.c_int64),
        ("changes", ctypes.c_int64),
    )


UNSEEN = (1 << 64) - 1
"""No version: the first look goes name by name, as a dict may have changed since its names were read."""

_place = id  # what is meant is the object itself, which the caller keeps


def comparer(
    dicts: Sequence[Held], objects: Sequence[object], lists: Sequence[HeldList] = (),
    owners: Sequence[tuple[object, object]] = (), functions: Sequence[HeldFunction] = (),
    refer: Sequence[Word] = (),
) -> Compare | None:  # fmt: skip
    """Whether `dicts` and `lists` hold what they held, `objects` have the types that they have now, `owners` the dicts
    that are named with them, `functions` what they had, and the words of `refer` what they refer to. None where there
    is no native side, or where a mapping is no dict."""
    known = [(h, d) for h in dicts if (d := plain(h.dict)) is not None]
    if not reading.COMPARERS or len(known) < len(dicts):
        return None
    told = [watch(d) for _, d in known]
    # First those of which Python does not tell: they are looked at each time.
    known = [x for x, tells in zip(known, told, strict=True) if not tells] + [*compress(known, told)]
    dicts, found = [h for h, _ in known], [d for _, d in known]
    rows, kept = _dict_rows(dicts, found)
    list_rows, kept_lists = _list_rows(lists)
    asked = [(x, d) for x, d in owners if not _dict_at(x, d)]
    seen = [(_place(x) + TYPE_AT, type(x)) for x in objects]
    seen += [(at, d) for x, d in owners if (at := _dict_at(x, d))]
    seen += [(word.at, word.value) for word in refer]
    words = (_Word * max(1, len(seen)))(*((at, _place(x)) for at, x in seen))
    own = (_Named * max(1, len(asked)))(*((_place(x), _place(d)) for x, d in asked))
    run = (_Function * max(1, len(functions)))(
        *(
            tuple(None if x is None else _place(x) for x in (f.function, f.code, f.defaults, f.named))
            for f in functions
        )
    )
    at = ctypes.addressof
    table = _Held(
        len(dicts), at(rows), len(lists), at(list_rows), len(seen), at(words), len(asked), at(own),
        len(functions), at(run), VERSION, told.count(False), 0,
    )  # fmt: skip
    tables = (rows, kept, list_rows, kept_lists, words, own, run, found)
    held = (dicts, lists, objects, list(map(type, objects)), owners, functions, refer)
    return reading.COMPARERS[0]((at(table), table, tables, held))


def _dict_rows(
    dicts: Sequence[Held], found: Sequence[dict[Any, object]]
) -> tuple[ctypes.Array[_Dict], list[object]]:
    """The native rows, and what they point to."""
    rows, kept = (_Dict * max(1, len(dicts)))(), list[object]()
    for row, held, d in zip(rows, dicts, found, strict=False):
        items = (_Named * max(1, len(held.items)))(
            *((_place(n), None if v is ABSENT else _place(v)) for n, v in held.items)
        )
        row.dict, row.version, row.size = _place(d), UNSEEN, len(held.dict) if held.counted else -1
        row.count, row.item, row.keys = len(held.items), ctypes.addressof(items), -1
        kept.append(items)
        if held.keys is not None:
            keys = (ctypes.c_void_p * max(1, len(held.keys)))(*map(_place, held.keys))
            row.keys, row.key = len(held.keys), ctypes.addressof(keys)
            kept.append(keys)
    return rows, kept


def _list_rows(lists: Sequence[HeldList]) -> tuple[ctypes.Array[_List], list[object]]:
    rows, kept = (_List * max(1, len(lists)))(), list[object]()
    for row, held in zip(rows, lists, strict=False):
        items = (_Place * max(1, len(held.items)))(*((k, _place(v)) for k, v in held.items.items()))
        row.list, row.size, row.count = _place(held.list), held.size, len(held.items)
        row.item = ctypes.addressof(items)
        kept.append(items)
    return rows, kept


def plain(of: Mapping[Any, object]) -> dict[Any, object] | None:
    """The dict itself (what a class shows of its own stands for one); None for another mapping."""
    shown: list[object] = gc.get_referents(of) if isinstance(of, MappingProxyType) else [of]
    (found,) = shown if len(shown) == 1 else (None,)
    return found if isinstance(found, dict) else None


class _Sample:
    """An object whose dict is changed by attributes, or is another one."""


TYPE_AT = WORD
"""Bytes from the start of an object to its type, behind the number of references."""


def _dict_word() -> int:
    """Bytes from the start of an object to its dict where Python itself keeps place for one, which is in front of the
    object; 0 where that is not so."""
    sample = _Sample()
    first, second = vars(sample), dict[str, object]()
    # Python may keep four words in front of an object: two for the collector, one or two for its attributes.
    for at in range(-4 * WORD, 0, WORD):
        word, seen = ctypes.c_uint64.from_address(id(sample) + at), list[bool]()
        for own in (first, second, first):
            sample.__dict__ = own
            seen.append(word.value == id(own))
        if all(seen):
            return at
    return 0


def _dict_at(of: object, own: object) -> int:
    """Where an object refers to the dict of its attributes, `own`; 0 where that is not seen."""
    kind = type(of)
    keeps_place = kind.__flags__ & 1 << 4  # Py_TPFLAGS_MANAGED_DICT
    at = DICT_AT if keeps_place else max(0, kind.__dictoffset__)
    return at and (id(of) + at if ctypes.c_uint64.from_address(id(of) + at).value == id(own) else 0)


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
DICT_AT = _dict_word()
