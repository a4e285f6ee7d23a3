"""One kernel: parameters, grid and body, and how the machine walks them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from tilewright.ir.expr import Axis, Expr, show
from tilewright.ir.identity import TOLD
from tilewright.ir.sizes import dims

from .statements import Buffer, Check, Loop, Stmt
from .text import show_body, shown
from .verify import verify_body, verify_order
from .walks import walk_statements

_DECIDED = ("lane", "width", "grain", "warps", "stages", "order", "beside", "reciprocals", "aligned", "contracted",
            "odd_steps", "over", "warp_specialised", "own_copies", "persistent")  # fmt: skip
"""Fields of a program that are told where they have another value than the default."""


@dataclass(frozen=True, slots=True)
class GridAxis:
    """One dimension of the grid: `axis` takes 0 .. extent-1, one value per point (a tile number if loops refine it)."""

    axis: Axis
    extent: Expr


@dataclass(frozen=True, slots=True)
class TileProgram:
    """`params` in calling order, `grid` outermost first, and the body of one grid point.

    `lane` is the axis that becomes vector lanes where the machine has vectors of elements (None: all is scalar); a
    register holds `width` of them, or fewer.
    `grain` is how many grid points are worth handing to another thread at once. On machines whose threads share a grid
    point, `warps` groups of threads in step work on it, and loops have the loads of `stages` steps under way; points
    are numbered with the last axis innermost, or `order` rows of the last two axes at a time, column by column.

    Blocks along `beside` are walked with that axis innermost, so that memory sees a stream for each of its values. With
    `reciprocals`, lanes that one number divides are multiplied by its reciprocal, kept in two parts.
    With `contracted`, a product and the sum that it goes into may round once anywhere: what another kernel, or a
    reduction, made of the product may then differ from it. Unless `aligned`, no code is made that relies on aligned
    pointers. With `odd_steps`, where a block begins says nothing of how what lies behind it is aligned.
    With `persistent`, no more blocks are launched than run at once, and each goes through grid points.
    With `warp_specialised`, one warp of a grid point loads and the others compute, where a call permits it. With
    `own_copies`, threads do not hand each other what they load along the lane.
    The parameters numbered `over` may lie in the memory of others that are loaded: where threads share a grid point,
    all of them have loaded before one stores there."""

    params: tuple[Buffer, ...]
    grid: tuple[GridAxis, ...]
    body: tuple[Stmt, ...]
    scratch: tuple[Buffer, ...] = ()
    lane: Axis | None = None
    grain: Expr = dims.ONE
    warps: int = 1
    stages: int = 1
    order: int = 0
    beside: Axis | None = None
    reciprocals: bool = False
    aligned: bool = True
    contracted: bool = False
    odd_steps: bool = False
    over: tuple[int, ...] = ()
    width: int = 1
    warp_specialised: bool = False
    own_copies: bool = False
    persistent: bool = False
    notes: tuple[str, ...] = field(default=(), compare=False, metadata=TOLD)

    def statements(self) -> Iterator[Stmt]:
        """Every statement, outer before inner."""
        yield from walk_statements(self.body)

    def loops(self) -> list[Loop]:
        """Every loop, outer before inner."""
        return [s for s in self.statements() if isinstance(s, Loop)]

    def is_checked(self) -> bool:
        """Whether what it reads may be found wrong: an index out of range, a divisor of 0."""
        return any(isinstance(s, Check) for s in self.statements())

    def show(self) -> str:
        """The program as text: every statement and decision. Of expressions it tells what `ir.expr.show` tells: types
        of variables, not those of constants inside."""
        lines = ["program(" + ", ".join(f"{b.name}:{b.dtype}[{show(b.size)}]" for b in self.params) + ")"]
        decided = [f for f in fields(self) if f.name in _DECIDED and getattr(self, f.name) != f.default]
        lines += [f"  {f.name} = {shown(getattr(self, f.name))}" for f in decided]
        lines += [f"  scratch {b.name}:{b.dtype}[{show(b.size)}]" for b in self.scratch]
        lines += [f"  grid {g.axis.name} < {show(g.extent)}" for g in self.grid]
        show_body(self.body, 1, lines)
        return "\n".join(lines)

    def verify(self) -> None:
        """Raise ValueError unless values are defined before use, axes are bound where used, states stay states, and
        grid points that wait do so before they touch memory."""
        bound = {g.axis for g in self.grid}
        known = {b.name for b in (*self.params, *self.scratch)}
        verify_body(self.body, set(), set(), set(), bound, known)
        self.verify_order()

    def verify_order(self) -> None:
        """Raise ValueError unless a program that waits does so in every grid point, before it touches memory."""
        verify_order(self.body)
