"""What torch guarded where it traced a program, as what must stay as it is: torch's guards say what a trace has read.

A guard that nothing here knows, or that leads over something that cannot be watched, makes the whole program one whose
calls torch must look at itself."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo import source as sources
from torch._guards import Guard, Source, TracingContext

from .follower import Follower
from .frame import Frame
from .held import ABSENT
from .reads import NotWatched, Reads


@dataclass(frozen=True, slots=True)
class Guarded:
    """A guard: its kind, where what it guards comes from, and what else it was made with."""

    kind: str
    source: Source
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Traced:
    """What torch knows of a trace when its graph is compiled: its guards, to which some may be added until it is done,
    where sizes and numbers come from, and which code was run."""

    guards: Iterable[Guard]
    sources: tuple[Source, ...]
    asks_gradients: bool
    asks_addresses: bool

    @classmethod
    def now(cls) -> Traced | None:
        """The one that torch makes now; None where it does not tell."""
        context = TracingContext.try_get()
        code = getattr(context, "traced_code", None)
        if context is None or context.fake_mode is None or code is None:
            return None
        shapes = context.fake_mode.shape_env
        known = () if shapes is None else tuple(s for found in shapes.var_to_sources.values() for s in found)
        # Torch takes the set away when it is done: what it adds until then stands in the inner one.
        guards = context.guards_context.dynamo_guards.inner
        return cls(guards, known, any(map(_asks_gradients, code)), any(map(_asks_addresses, code)))


_OF_GRADIENTS = frozenset({"requires_grad", "is_leaf", "grad_fn", "grad"})


def _asks_gradients(code: types.CodeType) -> bool:
    return not (_OF_GRADIENTS.isdisjoint(code.co_names) or code.co_filename.startswith(_TORCH))


def _asks_addresses(code: types.CodeType) -> bool:
    """Whether a program may return where a tensor lies: no key knows that."""
    return "data_ptr" in code.co_names and not code.co_filename.startswith(_TORCH)


_TORCH = str(Path(torch.__file__).parent)
"""Torch's own modules ask only where gradients are taken."""


class GuardLog:
    """The guards of each graph, by its number."""

    def __init__(self) -> None:
        self._traces: dict[int, Traced | None] = {}
        self._guards: dict[int, tuple[Guarded, ...]] = {}

    def compiled(self, number: int) -> None:
        """Torch has a graph compiled."""
        self._traces[number] = Traced.now()

    def reads(self, number: int, frame: Frame | None) -> Reads | None:
        """What the graph of that number relies on in a call that torch let run it; None where it cannot be watched."""
        trace = self._traces.get(number)
        if trace is None or frame is None or trace.asks_addresses:
            return None
        reads = Reads(asks_gradients=trace.asks_gradients)
        walk = Follower(frame, reads)
        try:
            for function in frame.functions:
                reads.function(function)
            guards = self._of(number, trace)
            if not _OF_EACH <= {guard.kind for guard in guards}:
                return None
            for guard in guards:
                _watch(walk, guard)
            for source in trace.sources:
                _object(walk, source)
        except NotWatched:
            return None
        return reads

    def _of(self, number: int, trace: Traced) -> tuple[Guarded, ...]:
        if number not in self._guards:
            self._guards[number] = tuple(
                Guarded(g.create_fn_name(), g.originating_source, _settings(g.create_fn))
                for g in trace.guards
            )
        return self._guards[number]


def _settings(made_by: Callable[..., object]) -> Mapping[str, object]:
    return dict(made_by.keywords) if isinstance(made_by, functools.partial) else {}


def _watch(walk: Follower, guard: Guarded) -> None:
    """Note what a guard relies on. Raises NotWatched."""
    if guard.kind in _OF_ALL:
        return
    how = _KINDS.get(guard.kind)
    if how is None:
        raise NotWatched
    how(walk, guard)


_OF_ALL = frozenset({
    "GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "TORCH_FUNCTION_STATE", "DEFAULT_DEVICE",
    "AUTOGRAD_SAVED_TENSORS_HOOKS", "SHAPE_ENV", "FUNCTORCH_STACK_MATCH", "DUAL_LEVEL",
})  # fmt: skip
"""Guards of what is no object: the key of a call has it. What sizes are read from is known of the trace."""

_OF_EACH = frozenset({"GLOBAL_STATE", "SHAPE_ENV"})
"""Torch guards these for each graph: guards without them are not all."""

_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
"""The dicts that every hook enters which runs without gradients."""


