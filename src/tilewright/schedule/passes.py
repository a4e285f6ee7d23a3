"""Pass numbers: which loops over one class there are, and which folds and outputs each of them serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.expr import Axis
from .form import Item, folds_read
from .transport import degree

Numbers = dict[int, int]


def pass_numbers(
    cone: Sequence[Item], outputs: Sequence[Item], c: Axis, online: bool
) -> tuple[Numbers, Numbers]:
    """Pass number along `c` of each item of `cone` (producers first) and of `outputs`; and, for each fold that runs in
    the pass of the running maximum that it reads (`online`, by transport), the number of that fold.

    A reader stands one pass after a fold over `c` that it reads; beside a scan that it reads at the same index."""
    numbers: Numbers = {}
    merged: Numbers = {}
    inside = {i.id: i for i in cone}
    for i in (*cone, *outputs):
        number, waits = 0, []
        for d in folds_read(i.roots):
            up = inside.get(d)
            if up is None:
                continue
            late = (c in up.reduce or up.scan == c) and not (up.scan == c and c in i.kept)
            number = max(number, numbers[d] + late)
            waits += [d] if late else []
        upstream = _upstream(i, [d for d in waits if numbers[d] + 1 == number], c, inside) if online else None
        if upstream is not None:
            merged[i.id] = upstream
            number -= 1
        numbers[i.id] = number
    return numbers, merged


def _upstream(i: Item, late: Sequence[int], c: Axis, inside: Mapping[int, Item]) -> int | None:
    """The one fold that `i` waits for, if `i` can follow it while it still moves."""
    if len(late) != 1 or i.reduce != (c,) or inside[late[0]].reduce != (c,):
        return None
    return late[0] if degree(i, inside[late[0]]) is not None else None
