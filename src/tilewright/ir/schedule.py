"""The decisions for one kernel, as a frozen value: a role and a tile for every class, and what is kept on chip."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .expr import Axis, Expr


class Role(Enum):
    """What a class becomes. GRID: parallel over tiles. RESIDENT: the whole extent in one tile. STREAMED: a sequential
    loop in steps. SCAN: streamed in order, emitting at each step. (SPLIT is a rewrite into two folds before this.)"""

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


@dataclass(frozen=True, slots=True)
class Schedule:
    """`classes` in order: grid classes outermost first, then the nest order of the loops, outermost first.

    `lane` is the class that runs in vector lanes. `online` merges cascaded reductions into one pass where a transport
    exists. Values that cost at least `keep` (see `ir.expr.cost`) and are needed by a later pass stay in scratch memory
    instead of being computed again (0 = never). `stream` names parameters stored past the caches, each with the
    condition on sizes under which that pays. `grain_bytes` is the work below which grid points are not worth another
    thread. `trim` leaves out parts of a fold that take only its identity, which assumes finite values behind a mask.
    `ahead` names parameters of which, under the condition beside each, the next grid point's part is fetched in the
    last pass that reads them; `fetch` those of which each step of a loop fetches the next step's block.

    With `peel`, whole tiles of a range and its rest get loops of their own; without, the last tile is masked, and a
    GRID class whose chunk is its tile is one block of the grid point. With `lanes`, a fold over a block keeps a state
    per lane and merges them after the loop, but values along the classes `together` are merged in each step; without,
    each step is merged into one state, but for the folds `spread`. A float sum of more than `chain` steps in a row (0:
    any number) gets a second level of states. `warps` and `stages` are those of the program. With `powers`,
    exponentials are powers of two; `quick` functions are in their quick form (see `ir.expr.SCALARS`). With `apart`, a
    last block that reaches past the extent is code of its own, so that all others need no masks. With `skip`, steps are
    jumped over that a mask of data hides. With `last_outermost`, grid points are numbered with the last grid class
    outermost: what a thread writes then lies together. With `descriptors`, blocks that tensor descriptors reach are
    loaded by them. With `blockwise`, the products of a step are summed apart from those before, which makes chains of
    additions as short as a step or the loop. `beside`, `reciprocals` and `contracted` are those of
    the program.

    With `close`, exponentials of singles, those of sigmoids too, and quotients are in their close form (see
    `ir.expr.SCALARS`).

    Of what outputs read besides folds of the block, up to `early` bytes are loaded before these.

    With `joined`, choices between like expressions choose what they read (see `choices`).

    With `lazy`, what follows a running extreme is not brought to each new one, but only to one past which exponentials
    could grow by more than 2^lazy, and to the last one at the end: a block in which that happens to no row is not
    multiplied. The values are the same in exact arithmetic (FlashAttention-4 does so with 8)."""

    classes: tuple[ClassPlan, ...]
    lane: Axis | None = None
    online: bool = False
    keep: int = 0
    stream: tuple[Sized, ...] = ()
    grain_bytes: int = 1 << 15
    trim: bool = True
    ahead: tuple[Sized, ...] = ()
    fetch: tuple[int, ...] = ()
    peel: bool = True
    lanes: bool = True
    spread: tuple[int, ...] = ()
    together: tuple[Axis, ...] = ()
    powers: bool = False
    quick: tuple[str, ...] = ()
    apart: bool = False
    last_outermost: bool = False
    lazy: int = 0
    chain: int = 16
    skip: bool = False
    warps: int = 1
    stages: int = 1
    descriptors: bool = False
    blockwise: bool = False
    beside: Axis | None = None
    reciprocals: bool = False
    contracted: bool = False
    early: int = 0
    close: bool = False
    joined: bool = False

    def __str__(self) -> str:
        parts = [str(c) for c in self.classes]
        if self.lane:
            parts.append(f"lane={self.lane.name}")
        parts += [f"keep={self.keep}"] if self.keep else []
        parts += ["online"] if self.online else []
        parts += [f"lazy={self.lazy}"] if self.lazy else []
        parts += ["descriptors"] if self.descriptors else []
        parts += ["blockwise"] if self.blockwise else []
        parts += [f"stream={[s.param for s in self.stream]}"] if self.stream else []
        parts += [f"ahead={[s.param for s in self.ahead]}"] if self.ahead else []
        parts += [f"beside={self.beside.name}"] if self.beside else []
        parts += [f"fetch={list(self.fetch)}"] if self.fetch else []
        parts += ["whole" if not self.lanes else "", f"warps={self.warps}"] if not self.peel else []
        return " ".join(parts)

    def per_lane(self, fold: int) -> bool:
        """Whether a fold keeps a state per lane."""
        return self.lanes or fold in self.spread

    def plan(self, axis: Axis) -> ClassPlan:
        """The plan of a class. Raises KeyError if it has none."""
        for c in self.classes:
            if c.axis == axis:
                return c
        raise KeyError(axis.name)
