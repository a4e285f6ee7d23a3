"""Measured blocks of products and convolutions on a device, as a table that people read and merge:
`tuning/<target>_products.json`.

An entry says which blocks were the fastest for a group of some sizes, how long they took, and how long a library took
for the same. Nothing is timed where it is read: it serves compilations that may not time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from typing import Any

from tilewright.errors import InputError
from tilewright.form.unrolled_sums import UNROLL
from tilewright.ir.kernel import AS_THEY_LIE, PREPARATIONS
from tilewright.ir.schedule import Role, Schedule
from tilewright.tuning.thresholds import GPU_MATMUL

from .table import FOLDER

KINDS = ("contraction", "convolution", "depthwise")
"""What a library is called for; a convolution whose channels have weights of their own is no matrix."""

APART = "-"
"""Stands in `ProductShape.runs` for elements that no wide access takes."""


@dataclass(frozen=True, slots=True, order=True)
class ProductShape:
    """What a group of `count` products of the same sizes multiplies: operands of `bytes` an element, `batch` times
    [m, k] by [k, n], where a convolution sums `taps` places of a window over images of `image` elements (of a product:
    what its first operand has); a depthwise one has m places of n channels, and sums k for each. `fused`: with what a
    library does in further calls or kernels behind it.

    `runs` says along which of m, n and k lie the 16 bytes that one access takes, of the first operand, the second and
    the result, as "kkn" of a linear layer; `APART` where none takes so many, as with rows of 4095 halves."""

    kind: str
    bytes: int
    count: int
    fused: bool
    taps: int
    runs: str
    batch: int
    m: int
    n: int
    k: int
    image: int

    def alone(self) -> ProductShape:
        """Without what stands behind."""
        return replace(self, fused=False)


@dataclass(frozen=True, slots=True, order=True)
class MeasuredBlocks:
    """Blocks of the kernel that multiplies: the `tiles` of what lies on the grid, the smaller first (those of 1 are
    left out), the longest `step` of a loop, warps, loads of `stages` steps under way, by `descriptors`, in grid points
    that stay (`persistent`); the sum in so many `parts`, with `operands` as they lie or prepared (see
    `ir.kernel.PREPARATIONS`). Of windows: how many terms of their sums are `unrolled`, by class, and how many `rows` a
    thread walks over."""

    tiles: tuple[int, ...]
    step: int
    warps: int
    stages: int
    descriptors: bool = False
    persistent: bool = False
    parts: int = 1
    operands: str = AS_THEY_LIE
    unrolled: tuple[int, ...] = ()
    rows: int = 1

    def are_like(self, others: MeasuredBlocks) -> bool:
        """Whether they are the same but for stages and for how kernels compute the sum: how many stages there is room
        for depends on more than sizes."""
        return replace(self, stages=others.stages, parts=others.parts, operands=others.operands) == others


@dataclass(frozen=True, slots=True, order=True)
class FastestProduct:
    """The fastest blocks for a shape, with microseconds of ours and of the library; `source` is the file of results
    that shows both. Where no kernel was faster, ours may be the library's time and blocks without tiles."""

    shape: ProductShape
    blocks: MeasuredBlocks
    us: float
    library_us: float
    source: str

    @property
    def ratio(self) -> float:
        """Our time over the library's."""
        return self.us / self.library_us


MEASURED = ("us", "library_us", "source")
FIELDS = frozenset((*(f.name for kind in (ProductShape, MeasuredBlocks) for f in fields(kind)), *MEASURED))
OPTIONAL = frozenset(f.name for f in fields(MeasuredBlocks) if f.default is not MISSING)
LISTS = ("tiles", "unrolled")
WORDS = {"kind": KINDS, "operands": PREPARATIONS}


@dataclass(frozen=True, slots=True)
class ProductTable:
    """A table of entries."""

    entries: tuple[FastestProduct, ...] = ()

    def find(self, shape: ProductShape) -> FastestProduct | None:
        """The entry of the same kind that is nearest in size, if each size is near enough."""
        kind = _kind(shape)
        found = [(_distances(e.shape, shape), e) for e in self.entries if _kind(e.shape) == kind]
        most = math.log2(GPU_MATMUL.max_tabled_size_ratio)
        near = [(sum(d), e) for d, e in found if max(d) <= most]
        return min(near, key=lambda x: x[0], default=(0.0, None))[1]

    def merged(self, others: Iterable[FastestProduct]) -> ProductTable:
        """With entries added; one for the same shape replaces the old one."""
        table = {e.shape: e for e in (*self.entries, *others)}
        return ProductTable(tuple(sorted(table.values())))

    def text(self) -> str:
        """As JSON, one entry a line."""
        lines = [json.dumps(_as_row(e)) for e in self.entries]
        return "[\n  " + ",\n  ".join(lines) + "\n]\n"


