"""Dicts whose changes Python tells: from 3.12 on, a function of the native side is called before a watched dict
changes, whoever changes it and by whatever way. So what dicts hold need not be looked up while nothing was told.

That Python does so is tried when the native side is loaded, for every way in which a dict changes. Python 3.13 keeps
what is in the dict of an object's attributes with the object, and does not tell when an attribute is set there: such
dicts are told apart, and are not relied on."""

from __future__ import annotations

import ctypes
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class _Watcher:
    number: int
    told: Callable[[], int]
    """How many changes were told of."""
    of_attributes: bool = True
    """Whether also of those of dicts whose values stand with an object."""


_watchers: list[_Watcher] = []
_made: dict[int, _Watcher] = {}
"""By the address of what is called. Python has places for eight watchers, of which it and torch take some."""


def attach(library: ctypes.CDLL) -> None:
    """Let Python tell `library` of changes, where it does so."""
    _watchers.clear()
    tells = ctypes.cast(library.tw_dict_changes, ctypes.c_void_p)
    if tells.value not in _made:
        try:
            number = ctypes.pythonapi.PyDict_AddWatcher(tells)
        except (AttributeError, RuntimeError):  # Python has none, or none left
            return
        library.tw_dict_changes_told.restype = ctypes.c_int64
        _made[tells.value or 0] = _Watcher(number, library.tw_dict_changes_told)
    watcher = _made[tells.value or 0]
    if _tells_all(watcher, _changes(watcher)):
        of_attributes = _tells_all(watcher, _changes_of_attributes(watcher, _Sample()))
        _watchers.append(_Watcher(watcher.number, watcher.told, of_attributes))


def watch(watched: dict[Any, object]) -> bool:
    """Whether Python tells of every change of this dict from now on."""
    for watcher in _watchers:
        _watch(watcher, (watched,))
        return watcher.of_attributes or not _stands_with_object(watched)
    return False


def _watch(watcher: _Watcher, dicts: Iterable[dict[Any, object]]) -> None:
    for d in dicts:
        ctypes.pythonapi.PyDict_Watch(ctypes.c_int(watcher.number), ctypes.py_object(d))


class _Sample:
    """An object whose dict is changed by attributes."""

    kind = 1


_Changes = list[tuple[Callable[[], object], int]]
"""What changes a watched dict, and how often at least."""


def _tells_all(watcher: _Watcher, changes: _Changes) -> bool:
    for change, least in changes:
        before = watcher.told()
        change()
        if watcher.told() < before + least:
            return False
    return True


def _changes(watcher: _Watcher) -> _Changes:
    """Those of dicts by themselves, of names of modules, of classes, and of objects that were given another dict."""
    plain, ordered = dict[str, object](), OrderedDict[str, object]()
    code = compile("global a\na = 1\na = 2\ndel a", "<watched>", "exec")
    names: dict[str, object] = {"__builtins__": {}}
    run, module, other = FunctionType(code, names), ModuleType("watched"), _Sample()
    own = next(d for d in gc.get_referents(vars(_Sample)) if isinstance(d, dict))
    other.__dict__ = {"y": 1}
    _watch(watcher, (plain, ordered, own, names, vars(module)))
    changes: _Changes = [(run, 3), *_changes_of_attributes(watcher, other)]
    changes += [(lambda: setattr(module, "a", 1), 1), (lambda: delattr(module, "a"), 1)]
    for d in (plain, ordered):
        changes += [
            (lambda d=d: d.__setitem__("a", 1), 1), (lambda d=d: d.__setitem__("a", []), 1),
            (lambda d=d: d.update(b=2), 1), (lambda d=d: d.pop("b"), 1), (lambda d=d: d.setdefault("c", 3), 1),
            (lambda d=d: d.__ior__({"e": 1}), 1),
            (lambda d=d: d.popitem(), 1), (lambda d=d: d.clear(), 1),
        ]  # fmt: skip
    return [*changes, (lambda: setattr(_Sample, "kind", 2), 1), (lambda: setattr(_Sample, "kind", 1), 1)]


def _changes_of_attributes(watcher: _Watcher, sample: _Sample) -> _Changes:
    """Those of the dict of an object."""

    def set_again() -> None:
        for k in range(64):  # often, so that Python takes its quickest way
            sample.x = k  # pyright: ignore[reportAttributeAccessIssue]

    _watch(watcher, (vars(sample),))
    return [
        (set_again, 64),
        (lambda: delattr(sample, "x"), 1),
        (lambda: vars(sample).update(x=1), 1),
        (lambda: object.__setattr__(sample, "x", 2), 1),
        (lambda: delattr(sample, "x"), 1),
    ]


def _stands_with_object(d: dict[Any, object]) -> bool:
    """Whether the values of a dict may stand with the object whose attributes they are."""
    return not _VALUES_AT or _values(d, _VALUES_AT) != 0


def _values(d: dict[Any, object], at: int) -> int:
    return ctypes.c_uint64.from_address(id(d) + at).value


def _values_at() -> int:
    """Bytes from the start of a dict to what is zero but where its values stand apart from its names, as those of
    attributes do; 0 where that is not so. A dict that has both together keeps it so."""
    at = 5 * ctypes.sizeof(ctypes.c_void_p)  # behind head, number, version and names
    sample, given = _Sample(), _Sample()
    sample.x = 1  # pyright: ignore[reportAttributeAccessIssue]
    given.__dict__ = {"x": 1}
    together: tuple[dict[Any, object], ...] = ({}, {"a": 1}, OrderedDict(a=1), vars(given), globals())
    if {}.__sizeof__() < at + ctypes.sizeof(ctypes.c_void_p) or not _values(vars(sample), at):
        return 0
    return 0 if any(_values(d, at) for d in together) else at


_VALUES_AT = _values_at()
