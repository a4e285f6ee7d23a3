"""What a program reads on its way to objects that it uses: which dict, list, cell or attribute holds the next one."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from .held import ABSENT, Held, HeldFunction, HeldList, entry, keys, plain


def identity(of: Mapping[Any, object]) -> int:
    """Which dict it is: a class shows its own through another object each time."""
    return id(of if (found := plain(of)) is None else found)


class NotWatched(Exception):
    """A source leads over something that cannot be watched."""


@dataclass(frozen=True, slots=True)
class Look:
    """An attribute that Python must be asked for, as torch asks, and the object that it gave (`ABSENT`: none)."""

    of: object
    name: str
    value: object


@dataclass(slots=True)
class Reads:
    """What a program reads on its way: it is as it was while each part is."""

    dicts: dict[int, Held] = field(default_factory=dict[int, Held])
    lists: dict[int, HeldList] = field(default_factory=dict[int, HeldList])
    looks: dict[tuple[int, str], Look] = field(default_factory=dict[tuple[int, str], Look])
    cells: dict[int, tuple[types.CellType, object]] = field(
        default_factory=dict[int, "tuple[types.CellType, object]"]
    )
    typed: dict[int, object] = field(default_factory=dict[int, object])
    owners: dict[int, tuple[object, object]] = field(default_factory=dict[int, "tuple[object, object]"])
    functions: dict[int, HeldFunction] = field(default_factory=dict[int, HeldFunction])
    tensors: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    asks_gradients: bool = False
    """Whether it asks tensors if they want gradients."""
    of_call: set[int] = field(default_factory=set[int])
    """Dicts of arguments by name: each call has another one, and its key knows it."""
    _noted: set[tuple[int, object]] = field(default_factory=set[tuple[int, object]])

    def entry(self, of: Mapping[Any, object], name: object) -> object:
        """What the dict has under that name, or `ABSENT`; noted. Raises NotWatched for a mapping that is no dict."""
        value = entry(of, name)
        if id(of) in self.of_call:
            return value
        held = self._held(of)
        if (identity(of), name) not in self._noted:
            self._noted.add((identity(of), name))
            held.items.append((name, value))
        return value

    def keys(self, of: object) -> None:
        """Note which names a dict has, in their order. Raises NotWatched for what is none."""
        if not isinstance(of, (dict, types.MappingProxyType)):
            raise NotWatched
        if id(cast(object, of)) in self.of_call:
            return
        held = self._held(cast(Mapping[Any, object], of))
        held.keys, held.counted = tuple(keys(held.dict)), True
        self._noted |= {(identity(held.dict), _KEYS), (identity(held.dict), _COUNT)}

    def counted(self, of: Mapping[Any, object]) -> None:
        """Note how many names a dict has."""
        if id(of) not in self.of_call:
            self._held(of).counted = True
            self._noted.add((identity(of), _COUNT))

    def _held(self, of: Mapping[Any, object]) -> Held:
        if plain(of) is None:
            raise NotWatched
        return self.dicts.setdefault(identity(of), Held(of))

    def size(self, of: list[Any]) -> HeldList:
        """Note how long a list is."""
        return self.lists.setdefault(id(of), HeldList(of, len(of)))

    def look(self, of: object, name: str) -> object:
        """What an attribute gives, or `ABSENT`; noted. Raises NotWatched if it gives another object each time."""
        value = getattr(of, name, ABSENT)
        if getattr(of, name, ABSENT) is not value:
            raise NotWatched
        self.looks[id(of), name] = Look(of, name, value)
        return value

    def cell(self, cell: types.CellType) -> object:
        """What the variable of an outer function holds; noted. Raises NotWatched if that is nothing."""
        try:
            value = cell.cell_contents
        except ValueError:
            raise NotWatched from None
        self.cells[id(cell)] = cell, value
        return value

    def function(self, of: types.FunctionType) -> None:
        """Note what a function runs, and what stands for arguments that it is not given."""
        self.functions[id(of)] = HeldFunction.of(of)
        named: dict[str, Any] = of.__kwdefaults__ or {}
        for name in named:
            self.entry(named, name)

    def within(self, other: Reads) -> bool:
        """Whether `other`, of the same time, notes all of this."""
        return (
            self._noted <= other._noted
            and self.lists.keys() <= other.lists.keys()
            and all(x.items.keys() <= other.lists[k].items.keys() for k, x in self.lists.items())
            and self.looks.keys() <= other.looks.keys()
            and self.cells.keys() <= other.cells.keys()
            and self.typed.keys() <= other.typed.keys()
            and self.owners.keys() <= other.owners.keys()
            and self.functions.keys() <= other.functions.keys()
            and self.tensors.keys() <= other.tensors.keys()
            and self.asks_gradients <= other.asks_gradients
        )

    def add(self, other: Reads) -> None:
        """Note all that `other`, of the same time, does."""
        for read in other.dicts.values():
            for name, _ in read.items:
                self.entry(read.dict, name)
            held = self._held(read.dict)
            held.counted, held.keys = (
                held.counted or read.counted,
                held.keys if read.keys is None else read.keys,
            )
        for row in other.lists.values():
            self.size(row.list).items.update(row.items)
        self._noted |= other._noted
        self.looks |= other.looks
        self.cells |= other.cells
        self.typed |= other.typed
        self.owners |= other.owners
        self.functions |= other.functions
        self.tensors |= other.tensors
        self.asks_gradients |= other.asks_gradients

    def type_of(self, of: object) -> type:
        """The type of an object; noted where it may change."""
        if type(of).__module__ != "builtins":
            self.typed[id(of)] = of
        return type(of)

    def own(self, of: object) -> dict[Any, object] | None:
        """The dict of an object's own attributes, if it has one; that it is this one is noted. Raises NotWatched for
        what is none."""
        held = getattr(of, "__dict__", None)
        if held is None:
            return None
        if not isinstance(held, dict):
            raise NotWatched
        if not isinstance(of, types.ModuleType):
            self.owners[id(of)] = of, held
        return cast(dict[Any, object], held)


_KEYS, _COUNT = object(), object()
"""Noted of a dict in place of a name: all its names, and how many they are."""
