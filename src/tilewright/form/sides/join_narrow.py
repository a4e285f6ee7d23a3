"""A class too narrow for the threads of a warp and the ones around it in memory as one: a class r in their place, with
place r // n and part r % n.

A shuffle of pixels writes pairs that it reads far apart. Where pairs and their places are two classes, a store goes
along neither: a pair is one access, or the places are, with gaps. Along the one class whole lines are stored.
"""

from __future__ import annotations

from tilewright.ir.expr import Axis, Expr, axis
from tilewright.ir.form import Form
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import GPU_BLOCKS

from .fuse import fuse


def join_narrow(form: Form) -> Form:
    """`form` with one class for the narrow ones along which all its results lie in memory, and for the next; itself if
    it folds or runs, if its results lie otherwise, or if no class is narrow."""
    if any(i.is_fold or i.scan is not None for i in form.items):
        return form
    found = {_nearest(form, i.offset) for i in form.outputs}
    line = found.pop() if len(found) == 1 else ()
    return fuse(form, line) if len(line) > 1 and all(set(line) <= set(i.kept) for i in form.items) else form


def _nearest(form: Form, offset: Expr) -> tuple[Axis, ...]:
    """The classes along which an access goes through memory without gaps until it is wide, outermost first."""
    line: list[Axis] = []
    length = 1
    while length < GPU_BLOCKS.min_contiguous_extent:
        step = dims.integer(length)
        a = next((a for a in form.classes() if dims.coefficient(offset, axis(a)) is step), None)
        if a is None or a in line:
            break
        line.insert(0, a)
        extent = dims.static(a.extent)
        if extent is None:
            break
        length *= extent
    return tuple(line)
