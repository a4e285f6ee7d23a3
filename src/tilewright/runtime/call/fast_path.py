"""The short way of a call that has been seen before: a key of the arguments' metadata, identity checks of what the
program reads besides its arguments, and the executable."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter, getitem, is_
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright.capture.aliasing.apart import LieApart, may_meet, meet
from tilewright.plan.bind import bind_symbols
from tilewright.plan.data import Spec
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.known_sizes import Result
from tilewright.runtime.plan.reading import Lies, alike, reader
from tilewright.tuning.input_limits import GRAPHS

from .held import Held, comparer

_autocast = torch._C._is_any_autocast_enabled
_grad = torch.is_grad_enabled
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_default_type = torch.get_default_dtype
_deterministic = torch._C._get_deterministic_algorithms
_transform = torch._C._functorch.peek_interpreter_stack
_wants_gradient = attrgetter("requires_grad")
_version: Callable[[Tensor], int] = vars(torch._C.TensorBase)["_version"].__get__
_address = Tensor.data_ptr


def key_of(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    """What a call's behaviour may depend on but the values in its tensors. Raises TypeError where that has no hash, for
    arrays and scalars of numpy (which stand for tensors) and tensors kept negated or conjugated (kernels and calls
    would read the wrong sign), under modes and transforms of torch, which want to see every op or function (a default
    device is one), and under autocast, which would change calls."""
    if _modes() or _function_modes() or _transform() is not None or _autocast():
        raise TypeError("a mode is active")
    parts: list[object] = [
        (a.shape, a.stride(), a.dtype, a.is_cpu or a.device, a.requires_grad, a.__class__)
        if isinstance(a, Tensor) and not (a.is_neg() or a.is_conj())
        else _plain(a)
        for a in args
    ]
    if kwargs:
        parts += kwargs
        parts.append(key_of(tuple(kwargs.values()), {}))
    return (_grad(), _default_type(), _deterministic(), *parts)


def _plain(value: object) -> tuple[object, object]:
    if isinstance(value, np.generic):
        raise TypeError("a scalar of numpy stands for a tensor")
    if isinstance(value, Tensor):
        raise TypeError("a tensor is kept negated or conjugated")
    return value.__class__, value


class Surroundings:
    """What a program reads besides its arguments: its modules, their classes, parameters, buffers, hooks and plain
    attributes, and the closures and global names of its functions, forward methods and what these call by name.
    `unchanged` compares identities, and sizes and types of tensors; other objects are not looked
    into."""

    def __init__(self, target: Callable[..., object]) -> None:
        self.tensors: list[Tensor] = []
        self._dicts: list[Mapping[Any, object]] = []
        self._names: list[object] = []
        self._values: list[object] = []
        self._counted: list[Mapping[Any, object]] = []
        self.watch(())
        self.known = isinstance(target, (torch.nn.Module, types.FunctionType))
        reached = _reached(target)
        self._modules = [x for x in reached if isinstance(x, torch.nn.Module)]
        for module in self._modules:
            self._module(module)
        self._classes = list(map(type, self._modules))
        for owner, name in dict.fromkeys(m for c in dict.fromkeys(self._classes) for m in _methods(c)):
            self._add(vars(owner), [name])
        self._counts = list(map(len, self._counted))
        functions = [x for x in reached if isinstance(x, types.FunctionType)]
        for function in functions:
            self._add(function.__globals__, _globals_of(function))
        self._cells = tuple((c, v) for f in functions for c, v in _cells(f))
        self._alike = alike(self.tensors)
        self._same = comparer(self._held(), self._modules)

    def _held(self) -> list[Held]:
        """The names by dict."""
        found: dict[int, Held] = {}
        for d, name, value in zip(self._dicts, self._names, self._values, strict=True):
            found.setdefault(id(d), Held(d)).items.append((name, value))
        for counted in self._counted:
            found.setdefault(id(counted), Held(counted)).counted = True
        return list(found.values())

    def _module(self, module: torch.nn.Module) -> None:
        plain = [
            n for n, v in vars(module).items() if n == "training" or (n[0] != "_" and not isinstance(v, dict))
        ]
        self._add(vars(module), plain)
        for held in (module._parameters, module._buffers):
            self._add(held, list(held))
            self.tensors += [t for t in held.values() if t is not None]
        for held in (module._modules, module._forward_hooks, module._forward_pre_hooks):
            self._add(held, list(held))
            self._counted.append(held)
        self._counted.append(vars(module))

    def _add(self, held: Mapping[Any, object], names: Sequence[object]) -> None:
        self._dicts += [held] * len(names)
        self._names += names
        self._values += [held[n] for n in names]

    def watch(self, versions: Sequence[tuple[Tensor, int, int]]) -> None:
        """Also compare address and version of these tensors (version -1: it has none)."""
        self._weights = [t for t, *_ in versions]
        self._counters = [t for t, _, version in versions if version >= 0]
        self._versions = [version for *_, version in versions if version >= 0]
        self._addresses = [address for _, address, _ in versions]
        self._read = reader([
            Lies(k, 0, tuple(t.shape), t.stride(), address) for k, (t, address, _) in enumerate(versions)
        ])  # fmt: skip

    @property
    def watched(self) -> Sequence[Tensor]:
        """What `watch` was told of."""
        return self._weights

    def may_hold(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the program may come to one of these tensors without being given it: as a parameter or buffer, or by
        a name."""
        own = [v for m in self._modules for n, v in vars(m).items() if n not in _OF_EVERY_MODULE]
        known = [*self.tensors, *self._values, *own, *(v for _, v in self._cells)]
        return _leads_to(known, frozenset(map(id, tensors)), self._modules)

    def unchanged(self) -> bool:
        """Whether names still mean the same objects, tensors are of the same kind, and no gradient is asked for."""
        if self.tensors and _grad() and any(map(_wants_gradient, self.tensors)):
            return False
        if not self._alike() or self._weights and not self._weights_stand():
            return False
        try:
            same = self._same() if self._same is not None else self._look()
            return same and (not self._cells or all(c.cell_contents is v for c, v in self._cells))
        except (KeyError, ValueError):  # a name or a variable holds nothing any more
            return False

    def _weights_stand(self) -> bool:
        """Whether the watched tensors lie where they did, and nobody has written into them."""
        stand = self._read is not None and self._read(self._weights, 0)
        stand = stand or list(map(_address, self._weights)) == self._addresses
        return stand and list(map(_version, self._counters)) == self._versions

    def _look(self) -> bool:
        """Whether names mean the same objects, one by one. Raises KeyError for one that means nothing any more."""
        same = list(map(len, self._counted)) == self._counts
        same = same and all(map(is_, map(type, self._modules), self._classes))
        return same and all(map(is_, map(getitem, self._dicts, self._names), self._values))


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))

