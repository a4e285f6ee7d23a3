"""Merges along a block axis: the language's own reductions where they mean the same, else a function made for them."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.dtype import bool_
from tilewright.ir.program import Collapse, Prefix
from tilewright.ir.reduction import Reduction

from .expr import Expressions, count_reads
from .helpers import Helpers
from .index import Indices
from .scope import Lines, Term

MERGES = {"add": "total", "mul": "product", "maximum": "larger", "minimum": "smaller", "and": "all_of", "or": "either",
          "xor": "exclusive"}  # fmt: skip
TRUTHS = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}


def print_merge(s: Collapse | Prefix, parts: Sequence[Term], place: int | None, helpers: Helpers) -> str:
    """The call that merges `parts`, blocks of one shape, along dimension `place` (None: along all)."""
    names = parts[0].text if len(parts) == 1 else f"({', '.join(p.text for p in parts)})"
    op, dtype = s.reduction.combiner, s.reduction.state[0]
    if isinstance(s, Prefix):
        if op == "add" and dtype.is_float:
            return f"tl.cumsum({names}, {place})"
        return f"tl.associative_scan({names}, {place}, {merge_name(s.reduction, helpers)})"
    if op == "add" and dtype.bytes >= 4:
        return f"{helpers.language}.sum({names}, {place})"
    if op in ("maximum", "minimum") and not dtype.is_float and dtype.bytes >= 4:
        return f"{helpers.language}.{op[:3]}({names}, {place})"
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
