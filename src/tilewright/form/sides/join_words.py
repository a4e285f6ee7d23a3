"""Places of packed words and parts of a word as one class: a class r in their place, with word r // n and part r % n.

Where words lie side by side, and what is made of their parts does too, blocks of the one class are whole lines of both:
a word is loaded once for its parts, and what it meets is read, or written, in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tilewright.ir.dtype import bool_
from tilewright.ir.expr import Axis, Expr, axes_of, axis, walk
from tilewright.ir.form import Form
from tilewright.ir.sizes import dims

from .fuse import fuse


def join_words(form: Form) -> Form:
    """`form` with one class for words and their parts; itself if it reads no packed words."""
    while (pair := next(_pairs(form), None)) is not None:
        form = fuse(form, pair)
    return form


def _pairs(form: Form) -> Iterator[tuple[Axis, Axis]]:
    """Classes of words, along which they lie side by side, and of their parts, along which something else does; each
    item has both of them, or none."""
    classes = form.classes()
    offsets = dict.fromkeys(e for i in form.items for _, e in i.accesses())
    lines = {(a, b) for e in offsets for a in classes for b in classes if _is_line(e, b, a)}
    for words, bits in _words(form).items():
        for a, b in product(classes, repeat=2):
            parted = (
                (a, b) in lines and axis(a) not in axes_of(words) and (dims.static(a.extent) or 0) <= bits
            )
            if parted and dims.coefficient(words, axis(b)) is dims.ONE and _meet(form, a, b):
                yield b, a


def _words(form: Form) -> dict[Expr, int]:
    """Where whole numbers lie of which bits are taken, and how many bits they have."""
    found: dict[Expr, int] = {}
    taken = (x for i in form.items for r in i.roots for x in walk(r) if x.op in ("and", "shr"))
    for x in (y for t in taken if t.dtype is not bool_ for y in walk(t.args[0])):
        if x.op == "read" and isinstance(x.value, int) and not form.params[x.value].dtype.is_float:
            found[x.args[0]] = 8 * form.params[x.value].dtype.bytes
    return found


def _is_line(offset: Expr, b: Axis, a: Axis) -> bool:
    """Whether an access goes along memory where b is walked, and inside of it a, which has a power of two of places."""
    parts = dims.static(a.extent)
    if a is b or parts is None or parts < 2 or parts & (parts - 1):
        return False
    return dims.coefficient(offset, axis(a)) is dims.ONE and dims.coefficient(offset, axis(b)) is a.extent


def _meet(form: Form, a: Axis, b: Axis) -> bool:
    """Whether both classes are one of results or of sums wherever one of them is."""
    sides = [{(a in own, b in own) for own in (i.kept, i.reduce)} for i in form.items]
    scanned = any(i.scan in (a, b) for i in form.items)
    return not scanned and all(x == y for side in sides for x, y in side)