_NOT_FOLLOWED = (type, types.ModuleType, types.BuiltinFunctionType, Tensor)
"""Objects that lead nearly everywhere, or hold no tensor that a program reads."""


def _leads_to(roots: Iterable[object], wanted: frozenset[int], looked_at: Iterable[object]) -> bool:
    """Whether any of the `roots` is, or holds at any depth, an object with a wanted id. True where they hold too much
    to be looked at. Of a function's globals nothing is followed, nor what is `looked_at` elsewhere."""
    seen = set(map(id, looked_at))
    limit = len(seen) + GRAPHS.max_held_objects
    todo = list(roots)
    while todo:
        x = todo.pop()
        if id(x) in wanted:
            return True
        if id(x) in seen or not gc.is_tracked(x) or isinstance(x, _NOT_FOLLOWED):
            continue
        seen.add(id(x))
        if len(seen) > limit:
            return True
        if isinstance(x, types.FunctionType):
            todo += [x.__closure__, x.__defaults__, x.__kwdefaults__, vars(x)]
        else:
            todo += gc.get_referents(x)
    return False


def _reached(target: object) -> list[torch.nn.Module | types.FunctionType]:
    """The modules and functions that `target` is or uses by name, each once. What torch defines is not followed."""
    found: dict[int, torch.nn.Module | types.FunctionType] = {}
    todo = [target]
    while todo:
        x = todo.pop()
        if id(x) in found:
            continue
        if isinstance(x, torch.nn.Module):
            found |= {id(m): m for m in x.modules()}
            methods = [m for c in dict.fromkeys(map(type, x.modules())) for m in _methods(c)]
            todo += [vars(owner)[name] for owner, name in methods]
        elif isinstance(x, types.FunctionType) and not _is_torchs(x):
            found[id(x)] = x
            todo += [v for _, v in _cells(x)] + [x.__globals__[n] for n in _globals_of(x)]
    return list(found.values())


