"""A kernel as folds and outputs over classes.

Pointwise ops vanish: a *fold* (one reduction) or an *output* (one stored value) holds the whole expression of what it
computes, over reads of the kernel's parameters (`read(k, offset)`) and results of folds (`value` leaves whose arguments
are the fold's kept classes). Equal subexpressions are one interned object, so sharing needs no bookkeeping.

A *class* is an axis that several folds and outputs share: one possible loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .dtype import DType
from .expr import Axis, Expr, walk
from .graph import Value
from .reduction import Reduction
from .sizes import dims


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A fold (with `reduction`) or an output (with `param`, the parameter it is stored to, at element offset `offset`).

    `kept` are the classes that index its result, `reduce` those it folds over; `scan` is a kept class along which the
    fold is an inclusive running one. `source` is the place of a fold's op in the kernel (-1: it stems from none).
    `summed`: its op adds up products that another op makes, as libraries do in levels; a product of matrices is one
    chain there. `halves`: the half type of floats that its op reads, if they are of one: what the kernel multiplies
    them with was rounded to it in the program, or in the library's routine; None keeps what is computed as it is.
    `operands`: its op multiplies two values of that type and nothing else, so that either was of it in the program."""

    id: int
    kept: tuple[Axis, ...]
    body: tuple[Expr, ...]
    reduce: tuple[Axis, ...] = ()
    reduction: Reduction | None = None
    scan: Axis | None = None
    param: int = -1
    offset: Expr = dims.ZERO
    source: int = -1
    summed: bool = False
    halves: DType | None = None
    operands: bool = False

    @property
    def is_fold(self) -> bool:
        """Whether this is a reduction."""
        return self.reduction is not None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every class it uses."""
        return self.kept + self.reduce

    @property
    def roots(self) -> tuple[Expr, ...]:
        """Expressions it evaluates."""
        return self.body if self.is_fold else (*self.body, self.offset)

    def accesses(self) -> list[tuple[int, Expr]]:
        """(parameter, offset) of each memory access."""
        found = [access for b in self.roots for access in _accesses_of(b)]
        return found if self.is_fold else [*found, (self.param, self.offset)]


@lru_cache(1 << 14)
def _accesses_of(root: Expr) -> tuple[tuple[int, Expr], ...]:
    return tuple((x.value, x.args[0]) for x in walk(root) if x.op == "read" and isinstance(x.value, int))


@dataclass(frozen=True, slots=True)
class FormStep:
    """A change of a form by its name (see `form.steps`), with the numbers that it was given for loop classes."""

    name: str
    numbers: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        given = ", ".join(f"{c}={n}" for c, n in self.numbers)
        return f"{self.name}({given})" if given else self.name


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Parameters (inputs, then outputs) with the elements that each spans in memory, folds and outputs of a kernel.
    `steps` are those that led here from the form that the kernel's ops have."""

    params: tuple[Value, ...]
    sizes: tuple[Expr, ...]
    items: tuple[Item, ...]
    steps: tuple[FormStep, ...] = ()

    def after(self, step: FormStep) -> Form:
        """This form, to which `step` led."""
        return replace(self, steps=(*self.steps, step))

    @property
    def folds(self) -> dict[int, Item]:
        """Folds by number."""
        return {i.id: i for i in self.items if i.is_fold}

    @property
    def outputs(self) -> list[Item]:
        """Stores."""
        return [i for i in self.items if not i.is_fold]

    def classes(self) -> list[Axis]:
        """Every class, outputs' first."""
        found: dict[Axis, None] = {}
        for i in (*self.outputs, *self.folds.values()):
            found |= dict.fromkeys(i.axes)
        return list(found)

    def show(self) -> str:
        """The form as text."""
        lines: list[str] = []
        for i in self.items:
            kept = ", ".join(f"{a.name}:{a.extent}" for a in i.kept)
            over = ", ".join(f"{a.name}:{a.extent}" for a in i.reduce)
            body = "; ".join(map(repr, i.body))
            head = f"${i.id} = {i.reduction.name}({over})" if i.reduction else f"@{i.param}[{i.offset}] ="
            lines.append(f"[{kept}] {head} {body}")
        return "\n".join(lines)


def producers_first(folds: Mapping[int, Item]) -> list[Item]:
    """Folds by number in an order in which each stands behind those it reads."""
    order: dict[int, Item] = {}

    def visit(number: int) -> None:
        if number in order or number not in folds:
            return
        for d in folds_read(folds[number].roots):
            visit(d)
        order[number] = folds[number]

    for number in folds:
        visit(number)
    return list(order.values())


def folds_read(roots: Sequence[Expr]) -> list[int]:
    """Numbers of the folds that expressions read directly."""
    found: dict[int, None] = {}
    for r in roots:
        for x in walk(r):
            if x.op == "value" and isinstance(x.value, tuple):
                found[x.value[0]] = None
    return list(found)


@lru_cache(1 << 8)
def reached_folds(form: Form, item: Item) -> frozenset[int]:
    """The folds that an item is made of."""
    found: set[int] = set()
    stack = folds_read(item.roots)
    while stack:
        f = stack.pop()
        if f not in found:
            found.add(f)
            stack += folds_read(form.items[f].roots)
    return frozenset(found)


def are_at_own_place(form: Form) -> bool:
    """Whether all results of folds are read at the classes that their folds keep."""
    reads = (x for i in form.items for r in i.roots for x in walk(r) if x.op == "value")
    return all(
        [a.value for a in x.args] == list(form.items[x.value[0]].kept)
        for x in reads
        if isinstance(x.value, tuple)
    )
