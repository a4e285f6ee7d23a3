"""Blocks in which neighbours along an axis are one element, made of a block that has each of them once."""

from __future__ import annotations

from tilewright.ir.expr import Axis

from .expr import Expressions
from .scope import ATOM, Term


def repeated(few: Term, own: Axis, whole: Axis, count: int, printer: Expressions) -> Term:
    """The block `few`, a name, with each element along the axis `own` in `count` places of the axis `whole`, which has
    the same dimension. A copy of a register costs nothing, and what is computed of it knows which copy it is."""
    at = few.dims.index(own)
    wanted = (*few.dims[:at], whole, *few.dims[at + 1 :])
    text, rank, behind = few.text, len(few.dims), count.bit_length() - 1
    for _ in range(behind):
        text = f"tl.join({text}, {text})"
    if at + 1 < rank:
        order = (*range(at + 1), *range(rank, rank + behind), *range(at + 1, rank))
        text = f"tl.permute({text}, ({', '.join(map(str, order))}))"
    return Term(f"tl.reshape({text}, {printer.shape(wanted)})", ATOM, wanted)
