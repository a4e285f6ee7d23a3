"""Facts about one call that the text or the build of a kernel may use: alignment, and how far offsets reach.

A *variant* is one build of a kernel. The most special one that a call permits runs; the generic one always may.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilewright.ir.dtype import i64
from tilewright.ir.expr import Expr, Symbol, axes_of, axis, conjuncts, substitute, transform, walk
from tilewright.ir.program import (
    Branch,
    Buffer,
    Descriptor,
    Load,
    Loop,
    Stmt,
    Store,
    TileProgram,
    expressions,
)
from tilewright.ir.sizes import dims
from tilewright.tuning.search_limits import FACTS

ALIGNMENT = 16
"""What an `aligned` variant knows pointers (in bytes) and some sizes (as numbers) to be multiples of."""

NARROW_LIMIT = (1 << 31) - (1 << 20)
"""Index arithmetic in 32 bits is right in calls where no `reach` is beyond it; a block may end beyond its extent."""

RING = frozenset({"add", "sub", "mul", "neg"})
"""Index arithmetic whose low 32 bits depend on the low 32 bits of its operands only."""

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


@dataclass(frozen=True, slots=True)
class Variant:
    """`aligned`: every pointer, and every size that `aligning` lists, is a multiple of 16. `wide`: offsets and sizes
    are 64-bit integers, for calls in which a `reach` exceeds `NARROW_LIMIT`. `listed`: one launch runs the kernel many
    times, each time on tensors whose addresses are a row of a table."""

    aligned: bool = False
    wide: bool = True
    listed: bool = False


GENERIC = Variant()
"""Right for every call."""


@dataclass(frozen=True, slots=True)
class LaunchNeeds:
    """What a launch must know of the program of its kernel: `grid` are the extents of its grid, `elements` the bytes of
    an element of each parameter; `variants` and `reach` as the functions of these names give them."""

    grid: tuple[Expr, ...]
    variants: tuple[Variant, ...]
    reach: tuple[Expr, ...] | None
    elements: tuple[int, ...]
    checked: bool
    """Whether it reports failed checks."""


def needs_of(program: TileProgram) -> LaunchNeeds:
    """Of a program that was not legalised yet, or was."""
    extents, elements = tuple(g.extent for g in program.grid), tuple(b.dtype.bytes for b in program.params)
    return LaunchNeeds(extents, variants(program), reach(program), elements, program.is_checked())


def variants(program: TileProgram) -> tuple[Variant, ...]:
    """The variants that calls of `program` may need, most special first. With static sizes the width is known;
    otherwise the last one is `GENERIC`."""
    ends = reach(program)
    limits = [] if ends is None else [dims.int_range(e) for e in ends]
    narrow = ends is not None and all(low is None or low <= NARROW_LIMIT for low, _ in limits)
    wide = ends is None or any(high is None or high > NARROW_LIMIT for _, high in limits)
    widths = [w for w, possible in ((False, narrow), (True, wide)) if possible]
    facts = (True, False) if program.aligned else (False,)
    return tuple(Variant(aligned, w) for w in widths for aligned in facts)


def reach(program: TileProgram) -> tuple[Expr, ...] | None:
    """Numbers (expressions over symbols) that 32-bit index arithmetic would have to hold: a call in which none exceeds
    `NARROW_LIMIT` may run a variant that is not wide. None if they are not known: every call needs a wide one."""
    found = [b.size for b in program.params]
    for e in dict.fromkeys(_held(program)):
        ends = (_end(e, 1), _end(dims.mul(e, dims.integer(-1)), 1))
        if None in ends:
            return None
        found += [x for x in ends if x is not None]
    needed: list[Expr] = []
    for e in dict.fromkeys(map(_without_negative, found)):
        _, high = dims.int_range(e)
        if (high is None or high > NARROW_LIMIT) and not _below(e, needed):
            needed = [x for x in needed if not _below(x, [e])] + [e]
    return tuple(needed)


def _end(e: Expr, side: int) -> Expr | None:
    """The largest (`side` 1) or smallest (0) value of an index expression, over symbols only; None if not known."""
    e = transform(e, _without_sign)
    for _ in range(FACTS.max_loop_levels):
        if not axes_of(e):
            return e
        found = dims.bounds(e)[side]
        if found is None:
            return None
        e = found
    return None


def _without_sign(e: Expr) -> Expr | None:
    """|a| = max(a, -a), for an index."""
    if e.op != "abs" or e.dtype is not i64:
        return None
    inside = transform(e.args[0], _without_sign)
    return dims.maximum(inside, dims.mul(inside, dims.integer(-1)))


def _without_negative(e: Expr) -> Expr:
    """A number that is at least `e`: without the terms that are surely not positive."""
    terms = dims.linear(e).items()
    unsigned = [dims.mul(dims.integer(c), *m) for m, c in terms if c > 0 or not m or not all(map(natural, m))]
    return dims.add(*unsigned) if unsigned else dims.ZERO


def usual_statements(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """The statements that most grid points run: what a branch does else is for the last one."""
    for s in body:
        yield s
        if isinstance(s, (Loop, Branch)):
            yield from usual_statements(s.body)


def natural(e: Expr) -> bool:
    """Whether index expression `e` is proved not negative."""
    if dims.at_least(e, 0):
        return True
    if e.op in ("minimum", "maximum"):
        return all(map(natural, e.args))
    return e.op in ("add", "mul") and all(c >= 0 and all(map(natural, m)) for m, c in dims.linear(e).items())


def _below(e: Expr, others: Sequence[Expr]) -> bool:
    """Whether `e` is proved to be at most one of `others`."""
    return any(dims.at_least(dims.sub(o, e), 0) for o in others)


def is_index(e: Expr) -> bool:
    """Whether `e` is an index expression: integers from axes, sizes and constants only."""
    return e.dtype is i64 and all(x.dtype is i64 and x.op not in ("var", "slot") for x in walk(e))


def _held(program: TileProgram) -> Iterator[Expr]:
    """Index expressions whose very value matters, not just its low bits."""
    yield from (g.extent for g in program.grid)
    for s in program.statements():
        offsets = (s.offset,) if isinstance(s, (Load, Store)) else ()
        for e in expressions(s):
            if is_index(e) and e not in offsets:
                yield e
            for x in walk(e):
                if x.op not in RING or not is_index(x):
                    yield from (a for a in x.args if is_index(a))


def aligning(program: TileProgram) -> tuple[str, ...]:
    """Names of the size symbols that an `aligned` variant needs to be multiples of 16: enough of them that each step
    from one value of an axis to the next, and each end of a contiguous axis, is a multiple of 16 if it can be."""
    wanted = {m for e in _steps(program) for m, c in dims.linear(e).items() if c % ALIGNMENT and m}
    of = {m: [a.value.name for a in m if isinstance(a.value, Symbol)] for m in wanted}
    counts = Counter(name for names in of.values() for name in set(names))
    needed: set[str] = set()
    for m in sorted(wanted, key=lambda m: (len(m), repr(m))):
        names = of[m]
        if names and len(names) == len(m) and not needed & set(names):
            needed.add(max(names, key=lambda n: (counts[n], n)))
    return tuple(sorted(needed))


def reached(program: TileProgram, variant: Variant) -> list[tuple[Buffer, Descriptor]]:
    """The descriptors that a variant uses: coordinates have 32 bits, and what `aligning` says must be enough to make
    all strides multiples of 16 bytes. In a list there are none, as its tensors are not arguments."""
    if not variant.aligned or variant.wide or variant.listed:
        return []
    found = dict.fromkeys(_described(program))
    names = aligning(program) if found else ()
    return [(b, d) for b, d in found if all(_is_aligned(e, b, names) for e in (d.start, *d.strides[:-1]))]


def _described(program: TileProgram) -> Iterator[tuple[Buffer, Descriptor]]:
    """The blocks that are loaded and stored by descriptor."""
    for s in program.statements():
        if isinstance(s, Load) and s.descriptor is not None:
            yield s.buffer, s.descriptor
        elif isinstance(s, Store) and s.block is not None:
            yield s.buffer, s.block.descriptor


def _is_aligned(e: Expr, buffer: Buffer, names: Sequence[str]) -> bool:
    """Whether elements that are `e` apart are multiples of 16 bytes apart if the sizes `names` are multiples of 16."""
    known = {s: dims.mul(s, dims.integer(ALIGNMENT)) for s in dims.symbols_of(e) if _name(s) in names}
    return dims.divisible(substitute(e, known), max(1, ALIGNMENT // buffer.dtype.bytes))


def quotients(program: TileProgram) -> dict[Expr, int]:
    """Quotients of sizes, as half a row is one, and the power of two (at most 16) that divides each of them in an
    `aligned` variant, where it is more than 1. The compiler of a kernel cannot tell."""
    names = aligning(program)
    found: dict[Expr, int] = {}
    exprs = (e for s in program.statements() for e in expressions(s))
    for x in dict.fromkeys(x for e in exprs for x in walk(e) if x.op == "floordiv" and is_index(x)):
        sizes = {s: dims.mul(s, dims.integer(ALIGNMENT)) for s in dims.symbols_of(x) if _name(s) in names}
        if axes_of(x) or not sizes:
            continue
        divisor = math.gcd(ALIGNMENT, *dims.linear(substitute(x, sizes)).values())
        if divisor > 1:
            found[x] = divisor
    return found


def _name(symbol: Expr) -> str:
    return symbol.value.name if isinstance(symbol.value, Symbol) else ""


def _steps(program: TileProgram) -> Iterator[Expr]:
    """Strides of accesses, and the bounds of axes along which an access is contiguous."""
    contiguous: set[Expr] = set()
    usual = list(usual_statements(program.body))
    tiles = {axis(s.axis): s.tile for s in usual if isinstance(s, Loop)}
    for s in usual:
        if isinstance(s, (Load, Store)):
            steps = {a: dims.coefficient(s.offset, a) for a in axes_of(s.offset)}
            along = {a for a, step in steps.items() if step is dims.ONE}
            if any(tiles.get(a, 1) * s.buffer.dtype.bytes >= ALIGNMENT for a in along):
                contiguous |= along
                yield from (step for step in steps.values() if step is not None and step is not dims.ONE)
    for s in usual:
        if isinstance(s, (Load, Store)):
            for c in conjuncts(s.mask):
                if c.op in COMPARISONS and all(is_index(a) for a in c.args):
                    gap = dims.sub(c.args[0], c.args[1])
                    if contiguous & axes_of(gap):
                        yield dims.sub(gap, _axis_part(gap))


def has_odd_steps(program: TileProgram) -> bool:
    """Whether a known distance between neighbours along an axis spoils the alignment of what lies behind them."""
    return any(e.op == "const" and not dims.divisible(e, ALIGNMENT // 2) for e in _steps(program))


def _axis_part(e: Expr) -> Expr:
    """The terms of `e` that contain an axis."""
    terms = ((m, c) for m, c in dims.linear(e).items() if any(axes_of(a) for a in m))
    return dims.add(*(dims.mul(dims.integer(c), *m) for m, c in terms))