def blocks_of(schedule: Schedule, parts: int = 1, operands: str = AS_THEY_LIE) -> MeasuredBlocks:
    """The blocks of a schedule."""
    classes = schedule.tiling.classes
    tiles = sorted(c.tile for c in classes if c.role is Role.GRID and c.tile > 1)
    step = max((c.tile for c in classes if c.role is not Role.GRID), default=1)
    launch, descriptors = schedule.launch, schedule.memory.descriptors
    steps = (s for s in schedule.form_steps if s.name == UNROLL)
    unrolled = tuple(n for s in steps for _, n in s.numbers)
    walked = (c.chunk for c in classes if unrolled and c.role is Role.GRID and c.tile == 1)
    return MeasuredBlocks(
        tuple(tiles), step, launch.warps, launch.stages, descriptors, launch.persistent, parts, operands,
        unrolled, max((1, *walked)),
    )  # fmt: skip


def parse_products(text: str, place: str) -> ProductTable:
    """The table that `text` holds. Raises InputError, naming `place`, for anything else."""
    try:
        rows = json.loads(text)
        if not isinstance(rows, list):
            raise ValueError("it is no list")
        return ProductTable().merged([_read_row(row) for row in rows])
    except (ValueError, TypeError) as error:
        raise InputError(f"not a table of products: {error}", phase="schedule", place=place) from None


@cache
def product_table(target: str) -> ProductTable:
    """The table that comes with the package for `target`, empty if there is none."""
    path = FOLDER / f"{target}_products.json"
    return parse_products(path.read_text(encoding="utf-8"), path.name) if path.exists() else ProductTable()


def _kind(shape: ProductShape) -> tuple[object, ...]:
    """What must be equal for blocks to serve both."""
    return shape.kind, shape.bytes, shape.count, shape.fused, shape.taps, shape.runs


def _distances(a: ProductShape, b: ProductShape) -> list[float]:
    """Octaves between sizes, and between what places of results take of an image: four times as much where windows
    skip every second line and column, a quarter where those of a transposed convolution meet as many zeros."""
    pairs = ((a.batch, b.batch), (a.m, b.m), (a.n, b.n), (a.k, b.k), (_taken(a), _taken(b)))
    return [abs(math.log2(x / y)) for x, y in pairs]


def _taken(shape: ProductShape) -> float:
    """Elements of the image for each that a result takes of it at one tap."""
    return shape.image * shape.taps / (shape.batch * shape.m * shape.k)


def _as_row(e: FastestProduct) -> dict[str, object]:
    measured = {"us": e.us, "library_us": e.library_us, "source": e.source}
    usual = {f.name: f.default for f in fields(MeasuredBlocks)}
    blocks = {k: v for k, v in asdict(e.blocks).items() if v != usual[k]}
    return {**asdict(e.shape), **blocks, **measured}


def _read_row(row: Any) -> FastestProduct:
    """An entry. Raises ValueError for other fields or values than it has."""
    told = json.dumps(row)[:200]
    if not isinstance(row, dict) or not FIELDS - OPTIONAL <= row.keys() <= FIELDS:
        raise ValueError(f"an entry has other fields than it should: {told}")
    values: dict[str, Any] = {**row}
    if not all(map(_is_valid, values.keys(), values.values())):
        raise ValueError(f"an entry has a value that it cannot have: {told}")
    values |= {name: tuple(values[name]) for name in LISTS if name in values}
    shape = ProductShape(**{f.name: values[f.name] for f in fields(ProductShape)})
    blocks = MeasuredBlocks(**{f.name: values[f.name] for f in fields(MeasuredBlocks) if f.name in values})
    return FastestProduct(shape, blocks, *(values[name] for name in MEASURED))


def _is_valid(name: str, value: Any) -> bool:
    """Whether a field of an entry may have a value."""
    if name in WORDS:
        return value in WORDS[name]
    if name in ("fused", "descriptors", "persistent"):
        return type(value) is bool
    if name in ("us", "library_us"):
        return type(value) in (int, float) and 0 < value < math.inf
    if name == "source":
        return isinstance(value, str)
    if name == "runs":
        return isinstance(value, str) and len(value) == 3 and set(value) <= {"m", "n", "k", APART}
    if (name in LISTS) != isinstance(value, list):
        return False
    numbers: list[object] = value if name in LISTS else [value]
    return all(type(n) is int and n > 0 for n in numbers)
