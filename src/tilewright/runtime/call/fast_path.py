"""The short way of a call that has been seen before: a key of the arguments' metadata, identity checks of what the
program reads besides its arguments, and the executable."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright.capture.aliasing.apart import LieApart, may_meet, meet
from tilewright.plan.bind import bind_symbols
from tilewright.plan.data import Home, Plan, Spec
from tilewright.runtime.cuda.device import singles_may_round
from tilewright.runtime.objects.known_call import ARRANGED, TOGETHER, KnownCall, Question, native_call_of
from tilewright.runtime.plan.arguments import Argument, in_dual_level
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.known_sizes import Quick, Result

from .around.surroundings import Surroundings

_autocast = torch._C._is_any_autocast_enabled
_grad = torch.is_grad_enabled
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_default_type = torch.get_default_dtype
_deterministic = torch._C._get_deterministic_algorithms
_transform = torch._C._functorch.peek_interpreter_stack
_is_traced = torch._C._is_tracing


def key_of(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    """What a call's behaviour may depend on but the values in its tensors. Raises TypeError where that has no hash, for
    arrays and scalars of numpy (which stand for tensors) and tensors that are not kept as they are (kernels and calls
    would read the wrong sign, or no memory), under modes, transforms and traces of torch, which want to see every op or
    function (a default device is one), and under autocast, which would change calls."""
    if _modes() or _function_modes() or _transform() is not None or _autocast() or _is_traced():
        raise TypeError("a mode is active")
    return (*[ask() for ask in _ASKED], *_parts(args, kwargs))


def _parts(args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    parts: list[object] = [
        (a.shape, a.stride(), a.dtype, a.is_cpu or a.device, a.requires_grad, a.__class__)
        if isinstance(a, Tensor) and _lies_plain(a)
        else _plain(a)
        for a in args
    ]
    if kwargs:
        parts += kwargs
        parts.append(tuple(_parts(tuple(kwargs.values()), {})))
    if len(args) + len(kwargs) > 1:
        parts.append(_repeats((*args, *kwargs.values())))
    return parts


def _repeats(args: Sequence[object]) -> bool:
    """Whether one tensor comes twice: a program may ask. Torch gives a graph one tensor once, so that such calls have
    no short way."""
    found = [id(a) for a in args if isinstance(a, Tensor)]
    found += [
        id(x)
        for a in args
        if isinstance(a, tuple)
        for x in cast(tuple[object, ...], a)
        if isinstance(x, Tensor)
    ]
    return len(set(found)) < len(found)


def _lies_plain(t: Tensor) -> bool:
    """Whether the memory of a tensor holds its numbers: neither negated ones nor conjugates, and not in a form of its
    own."""
    return t.layout is torch.strided and not (t.is_neg() or t.is_conj() or t._is_zerotensor())


def _rounds() -> bool:
    return torch.cuda._initialized and singles_may_round()  # else no tensor lies on a GPU


_ASKED = (_grad, _default_type, _deterministic, _rounds)
"""What a key begins with."""


def _facts(key: Sequence[object]) -> tuple[Question, ...]:
    """What a key knows of what is around a call. Under modes, transforms, autocast and traces nothing has a key;
    tangents, the executable refuses."""
    none = (
        (_modes, 0), (_function_modes, 0), (_transform, None), (_autocast, False), (in_dual_level, False),
        (_is_traced, False),
    )  # fmt: skip
    return tuple([Question(ask, answer) for ask, answer in (*none, *zip(_ASKED, key, strict=False))])


def _plain(value: object) -> tuple[object, ...]:
    kind = value.__class__
    if kind in _VALUES:
        return kind, value
    if isinstance(value, tuple):
        return kind, *map(_part, cast(tuple[object, ...], value))
    if isinstance(value, np.generic):
        raise TypeError("a scalar of numpy stands for a tensor")
    if isinstance(value, Tensor):
        raise TypeError("a tensor is not kept as it is")
    if kind.__hash__ is None:
        raise TypeError("what may change has no key")
    return kind, _TheSame(value)


def _part(value: object) -> tuple[object, ...]:
    """An item of a tuple: of a tensor, that it is this one too, as graphs take in only what is given itself."""
    if isinstance(value, Tensor) and _lies_plain(value):
        return _TheSame(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return _plain(value)


_VALUES = frozenset({int, float, bool, str, type(None), bytes, torch.dtype, torch.device})
"""Types of which equal values are the same to a program."""


class _TheSame:
    """An object in a key: the key is for this one only, whatever it says that it equals."""

    __slots__ = ("_of",)

    def __init__(self, of: object) -> None:
        self._of = of

    def __hash__(self) -> int:
        return id(self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TheSame) and other._of is self._of


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
    plain: None | bool | int | float | str | torch.Size = None


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
        around: Surroundings | None = None,
    ) -> None:
        """`order[i]` is what stands at leaf i of the returned value, whose nesting is `spec`. `around` is what the
        program reads besides; the executable was made with what tensors hold that are watched there."""
        self.executable = executable
        self._around = around
        self._frozen = () if around is None else tuple(around.watched)
        self._frozen_ids = frozenset(map(id, self._frozen))
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
        self._known: Quick | None = None

    def unchanged(self) -> bool:
        """Whether what the program reads besides its arguments is as it was."""
        return self._around is None or self._around.unchanged()

    def known_call(
        self, key: Sequence[object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Callable[..., object] | None:
        """The native function for calls like this one, with this key, which this way has just served; it returns
        `LONG_WAY` for others. None where there is none, or none that is shorter than the one made before."""
        if self._around is None or not isinstance(self.executable, Executable):
            return None
        found = self.executable.shortest(self._arguments((*args, *kwargs.values())))
        if found is None or found.run is self._known:
            return None
        self._known = found.run
        seen = frozenset(id(self._template[k]) for k in found.looked_at)
        alone = (
            self._order[0].result if self._single else TOGETHER if self._all and self._is_tuple else ARRANGED
        )
        given: list[tuple[int, object]] = [(-1, held) for held in self._template]
        for k, leaf in self._picks:
            given[k] = leaf, None
        written = self.executable.written

        def run_apart(args: list[Argument]) -> list[Result] | None:
            return None if self._do_meet(args, written) else found.run(args)

        run = run_apart if written else found.run
        asked = (*_facts(key), *self._around.guards(seen))
        return native_call_of(KnownCall(args, kwargs, asked, given, run, alone, self._arranged, LONG_WAY))

    def _arranged(self, results: Sequence[object]) -> object:
        if self._single:
            return results[self._order[0].result]
        ordered = (
            results if self._all else [r.plain if r.result < 0 else results[r.result] for r in self._order]
        )
        return tuple(ordered) if self._is_tuple else pytree.tree_unflatten(ordered, self._spec)

    def __call__(self, leaves: Sequence[object], out: Sequence[Tensor] | None = None) -> object:
        """The program's result for the leaves of a call with the same key; `LONG_WAY` if an argument that is written
        meets another one, or a frozen tensor."""
        args = self._arguments(leaves)
        written = self.executable.written
        if written and self._do_meet(args, written):
            return LONG_WAY
        results = self.executable(args, out)
        return self._arranged(results)

    def _arguments(self, leaves: Sequence[object]) -> list[Argument]:
        """Those of the executable."""
        if self._plain:
            return cast(list[Argument], list(leaves))
        args = self._template[:]
        for k, leaf in self._picks:
            args[k] = leaves[leaf]
        return cast(list[Argument], args)

    def _do_meet(self, args: Sequence[object], written: Sequence[int]) -> bool:
        itself = self._frozen_ids and any(id(args[k]) in self._frozen_ids for k in written)
        if self._apart is None:
            self._apart = LieApart(written, self._tensors)
        # What lies apart from other arguments may yet be memory of a frozen tensor, which is none.
        apart = not self._frozen and self._apart(args)
        if apart or (not itself and not may_meet(args, written, self._tensors)):
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


def _measures(plan: Plan) -> bool:
    """Whether it finds numbers in what tensors hold: sizes of results, or items."""
    return any(segment.measures for segment in plan.segments) or any(
        b.home is Home.NUMBER for b in plan.buffers
    )


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
    out_leaves, spec = pytree.tree_flatten(returned, is_leaf=lambda x: isinstance(x, torch.Size))
    at = {id(r): k for k, r in enumerate(results) if isinstance(r, Tensor)}
    order: list[Returned] = []
    for x in out_leaves:
        if id(x) in at:
            order.append(Returned(at[id(x)]))
        elif x is None or isinstance(x, (bool, int, float, str, torch.Size)):
            order.append(Returned(-1, x))
        else:
            return None
    if spec.is_leaf() and order[0].result < 0:
        return None
    if _measures(executable.plan) and any(isinstance(r.plain, (int, float, torch.Size)) for r in order):
        return None  # numbers may depend on what tensors hold, which no key knows
    return Direct(executable, picks, order, spec, around)
