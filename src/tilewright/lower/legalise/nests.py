"""Which statements share a loop over the registers of their block, how it runs, and what is merged on the way.

Neighbouring statements of one block go register by register, so that what one makes is in a register when the next one
reads it. What is read elsewhere is kept in arrays; short loops over arrays are written out, so that compilers hold the
arrays in registers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tilewright.ir.expr import Axis, Expr, axes_of, conjuncts
from tilewright.ir.program import (
    Branch,
    Check,
    Collapse,
    Compute,
    Declare,
    Dot,
    Load,
    Loop,
    Nest,
    Stmt,
    Store,
    TileProgram,
    Update,
    defines,
    uses,
)
from tilewright.ir.selection import IN_PLACE, MicroKernel, RegisterLoop
from tilewright.tuning.thresholds import CPP_TEXT

from .blocks import Dims, blocks_of
from .lanes import compare_lanes


def by_registers(program: TileProgram) -> TileProgram:
    """`program`, of which instructions are selected, with its statements over blocks in nests."""
    return replace(program, body=_Nesting(program).body(program.body))


@dataclass(slots=True)
class _Run:
    """Statements that share one nest over `dims` (none: they stand alone), and merges of what they make."""

    dims: Dims
    body: list[Stmt] = field(default_factory=list)
    merges: list[Collapse] = field(default_factory=list)

    @property
    def all(self) -> tuple[Stmt, ...]:
        """The statements, merges last."""
        return (*self.body, *self.merges)


class _Nesting:
    """Puts statements into nests, body by body in order."""

    def __init__(self, program: TileProgram) -> None:
        self.lane, self.beside = program.lane, program.beside
        self.blocks = blocks_of(program)
        self.reads = Counter(v for s in program.statements() for v in _touched(s))
        """In how many statements each value is read or changed."""
        self.arrays: set[int] = set()
        """Values, of those made so far, that are arrays of registers or of numbers."""

    def body(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        """The statements of one body."""
        found: list[Stmt] = []
        for run in self.runs(body):
            first = run.body[0]
            if run.dims:
                found.append(self.nest(run))
            elif isinstance(first, Branch):
                found.append(replace(first, body=self.body(first.body), orelse=self.body(first.orelse)))
            elif isinstance(first, Loop):
                outer, self.blocks = self.blocks, self.blocks.inside(first)
                found.append(replace(first, body=self.body(first.body)))
                self.blocks = outer
            else:
                found += [self.alone(s) for s in run.body]
        return tuple(found)

    # --- runs --------------------------------------------------------------

    def dims(self, s: Stmt) -> Dims:
        """The block over which a statement goes register by register."""
        match s:
            case Load() if s.access is None:
                return self.blocks.dims(s.var.axes)
            case Compute():
                return self.blocks.dims(s.var.axes)
            case Declare() | Update():
                return self.blocks.dims(s.vars[0].axes)
            case Store() if s.access is None:
                return self.blocks.dims(s.axes)
            case Check():
                return self.blocks.dims(s.axes)
            case _:
                return ()

    def runs(self, body: Sequence[Stmt]) -> list[_Run]:
        """Statements in groups that share a nest, in an order with the same meaning."""
        out: list[_Run] = []
        open_: _Run | None = None
        for s in body:
            if _is_in_product(s):
                out.append(_Run((), [s]))  # what stands behind it in the open run does not touch its values
                continue
            if isinstance(s, Collapse) and self.merged_into(out, s):
                continue
            if _stands_alone(s):
                out.append(_Run((), [s]))
                open_ = None
                continue
            dims = self.dims(s)
            if open_ is not None and not dims and open_.dims and _may_precede(s, open_.all):
                out.insert(next(k for k, run in enumerate(out) if run is open_), _Run((), [s]))
                continue
            if open_ is None or dims != open_.dims or _clashes(s, open_.body) or _waits(s, open_.merges):
                open_ = _Run(dims)
                out.append(open_)
            open_.body.append(s)
        return out

    def merged_into(self, runs: Sequence[_Run], s: Collapse) -> bool:
        """Let the run that makes all parts of `s` merge them on the way, if there is one that can."""
        made = {p.id for p in s.parts}
        for run in runs:
            values = {d.id for r in run.body if isinstance(r, Compute) for d in defines(r)}
            if made <= values and self.lane not in s.axes:
                if set(s.axes) <= dict(self.blocks.counts(run.dims)).keys():
                    run.merges.append(s)
                    return True
        return False

    # --- nests -------------------------------------------------------------

    def nest(self, run: _Run) -> Nest:
        """The nest of a run over a block."""
        inside = Counter(v for s in run.all for v in _touched(s))
        made = [v.id for s in run.body for v in defines(s)]
        keeps = tuple(v for v in made if self.reads[v] > inside[v])
        counts = self.blocks.counts(run.dims)
        self.hold(made, False)
        self.hold(keeps, bool(counts))
        for s in run.merges:
            self.hold_merged(s)
        touched = {*made, *(v for s in run.body for v in uses(s))}
        unrolled = bool(touched & self.arrays) and self.are_few(run.dims)
        loops = self.loops(counts, unrolled, bool(run.merges))
        until = None if run.merges or set(made) & self.arrays else self.end(run, loops)
        return Nest(loops, run.all, keeps, until)

    def end(self, run: _Run, loops: Sequence[RegisterLoop]) -> Expr | None:
        """The condition, common to all effects, behind whose last lane no register of the innermost loop does anything:
        it holds in the first lanes, or in all or none where that loop is over another axis."""
        if self.lane is None or self.blocks.lanes(run.dims) == 1 or self.lane not in {x.axis for x in loops}:
            return None
        masks = [conjuncts(s.mask) for s in run.body if isinstance(s, (Load, Store, Update, Check))]
        innermost = {loops[-1].axis} - {self.lane}
        for term in masks[0] if masks else ():
            found = compare_lanes(term, self.lane) if all(term in mask for mask in masks) else None
            if found is not None and found[0] == "below" and not innermost & {a.value for a in axes_of(term)}:
                return term
        return None

    def are_few(self, dims: Dims) -> bool:
        """Whether each register of a block may have instructions of its own."""
        return self.blocks.number(dims) <= CPP_TEXT.max_unrolled_registers

    def loops(self, counts: Dims, unrolled: bool, merges: bool) -> tuple[RegisterLoop, ...]:
        """The loops of a nest: all `unrolled`; or the innermost one, if it is short and `merges`, or if it is the axis
        beside which a block is walked."""
        innermost = counts[-1][0] if counts else None
        if not unrolled and not merges and len(counts) == 2 and counts[0][0] == self.beside:
            counts, innermost, merges = counts[::-1], self.beside, True
        short = CPP_TEXT.max_unrolled_registers // 4

        def is_unrolled(a: Axis, n: int) -> bool:
            return unrolled or (merges and a == innermost and n <= short)

        return tuple(RegisterLoop(a, n, is_unrolled(a, n)) for a, n in counts)

    def alone(self, s: Stmt) -> Stmt:
        """A statement that has no nest, but for sums of products."""
        match s:
            case Dot(method=None):
                dims = self.blocks.dims(s.acc.axes)
                loops = self.loops(self.blocks.counts(dims), self.are_few(dims), False)
                return Nest(loops, (s,)) if loops else s
            case Dot(method=MicroKernel(start="nothing")):
                self.hold([s.acc.id], self.blocks.number(self.blocks.dims(s.acc.axes)) > 1)
            case Load() if s.access is not None and s.access != IN_PLACE:
                several = self.blocks.number(self.blocks.dims(s.var.axes)) > 1
                self.hold([s.var.id], s.access.kind == "dense" or several)
            case Collapse():
                self.hold_merged(s)
            case _:
                pass
        return s

    def hold(self, values: Iterable[int], arrays: bool) -> None:
        """Note whether `values` are in arrays from here on."""
        self.arrays = self.arrays | set(values) if arrays else self.arrays - set(values)

    def hold_merged(self, s: Collapse) -> None:
        """The results of a merge are in arrays if they have several registers."""
        self.hold([v.id for v in s.vars], self.blocks.number(self.blocks.dims(s.vars[0].axes)) > 1)


def _is_in_product(s: Stmt) -> bool:
    """Whether a product does what a statement says."""
    return (isinstance(s, (Declare, Update)) and s.absorbed) or (isinstance(s, Load) and s.access == IN_PLACE)


def _stands_alone(s: Stmt) -> bool:
    """Whether a statement has loops of its own."""
    if isinstance(s, (Load, Store)):
        return s.access is not None
    return isinstance(s, (Loop, Branch, Collapse, Dot))


def _touched(s: Stmt) -> set[int]:
    """Numbers of the values that a statement itself reads or changes."""
    return {*uses(s), *(v.id for v in s.vars)} if isinstance(s, Update) else set(uses(s))


def _waits(s: Stmt, merges: Sequence[Collapse]) -> bool:
    """Whether a statement reads what a run has only behind its loops."""
    return bool(set(uses(s)) & {v.id for m in merges for v in m.vars})


def _may_precede(s: Stmt, run: Sequence[Stmt]) -> bool:
    """Whether a scalar statement may move before `run`: it reads nothing from it and no store may change it."""
    if not isinstance(s, (Load, Compute)):
        return False
    made = {v.id for r in run for v in defines(r)}
    if made & set(uses(s)):
        return False
    return isinstance(s, Compute) or not any(isinstance(r, Store) for r in run)


def _clashes(s: Stmt, run: Sequence[Stmt]) -> bool:
    """Whether `s` may touch memory that the run stores to at another place (registers are done one by one)."""
    if not isinstance(s, (Load, Store)):
        return False
    return any(isinstance(r, Store) and r.buffer == s.buffer and r.offset is not s.offset for r in run) or (
        isinstance(s, Store)
        and any(isinstance(r, Load) and r.buffer == s.buffer and r.offset is not s.offset for r in run)
    )
