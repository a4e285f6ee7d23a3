"""What a program consists of: buffers, values, and the statements over them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tilewright.ir.dtype import DType
from tilewright.ir.expr import Axis, Expr, make
from tilewright.ir.reduction import Reduction
from tilewright.ir.selection import (
    Access,
    ElementRun,
    InterleavedStore,
    MatrixMultiply,
    MicroKernel,
    RegisterLoop,
    SharedElement,
)


class Place(Enum):
    """Where a buffer of a program lives."""

    PARAMETER = "parameter"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A flat array of `size` elements (an index expression over symbols). A scratch buffer is private to a grid point
    and holds nothing when the point starts."""

    name: str
    dtype: DType
    size: Expr
    place: Place = Place.PARAMETER


@dataclass(frozen=True, slots=True)
class Var:
    """A computed value: number, type, and the block axes it has (those bound with tile > 1 that it depends on)."""

    id: int
    dtype: DType
    axes: tuple[Axis, ...] = ()

    def __repr__(self) -> str:
        return f"v{self.id}" + (f"<{','.join(a.name for a in self.axes)}>" if self.axes else "")


def value_of(var: Var) -> Expr:
    """The expression leaf that stands for `var`."""
    return make("var", (), var.dtype, var.id)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A buffer as a tensor that is copied block by block: its element (i, j, ...) stands at offset `start` plus the
    sum of each index times its stride, the last stride is 1, and an element outside `extents` reads as 0. `tile` is
    the shape of a block; the rest are index expressions over symbols."""

    start: Expr
    extents: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    tile: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """var = buffer[offset] in lanes where `mask` holds (None = all), else `other`. Masked lanes touch no memory.

    The buffer's element is converted to `var.dtype` (a half is held as fp32). With `checked`, an offset that depends on
    data has been clamped and `Check`ed before. `ahead` is an offset that a grid point soon reads: fetching it early is
    only a hint, may lie outside the buffer, and changes nothing. With a `descriptor`, the block of it at the indices
    `at` is the same value (of a dim with a tile, the index is the block axis, which begins there): another way to
    load it, where the machine has it and addresses are aligned. A half `as_stored` is held as what it is: only products
    of blocks read it. `access`: how the block moves (None: along the vector axis). `runs`: what is to be told of how
    its elements lie, an entry for each block axis that it may have. `alike`: where neighbours are one element of
    memory, which is loaded once. `copied`: block axes that the offset does not have, along which each thread loads what
    it needs, where threads would hand each other the block. `behind`: so many elements of the offset come last, behind
    an address that others share."""

    var: Var
    buffer: Buffer
    offset: Expr
    mask: Expr | None = None
    other: Expr | None = None
    ahead: Expr | None = None
    descriptor: Descriptor | None = None
    at: tuple[Expr, ...] = ()
    as_stored: bool = False
    access: Access | None = None
    runs: tuple[ElementRun, ...] = ()
    alike: tuple[SharedElement, ...] = ()
    copied: tuple[Axis, ...] = ()
    behind: int = 0


@dataclass(frozen=True, slots=True)
class Compute:
    """var = expr, elementwise over the axes of `var`."""

    var: Var
    expr: Expr


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that a descriptor stores, in so many `pieces` side by side: each has its tile, the first one is at the
    indices `at`, the next ones further along the last dim."""

    descriptor: Descriptor
    at: tuple[Expr, ...]
    pieces: int


@dataclass(frozen=True, slots=True)
class Store:
    """buffer[offset] = value, converted to the buffer's type, in lanes where `mask` holds. `axes` are its block axes.

    Under the condition `stream` (on sizes; None: never) nobody reads the data soon, so it may bypass the caches.
    `access`, `runs` and `behind` are as those of a load. `interleaved`: where its two axes take turns in memory.
    `block`: another way to store it, where the machine has it and addresses are aligned."""

    buffer: Buffer
    offset: Expr
    value: Expr
    axes: tuple[Axis, ...] = ()
    mask: Expr | None = None
    stream: Expr | None = None
    access: Access | None = None
    runs: tuple[ElementRun, ...] = ()
    interleaved: InterleavedStore | None = None
    behind: int = 0
    block: StoredBlock | None = None

    @property
    def unrounded(self) -> Expr:
        """The value without a rounding to the type in which it is stored anyway."""
        e, stored = self.value, self.buffer.dtype
        rounds = e.op in ("cast", "narrow") and e.dtype is stored and stored.is_half
        return e.args[0] if rounds and e.args[0].dtype.compute is stored.compute else e


