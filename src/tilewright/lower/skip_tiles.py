"""Steps of a loop that a mask of data hides whole are jumped over: their folds would take nothing but identities.

Before the products of a step, the mask of its block is evaluated and folded to one truth value. Where loops end (see
`data_bounds`) is known without that; what lies between the ends, such as a block that few rows see, is not. A jump
keeps a machine from having the loads of several steps under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.ir.expr import Expr, both, call
from tilewright.ir.program import Branch, value_of
from tilewright.ir.reduction import any_

from .evaluate import Evaluator
from .states import collapse, hold


def skip_hidden(ev: Evaluator, masks: Sequence[tuple[Expr, bool]], inner: Callable[[], None]) -> None:
    """What `inner` writes, jumped over in blocks where one of `masks` hides every lane."""
    seen: Expr | None = None
    for condition, truth in masks:
        value = ev.eval(condition)
        seen = both(seen, value if truth else call("not", value))
    if seen is None:
        inner()
        return
    held = hold(ev, seen, ev.blocks(seen))
    along = sorted(held.axes, key=lambda a: a == ev.schedule.tiling.lane)
    (some,) = collapse(ev, any_(), (held,), along)
    ev.out.append(Branch(value_of(some), ev.apart(ev.scope.child(), inner)))
