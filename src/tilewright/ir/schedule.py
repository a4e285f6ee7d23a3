"""The decisions for one kernel, as a frozen value: how classes are tiled, how reductions run, what is kept on chip.

A field at its default is not printed, every other is: `text/schedule.parse` reads what `str` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum

from .expr import Axis, Expr, show
from .form import FormStep


class Role(Enum):
    """What a class becomes. GRID: parallel over tiles. RESIDENT: the whole extent in one tile. STREAMED: a sequential
    loop in steps. SCAN: streamed in order, emitting at each step. (SPLIT is a rewrite into two reductions before
    this.)"""

    GRID = "grid"
    RESIDENT = "resident"
    STREAMED = "streamed"
    SCAN = "scan"


@dataclass(frozen=True, slots=True)
class ClassPlan:
    """`axis` in `role`, bound `tile` values at a time. A GRID class with `chunk` > 0 gives each grid point a run of
    `chunk` values, walked by a loop of step `tile`; `chunk` is a multiple of `tile`. With `descending` the first grid
    point has the last run: where work grows along the class, the longest runs start first."""

    axis: Axis
    role: Role
    tile: int = 1
    chunk: int = 0
    descending: bool = False

    def __str__(self) -> str:
        chunk = f"/{self.chunk}" if self.chunk else ""
        tile = f"x{self.tile}" if self.tile > 1 else ""
        return f"{self.axis.name}:{self.role.value}{chunk}{tile}{'-' if self.descending else ''}"


@dataclass(frozen=True, slots=True)
class Sized:
    """Parameter `param`, where the condition `when` on sizes holds."""

    param: int
    when: Expr

    def __str__(self) -> str:
        return f"{self.param} if {show(self.when)}"


@dataclass(frozen=True, slots=True)
class Tiling:
    """In which blocks, and in which order, loop classes are walked."""

    classes: tuple[ClassPlan, ...]
    """Grid classes outermost first, then the nest order of the loops, outermost first."""
    lane: Axis | None = None
    """The class that runs in vector lanes."""
    beside: Axis | None = None
    """The class whose values lie side by side in registers: a block is walked with it innermost."""
    last_outermost: bool = False
    """Grid points are numbered with the last grid class outermost: what a thread writes then lies together."""
    peel: bool = True
    """Whole tiles of a range and its rest get loops of their own. Without, the last tile is masked, and a GRID class
    whose chunk is its tile is one block of the grid point."""
    tail_block: bool = False
    """A last block that reaches past the extent is code of its own, so that all others need no masks."""


@dataclass(frozen=True, slots=True)
class Reductions:
    """How reductions run: in which passes, with which states, in which order they add."""

    online: bool = False
    """Cascaded reductions run in one pass where the online law allows it."""
    lane_states: bool = True
    """A reduction over a block keeps a state per lane and merges them after the loop. Without, each step is merged into
    one state."""
    lane_states_of: tuple[int, ...] = ()
    """Reductions with a state per lane although `lane_states` is off."""
    merged_each_step: tuple[Axis, ...] = ()
    """Values along these classes are merged in each step although `lane_states` is on."""
    max_chain: int = 16
    """A float sum of more steps in a row than this (0: any number) gets a second level of states."""
    term_by_term: bool = False
    """The terms of a step are added to a sum one after the other, so that a product and its addition are one
    instruction. Without, they are added to each other first."""
    blockwise: bool = False
    """The products of a step are summed apart from those before: chains of additions are as short as a step."""
    trim: bool = True
    """Parts of a reduction that take only its identity are left out, which assumes finite values behind a mask."""
    skip_hidden: bool = False
    """Steps that a mask of data hides are jumped over."""
    wide_sums: bool = False
    """Sums of fp32 whose terms may cancel are summed in fp64 (see `form.wide_sums`)."""
    product_chain: int = 0
    """Products of a matrix unit that are added one after the other at most (0: any number)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is kept on chip, and how memory is reached."""

    scratch_cost: int = 0
    """Values that cost at least this (see `ir.expr.cost`) and are needed by a later pass stay in scratch memory instead
    of being computed again (0: never)."""
    past_caches: tuple[Sized, ...] = ()
    """Parameters that are stored past the caches, each where its condition on sizes holds."""
    next_point: tuple[Sized, ...] = ()
    """Parameters of which the next grid point's part is fetched in the last pass that reads them."""
    next_step: tuple[int, ...] = ()
    """Parameters of which each step of a loop fetches the next step's block."""
    hoisted_bytes: int = 0
    """Of what outputs read besides reductions, up to so many bytes are loaded before these."""
    descriptors: bool = False
    """Blocks that tensor descriptors reach are loaded by them."""
    warp_specialised: bool = False
    """One warp loads what products read through a ring of buffers; the other warps compute (`lower.specialise`)."""
    own_copies: bool = False
    """What several threads of a grid point read along the lane is loaded by each of them: no thread waits for another
    one's copy."""
    carried: bool = False
    """Loops of single steps keep what the next step reads again in registers."""
    stored_pieces: int = 0
    """Pieces, side by side, in which descriptors store a block of results from shared memory: fewer bytes of it are
    taken by a piece (0: threads store what they hold)."""


