"""Steps of a loop that a mask of data hides whole are jumped over: their folds would take nothing but identities.

Before the products of a step, the mask of its block is evaluated and folded to one truth value. Where loops end (see
`data_bounds`) is known without that; what lies between the ends, such as a block that few rows see, is not. A jump
keeps a machine from having the loads of several steps under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis.loop_segments import shifted_by_rows
from tilewright.analysis.predicate import is_neutral, tested
from tilewright.ir.expr import Axis, Expr, both, call, walk
from tilewright.ir.form import Item
from tilewright.ir.program import Branch, value_of
from tilewright.ir.reduction import any_

from .data_bounds import bounds_loop
from .evaluate import Evaluator
from .states import collapse, hold


def hiding_masks(ev: Evaluator, c: Axis, targets: Sequence[Item]) -> list[tuple[Expr, bool]]:
    """Conditions that read data, each with the truth without which every fold of `targets` takes only its identity;
    none that loops over `c` end at anyway."""
    if not (ev.schedule.reductions.skip_hidden and ev.schedule.reductions.trim and targets):
        return []
    roots = [r for t in targets for r in t.roots]
    found: list[tuple[Expr, bool]] = []
    for x in tested(roots):
        if not _of_data(x) or bounds_loop(x, c) or any(shifted_by_rows(t, x, c) for t in targets):
            continue
        found += [(x, t) for t in (True, False) if all(is_neutral(f, {x: not t}) for f in targets)]
    return found


def skip_hidden(ev: Evaluator, masks: Sequence[tuple[Expr, bool]], inner: Callable[[], None]) -> None:
    """What `inner` writes, jumped over in blocks where one of `masks` hides every lane."""
    seen: Expr | None = None
    for condition, truth in masks:
        value = ev.eval(condition)
        seen = both(seen, value if truth else call("not", value))
    if seen is None:
        inner()
        return
    parts = (hold(ev, seen, ev.blocks(seen)),)
    along = sorted(parts[0].axes, key=lambda a: a == ev.schedule.tiling.lane)
    parts = collapse(ev, any_(), parts, along)
    outer_scope, outer_out = ev.scope, ev.out
    ev.scope, ev.out = outer_scope.child(), []
    inner()
    body = tuple(ev.out)
    ev.scope, ev.out = outer_scope, outer_out
    ev.out.append(Branch(value_of(parts[0]), body))


def _of_data(mask: Expr) -> bool:
    """Whether a mask reads whole numbers or truth values, and nothing that the kernel computes."""
    reads = [x for x in walk(mask) if x.op == "read"]
    return (
        bool(reads) and not any(x.dtype.is_float for x in reads) and all(x.op != "value" for x in walk(mask))
    )
