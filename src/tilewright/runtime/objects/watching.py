"""Dicts whose changes Python tells: from 3.12 on, a function of the native side is called before a watched dict
changes, whoever changes it and by whatever way. So what dicts hold need not be looked up while nothing was told.

That Python does so is tried when the native side is loaded, for every way in which a dict changes."""

from __future__ import annotations

import ctypes
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any


@dataclass(frozen=True, slots=True)
class _Watcher:
    number: int
    told: Callable[[], int]
    """How many changes were told of."""


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
    if _tells_all(watcher):
        _watchers.append(watcher)


def watch(dicts: Iterable[dict[Any, object]]) -> bool:
    """Whether Python tells of every change of these dicts from now on."""
    for watcher in _watchers:
        _watch(watcher, dicts)
    return bool(_watchers)


def _watch(watcher: _Watcher, dicts: Iterable[dict[Any, object]]) -> None:
    for d in dicts:
        ctypes.pythonapi.PyDict_Watch(ctypes.c_int(watcher.number), ctypes.py_object(d))


class _Sample:
    """An object whose dict is changed by attributes."""

    kind = 1


def _tells_all(watcher: _Watcher) -> bool:
    sample, plain, ordered = _Sample(), dict[str, object](), OrderedDict[str, object]()
    code = compile("global a\na = 1\na = 2\ndel a", "<watched>", "exec")
    names: dict[str, object] = {"__builtins__": {}}
    run = FunctionType(code, names)

    def set_again() -> None:
        for k in range(64):  # often, so that Python takes its quickest way
            sample.x = k  # pyright: ignore[reportAttributeAccessIssue]

    own = next(d for d in gc.get_referents(vars(_Sample)) if isinstance(d, dict))
    _watch(watcher, (vars(sample), plain, ordered, own, names))
    changes: list[tuple[Callable[[], object], int]] = [
        (run, 3),
        (set_again, 64),
        (lambda: delattr(sample, "x"), 1),
    ]
    for d in (plain, ordered):
        changes += [
            (lambda d=d: d.__setitem__("a", 1), 1), (lambda d=d: d.__setitem__("a", []), 1),
            (lambda d=d: d.update(b=2), 1), (lambda d=d: d.pop("b"), 1), (lambda d=d: d.setdefault("c", 3), 1),
            (lambda d=d: d.__ior__({"e": 1}), 1),
            (lambda d=d: d.popitem(), 1), (lambda d=d: d.clear(), 1),
        ]  # fmt: skip
    changes += [(lambda: setattr(_Sample, "kind", 2), 1), (lambda: setattr(_Sample, "kind", 1), 1)]
    for change, least in changes:
        before = watcher.told()
        change()
        if watcher.told() < before + least:
            return False
    return True
