"""What a program reads besides its arguments: what it holds and calls by name, and what torch has guarded."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from tilewright.runtime.objects.known_call import Question
from tilewright.runtime.objects.reading import Lies, alike, reader
from tilewright.runtime.objects.standing import StandingTensors, standing

from .held import ABSENT, Held, comparer, entry
from .reached import OF_EVERY_MODULE, cells_of, global_hooks, globals_of, leads_to, methods_of, reached
from .reads import Reads, identity
from .words import word_of_attribute, word_of_cell

_grad = torch.is_grad_enabled
_wants_gradient = attrgetter("requires_grad")
_version: Callable[[Tensor], int] = vars(torch._C.TensorBase)["_version"].__get__
_address = Tensor.data_ptr


class Surroundings:
    """What a program reads besides its arguments: its modules, their classes, parameters, buffers, hooks and plain
    attributes, the closures and global names of its functions, forward methods and what these call by name, and all
    that torch guarded (`reads`). `unchanged` compares identities, and sizes and types of tensors."""

    def __init__(self, target: Callable[..., object], reads: Reads | None = None) -> None:
        self.tensors: list[Tensor] = []
        self.reads = Reads() if reads is None else reads
        self._dicts: list[Mapping[Any, object]] = []
        self._names: list[object] = []
        self._values: list[object] = []
        self._noted: set[tuple[int, str]] = set()
        self._counted: list[Mapping[Any, object]] = list(global_hooks())
        self.versions: dict[int, tuple[Tensor, int, int]] = {}
        """What `watch` was told of."""
        self._likes: list[Tensor] = []
        self.watch(())
        self.known = isinstance(target, (torch.nn.Module, types.FunctionType))
        found = reached(target)
        self._modules = [x for x in found if isinstance(x, torch.nn.Module)]
        for module in self._modules:
            self._module(module)
        for kind in dict.fromkeys(map(type, self._modules)):
            self._methods(kind)
        functions = [x for x in found if isinstance(x, types.FunctionType)]
        for function in functions:
            self._add(function.__globals__, globals_of(function))
        self._cells = (*(pair for f in functions for pair in cells_of(f)), *self.reads.cells.values())
        self._compare()

    def _compare(self) -> None:
        """Make what compares."""
        reads = self.reads
        own = set(map(id, self.tensors))
        self._likes = [*self.tensors, *(t for k, t in reads.tensors.items() if k not in own)]
        self._alike = alike(self._likes)
        self._look_at()
        self._asked = [*self.tensors, *reads.tensors.values()] if reads.asks_gradients else []
        self._answers = list(map(_wants_gradient, self._asked))
        self._typed = list({id(x): x for x in (*self._modules, *reads.typed.values())}.values())
        self._classes = list(map(type, self._typed))
        self._lists = list(reads.lists.values())
        self._rows = self._held()
        self._sizes = [len(h.dict) if h.counted else -1 for h in self._rows]
        owners = {id(m): (m, vars(m)) for m in self._modules} | reads.owners
        self._owners, self._functions = list(owners.values()), list(reads.functions.values())
        self._compare_words()

    def _compare_words(self) -> None:
        """Make the native function, which also looks at variables and attributes that stand in one word each; Python is
        asked for the others."""
        looks, cells = list(self.reads.looks.values()), list(self._cells)
        found = [word_of_attribute(x.of, x.name, x.value) for x in looks]
        held = [word_of_cell(c, v) for c, v in cells]
        words = [w for w in (*found, *held) if w is not None]
        self._same = comparer(self._rows, self._typed, self._lists, self._owners, self._functions, words)
        if self._same is not None:
            looks = [x for x, word in zip(looks, found, strict=True) if word is None]
            cells = [x for x, word in zip(cells, held, strict=True) if word is None]
        self._looked = [x.of for x in looks], [x.name for x in looks], [x.value for x in looks]
        self._variables = tuple(cells)

    def _held(self) -> list[Held]:
        """The names by dict."""
        found: dict[int, Held] = {}
        for d, name, value in zip(self._dicts, self._names, self._values, strict=True):
            found.setdefault(identity(d), Held(d)).items.append((name, value))
        for counted in self._counted:
            found.setdefault(identity(counted), Held(counted)).counted = True
        for read in self.reads.dicts.values():
            held = found.setdefault(identity(read.dict), Held(read.dict))
            held.items += read.items
            held.counted, held.keys = held.counted or read.counted, read.keys
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

    def _methods(self, kind: type) -> None:
        """Note what a class of modules calls, and that no class before the one that defines it has it as well."""
        for owner, name in methods_of(kind):
            for c in kind.__mro__[: kind.__mro__.index(owner) + 1]:
                if (identity(vars(c)), name) not in self._noted:
                    self._noted.add((identity(vars(c)), name))
                    self._add(vars(c), [name])

    def _add(self, held: Mapping[Any, object], names: Sequence[object]) -> None:
        self._dicts += [held] * len(names)
        self._names += names
        self._values += [entry(held, n) for n in names]

    def watch(self, versions: Iterable[tuple[Tensor, int, int]]) -> None:
        """Also compare address and version of these tensors (version -1: it has none)."""
        self.versions |= {id(t): (t, address, version) for t, address, version in versions}
        found = self.versions.values()
        self._weights = [t for t, *_ in found]
        self._counters = [t for t, _, version in found if version >= 0]
        self._counts = [version for *_, version in found if version >= 0]
        self._addresses = [address for _, address, _ in found]
        self._read = reader([
            Lies(k, 0, tuple(t.shape), t.stride(), address) for k, (t, address, _) in enumerate(found)
        ])  # fmt: skip
        self._look_at()

    def _look_at(self) -> None:
        """Make what looks at all tensors at once, at each of them once."""
        known = set(map(id, self._likes))
        self._all: list[object] = [*self._likes, *(t for t in self._weights if id(t) not in known)]
        self._standings: dict[tuple[int, ...], StandingTensors] = {}
        self._standing = self._standing_of(tuple(range(len(self._all))))

    def _standing_of(self, places: tuple[int, ...]) -> StandingTensors | None:
        """What looks at some of all tensors, as long as they can be looked at so."""
        if places not in self._standings:
            made = self._new_standing(places)
            if made is None:
                return None
            self._standings[places] = made
        return self._standings[places]

    def _new_standing(self, places: tuple[int, ...]) -> StandingTensors | None:
        """The same, with nothing noted; tensors that are watched must not be written."""
        counted = {number for number, (*_, version) in self.versions.items() if version >= 0}
        return standing(places, frozenset(k for k in places if id(self._all[k]) in counted))

    @property
    def watched(self) -> Sequence[Tensor]:
        """What `watch` was told of."""
        return self._weights

    def may_hold(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the program may come to one of these tensors without being given it: as a parameter or buffer, or by
        a name."""
        own = [v for m in self._modules for n, v in vars(m).items() if n not in OF_EVERY_MODULE]
        known = [*self.tensors, *self._values, *own, *(v for _, v in self._cells)]
        return leads_to(known, frozenset(map(id, tensors)), self._modules)

    def unchanged(self) -> bool:
        """Whether names still mean the same objects, tensors are of the same kind, and no gradient is asked for."""
        if not (self._standing is not None and self._standing.still(self._all)) and not self._tensors_stand():
            return False
        if not self._wants_none() or not (self._same() if self._same is not None else self._look()):
            return False
        return self._answers_stand()

    def guards(self, seen: frozenset[int]) -> list[Question]:
        """The same as what a known call asks, one by one; it may say no where `unchanged` says yes after a longer look.
        Who asks sees of the tensors with the ids `seen` himself what they are."""
        rest = tuple([k for k, t in enumerate(self._all) if id(t) in self.versions or id(t) not in seen])
        looks = self._standing_of(rest)
        if looks is None or self._same is None or not (self.unchanged() and self._tensors_stand()):
            return [Question(self.unchanged)]
        if not looks.still(self._all):
            return [Question(self.unchanged)]
        found = [Question(looks.still, argument=(self._all,))] if rest else []
        found.append(Question(self._same))
        if _grad() and self.tensors:
            found.append(Question(self._wants_none))
        if self._asked or self._looked[0] or self._variables:
            found.append(Question(self._answers_stand))
        return found

    def _wants_none(self) -> bool:
        """Whether no gradient is asked for."""
        return not (self.tensors and _grad() and any(map(_wants_gradient, self.tensors)))

    def _answers_stand(self) -> bool:
        """Whether gradients are asked for of the same tensors, attributes and variables hold the same objects."""
        if self._asked and list(map(_wants_gradient, self._asked)) != self._answers:
            return False
        try:
            looked = not self._looked[0] or all(
                map(is_, map(getattr, *self._looked[:2], repeat(ABSENT)), self._looked[2])
            )
            return looked and (not self._variables or all(c.cell_contents is v for c, v in self._variables))
        except ValueError:  # a variable holds nothing any more
            return False

    def _tensors_stand(self) -> bool:
        """Whether tensors are alike and watched ones stand, though some may have moved since somebody looked."""
        made = [(old, self._new_standing(places)) for places, old in list(self._standings.items())]
        noted = [(old, new) for old, new in made if new is not None and new.note(self._all)]
        if not self._alike() or self._weights and not self._weights_stand():
            return False
        for old, new in noted:
            if new.still(self._all):  # no thread changed one while others were looked at
                old.take(new)
        if len(noted) < len(made):  # some cannot be noted: each look would make all of this in vain
            self._standings, self._standing = {}, None
        return True

    def _weights_stand(self) -> bool:
        """Whether the watched tensors lie where they did, and nobody has written into them."""
        stand = self._read is not None and self._read(self._weights, 0)
        stand = stand or list(map(_address, self._weights)) == self._addresses
        return stand and list(map(_version, self._counters)) == self._counts

    def _look(self) -> bool:
        """What the native function tells, looked at by Python."""
        same = all(size < 0 or size == len(h.dict) for size, h in zip(self._sizes, self._rows, strict=True))
        same = same and all(map(is_, map(type, self._typed), self._classes))
        same = same and all(getattr(x, "__dict__", None) is own for x, own in self._owners)
        return same and all(x.still() for x in (*self._rows, *self._lists, *self._functions))
