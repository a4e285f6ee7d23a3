"""From a source that Dynamo guards to the object that it leads to now, with every step noted: which dict, list, cell or
attribute holds the next object. While all of these hold the same objects, the source leads to the same one."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo import (
    source as sources,  # a second of imports: calls of loaded programs do without this file
)
from torch._guards import Source

from .frame import Frame
from .held import ABSENT, keys
from .reads import NotWatched, Reads

_OF_FUNCTIONS = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__closure__"})
_FIXED = (types.MethodType, types.CodeType, types.CellType, property)
"""Their attributes never change, those of cells apart."""


class Follower:
    """Follows the sources of one call. What they lead to, and how, goes into `reads`."""

    def __init__(self, frame: Frame, reads: Reads) -> None:
        self.frame, self.reads = frame, reads
        self._found: dict[Source, object] = {}
        self.keyed: set[Source] = set()
        """Sources of what a call's key knows: arguments, and the items of those that are tuples."""

    def __call__(self, source: Source) -> object:
        """The object that a source leads to, or `ABSENT`. Raises NotWatched."""
        if source not in self._found:
            self._found[source] = self._step(source)
        return self._found[source]

    def present(self, source: Source) -> object:
        """The object that a source leads to. Raises NotWatched, also where there is none."""
        value = self(source)
        if value is ABSENT:
            raise NotWatched
        return value

    def owner(self, source: Source) -> object:
        """The same where its attributes matter. Raises NotWatched also for a tensor that a call brings: a key knows its
        sizes and type alone."""
        value = self.present(source)
        if isinstance(value, Tensor) and source in self.keyed:
            raise NotWatched
        return value

    def _step(self, source: Source) -> object:
        if isinstance(source, sources.LocalSource):
            return self._local(source)
        if isinstance(source, sources.GlobalSource):
            return self.reads.entry(self.frame.globals, source.global_name)
        base = getattr(source, "base", None)
        step = next((_STEPS[c] for c in type(source).__mro__ if c in _STEPS), None)
        if base is None or step is None:
            raise NotWatched
        of = self.present(base) if isinstance(source, sources.TensorPropertySource) else self.owner(base)
        if base in self.keyed and _in_key(source, of):
            self.keyed.add(source)
        return step(self, source, of)

    def _local(self, source: sources.LocalSource) -> object:
        name = source.local_name
        if name in self.frame.given:
            self.keyed.add(source)
            value = self.frame.given[name]
            if isinstance(value, dict):
                self.reads.of_call.add(id(cast(object, value)))
            return value
        if name in self.frame.cells:
            return self.reads.cell(self.frame.cells[name])
        raise NotWatched

    def attribute(self, of: object, name: str) -> object:
        """The attribute of an object, or `ABSENT`. Raises NotWatched."""
        if name == "__dict__":
            return self.reads.own(of)
        if name == "__class__":
            return self.reads.type_of(of)
        if isinstance(of, types.CellType) and name == "cell_contents":
            return self.reads.cell(of)
        if isinstance(of, _FIXED):
            return getattr(of, name, ABSENT)
        if isinstance(of, types.ModuleType):
            return self._checked(self.reads.entry(vars(of), name), of, name)
        if isinstance(of, types.FunctionType) and name in _OF_FUNCTIONS:
            self.reads.function(of)
            return getattr(of, name)
        if isinstance(of, type):
            return self._of_class(of, name, of)
        return self._of_object(of, name)

    def _checked(self, value: object, of: object, name: str) -> object:
        """What was found, if Python finds the same; else what Python finds. Raises NotWatched."""
        return value if getattr(of, name, ABSENT) is value else self.reads.look(of, name)

    def _of_class(self, of: type, name: str, seen_from: object) -> object:
        """What a class or one that it comes from has under a name, as `seen_from` shows it."""
        value = self.of_classes(of, name)
        shown = getattr(seen_from, name, ABSENT)
        if shown is value or (value is not ABSENT and isinstance(value, _BOUND)):
            return shown
        return self.reads.look(seen_from, name)  # members of enumerations

    def of_classes(self, of: type, name: str) -> object:
        """The entry of the first class that has the name; that none before has it is noted."""
        for c in of.__mro__:
            if c is object:
                break
            value = self.reads.entry(vars(c), name)
            if value is not ABSENT:
                return value
        return vars(object).get(name, ABSENT)

    def _of_object(self, of: object, name: str) -> object:
        # A `__getattribute__` of Python's is traced as well: torch guards what it reads.
        kind = self.reads.type_of(of)
        there = next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), ABSENT)
        if there is not ABSENT and getattr(type(there), "__set__", None) is not None:
            if isinstance(of, tuple) and name in getattr(kind, "_fields", ()):
                self.of_classes(kind, name)
                return getattr(of, name)
            return self.reads.look(of, name)
        own = self.reads.own(of)
        if own is not None:
            value = self.reads.entry(own, name)
            if value is not ABSENT:
                return self._checked(value, of, name)
        if isinstance(of, torch.nn.Module):
            for held in (of._parameters, of._buffers, of._modules):
                value = self.reads.entry(cast(Mapping[Any, object], held), name)
                if value is not ABSENT:
                    return self._checked(value, of, name)
        elif getattr(kind, "__getattr__", None) is not None:
            return self.reads.look(of, name)
        return self._of_class(kind, name, of)

    def item(self, of: object, index: object) -> object:
        """What a container has at a place or under a name. Raises NotWatched."""
        if isinstance(of, (dict, types.MappingProxyType)):
            if isinstance(index, sources.ConstDictKeySource):
                index = self(index)
            return self.reads.entry(cast(Mapping[Any, object], of), index)
        if isinstance(index, int) and isinstance(of, list):
            held = self.reads.size(cast(list[Any], of))
            place = index + held.size if index < 0 else index
            if not 0 <= place < held.size:
                raise NotWatched
            return held.items.setdefault(place, held.list[place])
        if isinstance(index, int) and isinstance(of, tuple):
            return cast(tuple[object, ...], of)[index]
        raise NotWatched