def _object(walk: Follower, source: Source) -> object:
    """The object that a source leads to; of a tensor that no key knows, its sizes and type are noted as well."""
    value = walk.present(source)
    if isinstance(value, Tensor) and source not in walk.keyed:
        walk.reads.tensors[id(value)] = value
    return value


def _same_object(walk: Follower, guard: Guarded) -> None:
    _object(walk, guard.source)


def _same_type(walk: Follower, guard: Guarded) -> None:
    walk.reads.type_of(walk.owner(guard.source))


def _equal(walk: Follower, guard: Guarded) -> None:
    if not _never_changes(walk.present(guard.source)):
        raise NotWatched


def _never_changes(value: object) -> bool:
    """Whether a value is equal to another one for as long as it lives."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_never_changes, cast(Iterable[object], value)))
    kind = type(value)
    return isinstance(value, _NUMBERS) or (
        kind.__hash__ is not None and kind.__module__.split(".")[0] in _OF_VALUES
    )


_NUMBERS = (int, float, complex, str, bytes)
_OF_VALUES = frozenset({"builtins", "torch", "numpy"})
"""Modules whose values that have a hash never change."""


def _same_code(walk: Follower, guard: Guarded) -> None:
    value = walk.present(guard.source)
    if isinstance(value, types.FunctionType) and not (value.__module__ or "").startswith("torch."):
        walk.reads.function(value)


def _same_length(walk: Follower, guard: Guarded) -> None:
    value = walk.present(guard.source)
    if isinstance(value, list):
        walk.reads.size(cast(list[Any], value))
    elif isinstance(value, dict):
        walk.reads.counted(cast(dict[Any, object], value))
    elif not isinstance(value, (tuple, str, range)):
        raise NotWatched


def _same_keys(walk: Follower, guard: Guarded) -> None:
    walk.reads.keys(walk.present(guard.source))


def _has_key(walk: Follower, guard: Guarded) -> None:
    value = walk.present(guard.source)
    if not isinstance(value, (dict, types.MappingProxyType)) or "key" not in guard.settings:
        raise NotWatched
    walk.reads.entry(cast(Mapping[Any, object], value), guard.settings["key"])


def _no_own_attribute(walk: Follower, guard: Guarded) -> None:
    own = walk.reads.own(walk.owner(guard.source))
    if own is not None:
        walk.reads.entry(own, guard.settings["attr"])


def _has_attribute(walk: Follower, guard: Guarded) -> None:
    source, name = guard.source, guard.settings.get("attr")
    if name is None and isinstance(source, sources.AttrSource):
        source, name = source.base, source.member
    if not isinstance(name, str):
        raise NotWatched
    of = walk.owner(source)
    if isinstance(getattr(type(of), name, None), property) and getattr(of, name, ABSENT) is not ABSENT:
        walk.of_classes(walk.reads.type_of(of), name)  # what it computes is traced
    else:
        walk.attribute(of, name)


def _no_hooks(walk: Follower, guard: Guarded) -> None:
    if isinstance(guard.source, sources.AttrSource) and guard.source.member in _HOOKS:
        walk.reads.counted(cast(dict[Any, object], walk.present(guard.source)))


def _same_tensor(walk: Follower, guard: Guarded) -> None:
    if not isinstance(_object(walk, guard.source), Tensor):
        raise NotWatched


def _one_object(walk: Follower, guard: Guarded) -> None:
    walk.present(guard.source)
    walk.present(cast(Source, guard.settings["source_b"]))


_KINDS: Mapping[str, Callable[[Follower, Guarded], None]] = {
    **dict.fromkeys(
        (
            "ID_MATCH", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH", "FUNCTION_MATCH", "NONE_MATCH", "BOOL_MATCH",
            "NOT_NONE_MATCH", "WEAKREF_ALIVE", "NN_MODULE",
        ),
        _same_object,
    ),
    **dict.fromkeys(("CONSTANT_MATCH", "EQUALS_MATCH", "CONSTANT_SUBCLASS_MATCH"), _equal),
    **dict.fromkeys(("DICT_CONTAINS", "DICT_NOT_CONTAINS"), _has_key),
    "TYPE_MATCH": _same_type,
    "CLOSURE_MATCH": _same_code,
    "SEQUENCE_LENGTH": _same_length,
    "DICT_KEYS_MATCH": _same_keys,
    "NOT_PRESENT_IN_GENERIC_DICT": _no_own_attribute,
    "HASATTR": _has_attribute,
    "EMPTY_NN_MODULE_HOOKS_DICT": _no_hooks,
    "TENSOR_MATCH": _same_tensor,
    "DUPLICATE_INPUT": _one_object,
}  # fmt: skip
"""What each kind of guard relies on. A kind that is not here is left to torch."""
