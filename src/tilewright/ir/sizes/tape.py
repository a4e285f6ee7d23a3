"""Many expressions over sizes as one list of operations: each is worked out once, and again only where a size that it
mentions has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, cast

from tilewright.ir.expr import Expr, Symbol

from .host import INTEGER_OPS, Number, rule_of

Values = list[Any]
"""A number for each place of a tape; None where a size that it needs is not known."""


Size = tuple[int, str, bool]
"""A place that takes a size, its name, and whether it is whole by its type, so that it is held as a whole number."""


@dataclass(frozen=True, slots=True)
class Operation:
    """The number at place `at` follows by `rule` from those at `args`. `op` names the rule."""

    at: int
    op: str
    rule: Callable[..., Any]
    args: tuple[int, ...]


class TapePass:
    """What to do again where some sizes are others. The first run goes through the operations one by one; for all
    later ones they are one function of Python's, without a call between two of them."""

    def __init__(
        self,
        sizes: Sequence[Size],
        unknown: Sequence[int],
        operations: Sequence[Operation],
        wanted: Sequence[Sequence[int]],
    ) -> None:
        """Places that take a size; those that are unknown now; how others follow from those in front; and places whose
        numbers are `wanted`."""
        self.sizes, self.unknown, self.operations, self.wanted = sizes, unknown, operations, wanted
        self._function: Pass | None = None
        self._runs = 0

    def run(self, values: Values, sizes: Mapping[str, Number]) -> Wanted:
        """Bring `values` up to date; gives what is wanted of them."""
        if self._function is not None:
            return self._function(values, sizes)
        if self._runs:
            self._function = self._compiled()
        self._runs += 1
        for at, name, whole in self.sizes:
            values[at] = int(sizes[name]) if whole else sizes[name]
        for at in self.unknown:
            values[at] = None
        for x in self.operations:
            values[x.at] = x.rule(*[values[a] for a in x.args])
        return tuple(tuple(values[a] for a in places) for places in self.wanted)

    def _compiled(self) -> Pass:
        """The same as a function. Its text is made of places and operators alone: names of sizes and rules are handed
        over beside it."""
        names = {at: f"s[n{at}]" if not whole else f"int(s[n{at}])" for at, _, whole in self.sizes}
        given: dict[str, object] = {f"n{at}": name for at, name, _ in self.sizes}
        lines = [f"v[{at}] = x{at} = {text}" for at, text in names.items()]
        lines += [f"v[{at}] = None" for at in self.unknown]
        here = {*names, *(x.at for x in self.operations)}
        text_of = lambda a: f"x{a}" if a in here else f"v[{a}]"  # noqa: E731
        for x in self.operations:
            args, form = [text_of(a) for a in x.args], _TEXTS.get(x.op)
            if form is None:
                given[f"r{x.at}"] = x.rule
                form = f"r{x.at}({', '.join('{}' for _ in args)})"
            lines.append(f"v[{x.at}] = x{x.at} = {form.format(*args)}")
        wanted = ", ".join(
            f"({', '.join(text_of(a) for a in places)},)" if places else "()" for places in self.wanted
        )
        lines.append(f"return ({wanted},)" if self.wanted else "return ()")
        exec("def run(v, s):\n " + "\n ".join(lines), given)
        return cast(Pass, given["run"])


Wanted = tuple[tuple[Any, ...], ...]
Pass = Callable[[Values, Mapping[str, Number]], Wanted]
_TEXTS: Mapping[str, str] = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "neg": "-{}", "floordiv": "{0} // {1} if {1} else 0",
    "mod": "{0} % {1} if {1} else 0", "minimum": "{1} if {1} < {0} else {0}",
    "maximum": "{1} if {1} > {0} else {0}",
}  # fmt: skip
"""Operations that Python writes without a call."""


class SizeTape:
    """Places of expressions, and the operations between them."""

    def __init__(self, exprs: Iterable[Expr]) -> None:
        """The parts of these expressions have places too."""
        self.start: Values = []
        """What stands at each place before any size is known: constants."""
        self._names: list[frozenset[str]] = []
        self._sizes: list[Size] = []
        self._operations: list[Operation] = []
        self._nodes: dict[Expr, int] = {}
        self.places: dict[Expr, int] = {}
        """Where each expression has its number, which is whole."""
        for e in exprs:
            if e not in self.places:
                self.places[e] = self._whole(e)

    def pass_of(
        self, moved: AbstractSet[str] | None, known: AbstractSet[str], wanted: Sequence[Sequence[Expr]] = ()
    ) -> TapePass:
        """What to do where the sizes `known` are known and `moved` (None: all) are others than before; it gives the
        numbers of the expressions `wanted`."""
        again = {
            at
            for at, names in enumerate(self._names)
            if names and (moved is None or not moved.isdisjoint(names))
        }
        ready = {at for at in again if self._names[at] <= known}
        return TapePass(
            tuple(row for row in self._sizes if row[0] in ready),
            tuple(sorted(again - ready)),
            tuple(x for x in self._operations if x.at in ready),
            tuple(tuple(self.places[e] for e in exprs) for exprs in wanted),
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
        return self._put_operation("whole", int, (at,))

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
        return self._put_operation(e.op, rule_of(e), tuple(map(self._place, e.args)))

    def _put_operation(self, op: str, rule: Callable[..., Any], args: tuple[int, ...]) -> int:
        names = frozenset[str]().union(*(self._names[a] for a in args))
        if not names:
            return self._put(rule(*(self.start[a] for a in args)), names)
        at = self._put(None, names)
        self._operations.append(Operation(at, op, rule, args))
        return at