_BOUND = (types.FunctionType, staticmethod, classmethod, types.BuiltinFunctionType)
"""What classes show in another form than they hold it."""


def _in_key(source: Source, base: object) -> bool:
    """Whether the key knows what a source leads to, if it knows its base. (Dicts have no key, but for that of the
    arguments by name.)"""
    if isinstance(source, sources.TensorPropertySource):
        return True
    of_arguments = isinstance(base, dict) and isinstance(getattr(source, "base", None), sources.LocalSource)
    return isinstance(source, (sources.GetItemSource, sources.DictGetItemSource)) and (
        isinstance(base, tuple) or of_arguments
    )


def _key(walk: Follower, source: Any, base: object) -> object:
    walk.reads.keys(base)
    return keys(cast(dict[Any, object], base))[source.index]


def _default(walk: Follower, source: Any, base: object) -> object:
    if not isinstance(base, types.FunctionType):
        raise NotWatched
    return walk.item(walk.attribute(base, source.field), source.idx_key)


def _classes(walk: Follower, source: Any, base: object) -> object:
    if not isinstance(base, type):
        raise NotWatched
    return walk.reads.look(base, "__mro__")


def _class_dict(walk: Follower, source: Any, base: object) -> object:
    if not isinstance(base, type):
        raise NotWatched
    return vars(base)


Step = Callable[[Follower, Any, Any], object]

_STEPS: dict[type, Step] = {
    sources.AttrSource: lambda walk, source, base: walk.attribute(base, source.member),
    sources.GenericAttrSource: lambda walk, source, base: walk.attribute(base, source.member),
    sources.UnspecializedParamBufferSource: lambda walk, source, base: walk.attribute(base, source.member),
    sources.GetItemSource: lambda walk, source, base: walk.item(base, source.index),
    sources.DictGetItemSource: lambda walk, source, base: walk.item(base, source.index),
    sources.DictSubclassGetItemSource: lambda walk, source, base: walk.item(base, source.index),
    sources.NNModuleSource: lambda walk, source, base: base,
    sources.TypeSource: lambda walk, source, base: walk.reads.type_of(base),
    sources.ConstDictKeySource: _key,
    sources.DefaultsSource: _default,
    sources.ClosureSource: lambda walk, source, base: walk.attribute(base, "__closure__"),
    sources.CodeSource: lambda walk, source, base: walk.attribute(base, "__code__"),
    sources.TypeMROSource: _classes,
    sources.TypeDictSource: _class_dict,
    sources.TensorPropertySource: lambda walk, source, base: base,
}
"""How each kind of source goes on from what its base leads to. A kind that is not here cannot be watched."""
