"""Calls whose inputs lie together in memory in another way than compiled for: eager mode runs them.

A program that writes into inputs is compiled for what torch saw of their memory: inputs apart are values of their own,
and inputs that share elements are views, at places of their own, of one base. What torch guards of that in later calls
is little (sizes, and that a tensor is not given twice). So each call asks again, if the program writes into inputs."""

# What torch tells of views it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .apart import LieApart, may_meet, meet


class InputFacts(Protocol):
    """What torch's autograd found out about an input."""

    @property
    def mutates_data(self) -> bool:
        """Whether the program writes into it."""
        ...


@dataclass(frozen=True, slots=True)
class ViewsOfBase:
    """Inputs that torch takes for views of one base, and how they lay when compiled; None: at any place."""

    members: tuple[int, ...]
    lay: tuple[object, ...]

    def lies(self, args: Sequence[object]) -> bool:
        """Whether they lie so."""
        given = [t for k in self.members if isinstance(t := args[k], Tensor)]
        if len({t.untyped_storage()._cdata for t in given}) != 1:
            return False
        return all(old is None or old == new for old, new in zip(self.lay, _lay(given), strict=True))


@dataclass(frozen=True, slots=True)
class Relied:
    """What a compiled program relies on: inputs that it has `written` lie apart from other `tensors`, but for those of
    one group. Of those it has `saved` for the backward pass none is a view of what a written one is a view of: they
    count their versions together."""

    written: tuple[int, ...]
    tensors: tuple[int, ...]
    groups: tuple[ViewsOfBase, ...] = ()
    saved: tuple[int, ...] = ()

    def holds(self, args: Sequence[object]) -> bool:
        """Whether the arguments of a call lie so."""
        if not all(group.lies(args) for group in self.groups):
            return False
        if not may_meet(args, self.written, self.tensors):
            return True
        if {id(_owner(args[k])) for k in self.written} & {id(_owner(args[k])) for k in self.saved}:
            return False
        return all(
            any(set(pair) <= set(group.members) for group in self.groups)
            for pair in meet(args, self.written, self.tensors)
        )


def relied_on(examples: Sequence[object], facts: Sequence[InputFacts], saved: Sequence[int] = ()) -> Relied:
    """What a program relies on that was compiled for these examples. `facts` are torch's of the inputs that the
    compiled graph has, and `saved` those of them that it saves; where these are others, or nothing is known, all inputs
    count as written."""
    if facts and not any(f.mutates_data for f in facts):
        return Relied((), ())
    tensors = tuple(
        k
        for k, x in enumerate(examples)
        if isinstance(x, Tensor) and x.layout is torch.strided and torch._C._has_storage(x)  # pyright: ignore[reportAttributeAccessIssue]
    )
    if len(facts) == len(examples):
        written = tuple(k for k in tensors if facts[k].mutates_data)
        return Relied(written, tensors, saved=tuple(k for k in saved if k in tensors and k not in written))
    by_storage: defaultdict[int, list[int]] = defaultdict(list)
    for k in tensors:
        by_storage[_tensor(examples[k]).untyped_storage()._cdata].append(k)
    groups = [
        ViewsOfBase(tuple(members), tuple(_lay([_tensor(examples[k]) for k in members])))
        for members in by_storage.values()
        if len(members) > 1
    ]
    return Relied(tensors, tensors, tuple(groups))


def _tensor(x: object) -> Tensor:
    assert isinstance(x, Tensor)
    return x


def _owner(x: object) -> Tensor:
    """The tensor of which one is a view, or itself."""
    t = _tensor(x)
    return t if t._base is None else t._base


def _lay(tensors: Sequence[Tensor]) -> list[object]:
    """How tensors of one storage lie: each one's place, its base, and which have the same base. Sizes that are free are
    None: the program finds them in each call."""
    owners = list(map(_owner, tensors))
    found: list[object] = [next(i for i, o in enumerate(owners) if o is owner) for owner in owners]
    for t, owner in zip(tensors, owners, strict=True):
        found += [t is owner, owner.requires_grad, owner.dtype, owner.dim()]
        places = (t.storage_offset(), t.untyped_storage().nbytes(), owner.storage_offset())
        sizes = (*places, *owner.shape, *owner.stride())
        found += [None if isinstance(n, torch.SymInt) else n for n in sizes]
    return found


def guard_inputs(
    compiled: Callable[..., object],
    relied: Relied,
    eager: Callable[[], Callable[..., object]],
) -> Callable[..., object]:
    """`compiled` for calls that keep what it relies on, and what `eager` makes for others."""
    if not relied.written:
        return compiled
    otherwise: list[Callable[..., object]] = []
    # Where some are views of one base, or count their versions together, bytes alone do not tell.
    apart = LieApart(relied.written, relied.tensors) if not relied.groups and not relied.saved else None

    def run(*args: object) -> object:
        given = args[0] if boxed and args and isinstance(args[0], list) else args
        if (apart is not None and apart(given)) or relied.holds(given):
            return compiled(*args)
        if not otherwise:
            otherwise.append(eager())
        return otherwise[0](*given)

    boxed = bool(getattr(compiled, "_boxed_call", False))
    if boxed:
        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]  (torch's sign that the list may be emptied)
    return run