def _methods(of: type) -> list[tuple[type, str]]:
    """The forward method of a class of modules, and those that it names, directly or not: the classes that define
    them, and their names. What torch defines is not followed."""
    found: dict[str, tuple[type, str]] = {}
    todo = ["forward"]
    while todo:
        name = todo.pop()
        owner = next((c for c in of.__mro__ if name in vars(c)), None)
        if name in found or owner is None:
            continue
        method = vars(owner)[name]
        if name == "forward" or (isinstance(method, types.FunctionType) and not _is_torchs(method)):
            found[name] = owner, name
        if isinstance(method, types.FunctionType) and not _is_torchs(method):
            todo += [n for code in _codes(method.__code__) for n in code.co_names]
    return list(found.values())


def _is_torchs(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


def _cells(function: types.FunctionType) -> list[tuple[types.CellType, object]]:
    """The variables of outer functions, with what they hold, if anything yet."""
    held: list[tuple[types.CellType, object]] = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            held.append((cell, cell.cell_contents))
    return held


def _globals_of(function: types.FunctionType) -> list[str]:
    """The global names that a function uses, or a function within it."""
    names = dict.fromkeys(n for code in _codes(function.__code__) for n in code.co_names)
    return [n for n in names if n in function.__globals__]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


@dataclass(frozen=True, slots=True)
class Pick:
    """Where an argument of the executable comes from: leaf number `leaf` of the call, or the fixed `tensor`. Of a
    `scalar` it does not matter."""

    leaf: int
    tensor: Tensor | None = None
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """A leaf of what the program returns: result number `result`, or the plain value `plain` if that is negative."""

    result: int
    plain: None | bool | int | float | str = None


Short = Callable[[Sequence[object], Sequence[Tensor] | None], object]
"""A short way: the program's result for the leaves of a call, and tensors that receive the outputs; `LONG_WAY` for what
it does not serve."""

LONG_WAY = object()
"""In place of a result: nothing has run, the whole way must be gone."""


class Runs(Protocol):
    """Runs flat arguments."""

    @property
    def written(self) -> tuple[int, ...]:
        """The arguments that it writes into."""
        ...

    def __call__(self, args: list[Argument], out: Sequence[Tensor] | None = None) -> list[Result]:
        """Flat results; the list of arguments is emptied."""
        ...


class Direct:
    """Runs `executable` on picked leaves of a call and arranges its results as the program returned them."""

    def __init__(
        self,
        executable: Runs,
        picks: Sequence[Pick],
        order: Sequence[Returned],
        spec: pytree.TreeSpec,
        frozen: Sequence[Tensor] = (),
    ) -> None:
        """`order[i]` is what stands at leaf i of the returned value, whose nesting is `spec`. The executable was made
        with what `frozen` tensors hold."""
        self.executable = executable
        self._frozen = tuple(frozen)
        self._frozen_ids = frozenset(map(id, frozen))
        self._template: list[object] = [p.tensor for p in picks]
        self._picks = tuple((k, p.leaf) for k, p in enumerate(picks) if p.tensor is None)
        self._plain = [p.leaf for p in picks] == list(range(len(picks))) and all(
            p.tensor is None for p in picks
        )
        self._tensors = tuple(k for k, p in enumerate(picks) if not p.scalar)
        self._apart: LieApart | None = None
        self._order = tuple(order)
        self._spec = spec
        self._single = spec.is_leaf()
        self._all = not self._single and [r.result for r in order] == list(range(len(order)))
        self._is_tuple = spec == pytree.tree_structure(tuple(range(len(order)))) and not self._single

    def __call__(self, leaves: Sequence[object], out: Sequence[Tensor] | None = None) -> object:
        """The program's result for the leaves of a call with the same key; `LONG_WAY` if an argument that is written
        meets another one, or a frozen tensor."""
        if self._plain:
            args = list(leaves)
        else:
            args = self._template[:]
            for k, leaf in self._picks:
                args[k] = leaves[leaf]
        written = self.executable.written
        if written and self._do_meet(args, written):
            return LONG_WAY
        results = self.executable(cast(list[Argument], args), out)
        if self._single:
            return results[self._order[0].result]
        ordered = (
            results if self._all else [r.plain if r.result < 0 else results[r.result] for r in self._order]
        )
        return tuple(ordered) if self._is_tuple else pytree.tree_unflatten(ordered, self._spec)

    def _do_meet(self, args: Sequence[object], written: Sequence[int]) -> bool:
        itself = self._frozen_ids and any(id(args[k]) in self._frozen_ids for k in written)
        if self._apart is None:
            self._apart = LieApart(written, self._tensors)
        if not itself and (self._apart(args) or not may_meet(args, written, self._tensors)):
            return False
        end = len(args) + len(self._frozen)
        tensors = (*self._tensors, *range(len(args), end))
        return next(meet([*args, *self._frozen], written, tensors), None) is not None


def without_scalars(executable: Executable) -> Executable | None:
    """The same plan with every size read from tensors, for calls that bring no host scalars; None if that is not
    enough."""
    plan = executable.plan
    bindings = bind_symbols(plan.inputs, scalars=False)
    if not {b.symbol for b in bindings} >= {b.symbol for b in plan.bindings}:
        return None
    return executable.rebound(bindings)


def direct_of(
    executable: Executable,
    given: Sequence[object],
    results: Sequence[object],
    leaves: Sequence[object],
    returned: object,
    around: Surroundings,
) -> Direct | None:
    """The short way for one observed call: the executable (from `without_scalars`) got `given` and made `results`; the
    caller passed `leaves` and got `returned`. None unless every tensor's way is plain to see."""
    where = {id(a): k for k, a in enumerate(leaves) if isinstance(a, Tensor)}
    if len(where) != sum(isinstance(a, Tensor) for a in leaves):
        return None
    if around.may_hold(a for a in leaves if isinstance(a, Tensor)):
        return None  # torch gives a graph one tensor once: what stands in for the leaf may stand in for another as well
    fixed = {id(t): t for t in around.tensors}
    picks: list[Pick] = []
    for spec, a in zip(executable.plan.inputs, given, strict=True):
        if not isinstance(spec, Spec):
            picks.append(Pick(0, scalar=True))
        elif id(a) in where:
            picks.append(Pick(where[id(a)]))
        elif id(a) in fixed:
            picks.append(Pick(-1, fixed[id(a)]))
        else:
            return None
    out_leaves, spec = pytree.tree_flatten(returned)
    at = {id(r): k for k, r in enumerate(results) if isinstance(r, Tensor)}
    order: list[Returned] = []
    for x in out_leaves:
        if id(x) in at:
            order.append(Returned(at[id(x)]))
        elif x is None or isinstance(x, (bool, int, float, str)):
            order.append(Returned(-1, x))
        else:
            return None
    if spec.is_leaf() and order[0].result < 0:
        return None
    return Direct(executable, picks, order, spec, around.watched)