@dataclass(frozen=True, slots=True)
class Math:
    """In which form scalar functions are computed."""

    exp2: bool = False
    """Exponentials are powers of two."""
    fast: tuple[str, ...] = ()
    """Functions in their fast form (see `ir.expr.SCALARS`)."""
    accurate: bool = False
    """Exponentials of fp32, those of sigmoids too, and quotients are in their accurate form (see `ir.expr.SCALARS`)."""
    reciprocals: bool = False
    """Lanes that one number divides are multiplied by its reciprocal, kept in two parts."""
    contracted: bool = False
    """A product and the sum that it goes into may round once."""
    merged_selects: bool = False
    """Choices between like expressions choose what they read (see `form.merge_selects`)."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How a kernel is launched."""

    warps: int = 1
    stages: int = 1
    """Blocks of a loop's loads that are on their way at once."""
    min_bytes_per_task: int = 1 << 15
    """Work below which grid points are not worth another thread."""
    order: int = 0
    """Rows of blocks, along the last two grid classes, that are numbered together, column by column: blocks that run at
    the same time then share operands in the last cache (0: each row to its end)."""
    persistent: bool = False
    """No more blocks are launched than run at once; each goes through grid points, and loads what the next one begins
    with while it still stores."""


RECORDS = ("tiling", "reductions", "memory", "math", "launch")
"""Fields of a schedule that are records of decisions."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Every decision about one kernel: with the kernel, a machine and the sizes that are seen it gives the tile program
    again (`schedule.solver.replay`)."""

    tiling: Tiling
    reductions: Reductions = Reductions()
    memory: Memory = Memory()
    math: Math = Math()
    launch: LaunchConfig = LaunchConfig()
    form_steps: tuple[FormStep, ...] = ()
    """The changes of the kernel's form that the classes belong to, in order."""

    def __str__(self) -> str:
        return " ".join([*map(str, self.tiling.classes), *self._decided()])

    def _decided(self) -> Iterator[str]:
        """Each field that has another value than its default, as text."""
        for record in (getattr(self, name) for name in RECORDS):
            for f in fields(record):
                value = getattr(record, f.name)
                if f.name != "classes" and value != f.default:
                    yield f.name if value is True else f"{f.name}={_shown(value)}"
        if self.form_steps:
            yield f"form_steps={_shown(self.form_steps)}"

    def per_lane(self, reduction: int) -> bool:
        """Whether a reduction keeps a state per lane."""
        return self.reductions.lane_states or reduction in self.reductions.lane_states_of

    def plan(self, axis: Axis) -> ClassPlan:
        """The plan of a class. Raises KeyError if it has none."""
        for c in self.tiling.classes:
            if c.axis == axis:
                return c
        raise KeyError(axis.name)

    def changed(self, **values: object) -> Schedule:
        """The schedule with other values of some fields, each named as in the record that has it. Raises TypeError for
        a field that no record has."""
        parts: dict[str, object] = {n: values.pop(n) for n in ("form_steps",) if n in values}
        for name in RECORDS:
            record = getattr(self, name)
            mine = {f.name: values.pop(f.name) for f in fields(record) if f.name in values}
            parts |= {name: replace(record, **mine)} if mine else {}
        if values:
            raise TypeError(f"a schedule has no field {', '.join(values)}")
        return replace(self, **parts)  # pyright: ignore[reportArgumentType]  (each by the name of its record)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    return value.name if isinstance(value, Axis) else str(value)
