"""Sums in steps of one tap: a class that sums run over becomes a number of steps and a place in a step.

Where a step holds channels of one tap only, the tap, its place in memory and the border that it may lie behind are
numbers of the step, the same for all channels.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.form.classes import split_class
from tilewright.ir.expr import Axis, axes_of, axis, walk
from tilewright.ir.form import Form
from tilewright.ir.sizes import dims


def walk_sums(form: Form, lengths: Mapping[Axis, int]) -> Form:
    """`form` with each of these classes as steps of so many elements, the second of two classes in its place; as it is
    where they do not divide it, or where a step would have parts of several taps."""
    for a, length in lengths.items():
        size = dims.integer(length)
        count = dims.exact_div(a.extent, size)
        if count is None or count is dims.ONE or not _hides_taps(form, a):
            continue
        made = split_class(form, a, count, size)
        within = [c for c in made.classes() if c not in form.classes()][1]
        if not _hides_taps(made, within):
            form = made
    return form


def _hides_taps(form: Form, a: Axis) -> bool:
    """Whether quotients and rests are taken of a class."""
    return any(
        x.op in ("floordiv", "mod") and axis(a) in axes_of(x)
        for i in form.items
        for r in i.roots
        for x in walk(r)
    )