@dataclass(frozen=True, slots=True)
class Declare:
    """Make `vars` a mutable state with these initial values. Only `Update` and `Dot` change it. A statement that is
    `absorbed` is part of the product behind it."""

    vars: tuple[Var, ...]
    values: tuple[Expr, ...]
    absorbed: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """Assign new values to states, all at once; lanes where `mask` fails keep the old ones.

    With `fused`, a product that a value adds to something is rounded once, with the sum, where the machine can: nothing
    else computes the same value again, as other loops may do with elements."""

    vars: tuple[Var, ...]
    values: tuple[Expr, ...]
    mask: Expr | None = None
    fused: bool = True
    absorbed: bool = False


@dataclass(frozen=True, slots=True)
class Collapse:
    """vars = the merge, in a fixed order, of the states `parts` over their block axes `axes` (which `vars` lack).

    Several axes at once is for machines whose threads share a grid point: each thread merges what it holds before any
    speaks to another one. On others the order is that of the axis, `pairwise` (registers, then their lanes), or in
    blocks of `block` elements, one after the other."""

    vars: tuple[Var, ...]
    parts: tuple[Var, ...]
    reduction: Reduction
    axes: tuple[Axis, ...]
    pairwise: bool = False
    block: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """vars = the inclusive running merge, in order, of the states `parts` along their block axis `axis`."""

    vars: tuple[Var, ...]
    parts: tuple[Var, ...]
    reduction: Reduction
    axis: Axis


@dataclass(frozen=True, slots=True)
class Dot:
    """acc[m, n] += sum over k of a[m, k] * b[k, n]: the block axes of `acc` are those of `a` and `b` without `k`. With
    a `chain`, the sum is one of sums of so many products. `method` says how (None: multiply and add)."""

    acc: Var
    a: Var
    b: Var
    k: Axis
    chain: int = 0
    method: MatrixMultiply | MicroKernel | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """If `condition` (bool) fails in any lane of `mask`, the run reports error number `code` (index out of range, ...)
    after it ends; nothing is touched out of bounds because loads use clamped offsets."""

    condition: Expr
    code: int
    axes: tuple[Axis, ...] = ()
    mask: Expr | None = None


@dataclass(frozen=True, slots=True)
class Loop:
    """for base in range(start, stop, tile): bind `axis` to base .. base+tile-1; run `body`. Sequential. Bounds are
    scalars, and may be values computed from data. The loads of `stages` steps are under way at once. `looped`: it is
    printed as a loop also if it has one step. So many steps as are `unrolled` are written one after the other."""

    axis: Axis
    start: Expr
    stop: Expr
    tile: int
    body: tuple[Stmt, ...]
    stages: int = 1
    looped: bool = False
    unrolled: int = 1


@dataclass(frozen=True, slots=True)
class Branch:
    """Run `body` if the scalar condition holds, else `orelse`."""

    condition: Expr
    body: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...] = ()


@dataclass(frozen=True, slots=True)
class Nest:
    """The statements of `body`, which have one block, done register by register: inside `loops`, the outermost first.

    It means what `body` means, and what that defines is known behind it. Of the values defined, those with a number in
    `keeps` are read behind it and stay in arrays; of others there is one register at a time. A `Collapse` at the end of
    `body` is done on the way: it merges each register as soon as it is made. The innermost loop ends with the register
    before the one where no lane fulfils the condition `until`, which the masks of all statements have."""

    loops: tuple[RegisterLoop, ...]
    body: tuple[Stmt, ...]
    keeps: tuple[int, ...] = ()
    until: Expr | None = None


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until the kernel in front of this one has ended and all that it wrote is seen. Where nothing was launched
    early there is nothing to wait for; a program means the same without it.

    Every grid point waits once, before it touches memory (`verify` holds this). With `outside`, the one in front may be
    a kernel that was not generated."""

    outside: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """From here on the kernel behind this one may begin, once all grid points have come here or ended. It then waits
    for the end of this one, which is behind the end of the one in front, also where this stands before the wait: a
    program means the same without it."""


Stmt = (
    Load | Compute | Store | Declare | Update | Collapse | Prefix | Dot | Check | Loop | Branch | Nest | Await
    | Release
)  # fmt: skip
