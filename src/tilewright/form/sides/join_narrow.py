"""All classes of a result along memory as one, where the nearest is too narrow for the threads of a warp.

A shuffle of pixels writes pairs that it reads far apart. Where pairs and their places are classes of their own, threads
that share a block go along neither: a pair is one access, or places are, with gaps. Along the one class r of the result
whole lines are stored; a place is r // n and a part r % n. Reads then gather: what one of them leaves of a line, its
neighbours in the block must take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.ir.expr import Axis, Expr, axis
from tilewright.ir.form import Form
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import GPU_BLOCKS

from .fuse import fuse


def join_narrow(form: Form) -> Form:
    """`form` with one class for those along which all its results lie in memory; itself if it folds or runs, if results
    lie in different orders, if the nearest class is wide, or if a block of results would take little of what it reads
    of a line."""
    if any(i.is_fold or i.scan is not None for i in form.items):
        return form
    lines = {tuple(_line(form, i.offset)) for i in form.outputs}
    line = lines.pop() if len(lines) == 1 else ()
    if len(line) < 2 or not all(set(line) <= set(i.kept) for i in form.items):
        return form
    nearest = dims.static(line[0].extent)
    if nearest is None or nearest >= GPU_BLOCKS.min_contiguous_extent or _is_read_across(form, line):
        return form
    return fuse(form, line[::-1])


def _is_read_across(form: Form, line: Sequence[Axis]) -> bool:
    """Whether neighbours in memory of what is read are far from each other among the results."""
    offsets = {offset for i in form.items for _, offset in i.accesses()}
    length = 1
    for a in line:
        far = length > GPU_BLOCKS.max_gathered_step
        if far and any(dims.coefficient(e, axis(a)) is dims.ONE for e in offsets):
            return True
        length *= dims.static(a.extent) or 1
    return False


def _line(form: Form, offset: Expr) -> Iterator[Axis]:
    """The classes along which an access goes through memory without gaps, nearest first."""
    left = list(form.classes())
    length = 1
    while True:
        step = dims.integer(length)
        a = next((a for a in left if dims.coefficient(offset, axis(a)) is step), None)
        if a is None:
            return
        yield a
        left.remove(a)
        extent = dims.static(a.extent)
        if extent is None:
            return
        length *= extent
