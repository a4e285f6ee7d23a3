"""Two classes of rows as one: a few queries of heads that share keys are the rows of one product.

A product of blocks has one class on each side. Of two classes of rows one would be left to the grid, whose points read
the same matrix again. A class r in their place, with a = r // n and b = r % n, is one side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from tilewright.analysis.contraction import product_sides
from tilewright.ir.expr import Axis, axis, walk
from tilewright.ir.form import Form
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import FORMS

from .fuse import fuse


def pack_rows(form: Form, most: Mapping[Axis, int] = MappingProxyType({})) -> Form:
    """`form` with the few rows of its products in one class; itself if they are many, or in one already. `most` are
    bounds of extents that are not known."""
    rows = _rows(form)
    known = {a: n for a in rows if (n := most.get(a, dims.static(a.extent))) is not None}
    live = [a for a in rows if a.extent is not dims.ONE]
    if len(live) != 2 or len(known) < len(rows) or math.prod(known.values()) > FORMS.max_packed_rows:
        return form
    first, second = sorted(live, key=lambda a: (a in most, known[a]), reverse=True)
    return fuse(form, (first, second))


def _rows(form: Form) -> list[Axis]:
    """The classes that stand against what one product keeps and another one folds, if every fold and output has them,
    and results of folds are read at their own place."""
    found = [s for i in form.folds.values() if (s := product_sides(i)) is not None]
    folded = {a for *_, over in found for a in over}
    passed = folded & {a for s in found for side in s[:2] for a in side}
    rows = [
        a for left, right, _ in found for own, other in ((left, right), (right, left))
        if set(other) & passed and not set(own) & folded for a in own
    ]  # fmt: skip
    rows = list(dict.fromkeys(rows))
    if not all(set(rows) <= set(i.kept) and i.scan is None for i in form.items):
        return []
    reads = [x for i in form.items for r in i.roots for x in walk(r) if x.op == "value"]
    own = all(
        x.args[k] is axis(a)
        for x in reads
        if isinstance(x.value, tuple)
        for k, a in enumerate(form.items[x.value[0]].kept)
        if a in rows
    )
    return rows if own else []
