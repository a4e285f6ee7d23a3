"""Many expressions over sizes as one list of operations: each is worked out once, and again only where a size that it
mentions has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from tilewright.ir.expr import Expr, Symbol

from .host import INTEGER_OPS, Number, rule_of

Values = list[Any]
"""A number for each place of a tape; None where a size that it needs is not known."""


@dataclass(frozen=True, slots=True)
class TapePass:
    """What to do again where some sizes are others: places that take a size, by its name; places that are unknown now;
    and how other places follow from those in front of them."""

    sizes: Sequence[tuple[int, str, bool]]
    """The third says whether a size is a whole number by its type, so that it is held as one."""
    unknown: Sequence[int]
    operations: Sequence[tuple[int, Callable[[Values], Number]]]

    def run(self, values: Values, sizes: Mapping[str, Number]) -> None:
        """Bring `values` up to date."""
        for at, name, whole in self.sizes:
            values[at] = int(sizes[name]) if whole else sizes[name]
        for at in self.unknown:
            values[at] = None
        for at, operation in self.operations:
            values[at] = operation(values)


class SizeTape:
    """Places of expressions, and the operations between them."""

    def __init__(self, exprs: Iterable[Expr]) -> None:
        """The parts of these expressions have places too."""
        self.start: Values = []
        """What stands at each place before any size is known: constants."""
        self._names: list[frozenset[str]] = []
        self._sizes: list[tuple[int, str, bool]] = []
        self._operations: list[tuple[int, Callable[[Values], Number]]] = []
        self._nodes: dict[Expr, int] = {}
        self.places: dict[Expr, int] = {}
        """Where each expression has its number, which is whole."""
        for e in exprs:
            if e not in self.places:
                self.places[e] = self._whole(e)

    def pass_of(self, moved: AbstractSet[str] | None, known: AbstractSet[str]) -> TapePass:
        """What to do where the sizes `known` are known and `moved` (None: all) are others than before."""
        again = {
            at
            for at, names in enumerate(self._names)
            if names and (moved is None or not moved.isdisjoint(names))
        }
        ready = {at for at in again if self._names[at] <= known}
        return TapePass(
            tuple(row for row in self._sizes if row[0] in ready),
            tuple(sorted(again - ready)),
            tuple(row for row in self._operations if row[0] in ready),
        )

    def _put(self, value: Number | None, names: frozenset[str]) -> int:
        self.start.append(value)
        self._names.append(names)
        return len(self.start) - 1

    def _whole(self, e: Expr) -> int:
        at = self._place(e)
        if e.op in INTEGER_OPS or isinstance(e.value, Symbol):
            if not e.dtype.is_float:
                return at
        elif isinstance(e.value, int):
            return at
        return self._put_operation(int, (at,))

    def _place(self, e: Expr) -> int:
        found = self._nodes.get(e)
        if found is None:
            found = self._nodes[e] = self._placed(e)
        return found

    def _placed(self, e: Expr) -> int:
        if e.op == "const":
            assert isinstance(e.value, (bool, int, float))
            return self._put(e.value, frozenset())
        if isinstance(e.value, Symbol):
            at = self._put(None, frozenset((e.value.name,)))
            self._sizes.append((at, e.value.name, not e.dtype.is_float))
            return at
        return self._put_operation(rule_of(e), [self._place(a) for a in e.args])

    def _put_operation(self, rule: Callable[..., Any], args: Sequence[int]) -> int:
        names = frozenset[str]().union(*(self._names[a] for a in args))
        if not names:
            return self._put(rule(*(self.start[a] for a in args)), names)
        at = self._put(None, names)
        self._operations.append((at, _operation(rule, args)))
        return at


def _operation(rule: Callable[..., Any], args: Sequence[int]) -> Callable[[Values], Number]:
    match args:
        case [a]:
            return lambda v: rule(v[a])
        case [a, b]:
            return lambda v: rule(v[a], v[b])
        case _:
            return lambda v: rule(*[v[a] for a in args])
