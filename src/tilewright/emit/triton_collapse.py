"""Merges along a block axis: the language's own reductions where they mean the same, else a function made for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.ir.dtype import bool_
from tilewright.ir.expr import Axis
from tilewright.ir.program import Collapse, Prefix, Stmt, Var
from tilewright.ir.reduction import Reduction

from .triton_expr import Expressions, count_reads
from .triton_helpers import Helpers
from .triton_index import Indices
from .triton_scope import Lines, Term

MERGES = {"add": "total", "mul": "product", "maximum": "larger", "minimum": "smaller", "and": "all_of", "or": "either",
          "xor": "exclusive"}  # fmt: skip
TRUTHS = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}


@dataclass(frozen=True, slots=True)
class Whole:
    """A merge along all dimensions of a block at once: each thread then merges what it holds before any speaks to
    another one."""

    vars: tuple[Var, ...]
    parts: tuple[Var, ...]
    reduction: Reduction
    axes: tuple[Axis, ...]


def joined(statements: Sequence[Stmt], readers: Mapping[int, int]) -> list[Stmt | Whole]:
    """Statements in order, with merges along one dimension after the other that leave none as one, where nothing else
    reads what is between them. `readers` counts the statements that read a value."""
    made: list[Stmt | Whole] = []
    chain: list[Collapse] = []

    def close() -> None:
        whole = len(chain) > 1 and not chain[-1].vars[0].axes
        axes = tuple(c.axis for c in chain)
        made.extend([Whole(chain[-1].vars, chain[0].parts, chain[0].reduction, axes)] if whole else chain)
        chain.clear()

    for s in statements:
        follows = isinstance(s, Collapse) and bool(chain) and s.parts == chain[-1].vars
        if not follows or any(readers[v.id] > 1 for v in chain[-1].vars):
            close()
        if isinstance(s, Collapse) and s.reduction.combiner is not None:
            chain.append(s)
        else:
            made.append(s)
    close()
    return made


def merged(s: Collapse | Prefix | Whole, parts: Sequence[Term], place: int | None, helpers: Helpers) -> str:
    """The call that merges `parts`, blocks of one shape, along dimension `place` (None: along all)."""
    names = parts[0].text if len(parts) == 1 else f"({', '.join(p.text for p in parts)})"
    op, dtype = s.reduction.combiner, s.reduction.state[0]
    if isinstance(s, Prefix):
        if op == "add" and dtype.is_float:
            return f"tl.cumsum({names}, {place})"
        return f"tl.associative_scan({names}, {place}, {merge_name(s.reduction, helpers)})"
    if op == "add" and dtype.bytes >= 4:
        return f"tl.sum({names}, {place})"
    if op in ("maximum", "minimum") and not dtype.is_float and dtype.bytes >= 4:
        return f"tl.{op[:3]}({names}, {place})"
    return f"tl.reduce({names}, {place}, {merge_name(s.reduction, helpers)})"


def merge_name(reduction: Reduction, helpers: Helpers) -> str:
    """The function that merges two states, the earlier one first."""
    op = reduction.combiner
    if op is not None:
        op = TRUTHS.get(op, op) if reduction.state[0] is bool_ else op
        if op in MERGES:
            return helpers.use(MERGES[op])
    text = _function(reduction, helpers)
    name = base = f"merge_{reduction.name}"
    number = 1
    while not helpers.free(name, text.format(name)):
        number += 1
        name = f"{base}{number}"
    helpers.add(name, text.format(name))
    return name


def _function(reduction: Reduction, helpers: Helpers) -> str:
    """The text of a function that merges two states; its name is left open."""
    count = len(reduction.state)
    lines = Lines()
    printer = Expressions(True, {}, {}, lines, helpers, Indices(frozenset()))
    printer.counts = count_reads(reduction.merge)
    results = [printer.value(e).text for e in reduction.merge]
    names = ", ".join([f"a{k}" for k in range(count)] + [f"b{k}" for k in range(count)])
    lines.put(f"return {', '.join(results)}")
    return "def {}" + f"({names}):\n" + lines.text().replace("{", "{{").replace("}", "}}")
