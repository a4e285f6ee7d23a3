"""Measured block sizes of a device, as a table that people read and merge: `tuning/<target>.json`.

An entry says which block was fastest for kernels of one kind, with elements of some size and rows of some length. Where
the table has no entry near, the schedule follows from the target's figures alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from tilewright.errors import InputError

FOLDER = Path(__file__).parent.parent / "tuning"
"""Where the tables of the package lie."""

HELD = ("rows", "row_totals")
KINDS = ("flat", "square", *HELD, "streams", "stream_totals", "columns", "products", "scores")
"""Pointwise along memory; read along one class and written along another; rows that stay in registers, or of which only
totals are left; rows that are streamed, and such of which only totals are left; folds across rows; products that are
added up over steps; products whose elements are folded in each step."""


@dataclass(frozen=True, slots=True, order=True)
class FastestBlock:
    """The fastest block of kernels of `kind` whose elements have `bytes` and whose rows have `length` elements (of a
    flat or square kernel: of the contiguous class): `elements` in a block, `lane` of them along memory (0: as many as
    possible), worked on by `warps`, with loads of `stages` steps under way, by `descriptors` where those reach. Of
    products, `length` is what the first one folds, `elements` the tile on the grid, `lane` that of a step. `odd`: of
    rows that begin anywhere, whose accesses are as narrow as an element."""

    kind: str
    bytes: int
    length: int
    elements: int
    lane: int = 0
    warps: int = 4
    stages: int = 1
    descriptors: bool = False
    odd: bool = False


@dataclass(frozen=True, slots=True)
class Tuning:
    """A table of entries."""

    entries: tuple[FastestBlock, ...] = ()

    def find(self, kind: str, size: int, length: int, odd: bool = False) -> FastestBlock | None:
        """The entry nearest in length, as `odd` as asked for if there is such a one; rows in registers must be at most
        twice or half as long."""
        found = [e for e in self.entries if (e.kind, e.bytes) == (kind, size)]
        near = [e for e in found if kind not in HELD or _distance(e, length) <= 1]
        near = [e for e in near if e.odd is odd] or [e for e in near if not e.odd]
        return min(near, key=lambda e: _distance(e, length), default=None)

    def merged(self, others: Iterable[FastestBlock]) -> Tuning:
        """With entries added; one for the same kernels replaces the old one."""
        table = {(e.kind, e.bytes, e.length, e.odd): e for e in (*self.entries, *others)}
        return Tuning(tuple(sorted(table.values())))

    def text(self) -> str:
        """As JSON, one entry a line."""
        lines = [json.dumps({k: v for k, v in asdict(e).items() if v is not False}) for e in self.entries]
        return "[\n  " + ",\n  ".join(lines) + "\n]\n"


def _distance(e: FastestBlock, length: int) -> float:
    return abs(math.log2(max(1, e.length) / max(1, length)))


def parse_table(text: str, place: str) -> Tuning:
    """The table that `text` holds. Raises InputError, naming `place`, for anything else."""
    names = {f.name for f in fields(FastestBlock)}
    try:
        rows = json.loads(text)
        made = [FastestBlock(**row) for row in rows if set(row) <= names]
        integral = all(isinstance(v, int) for e in made for k, v in asdict(e).items() if k != "kind")
        if len(made) != len(rows) or not integral or any(e.kind not in KINDS for e in made):
            raise ValueError("an entry has other fields or values than it should")
    except (ValueError, TypeError) as error:
        raise InputError(f"not a table of block sizes: {error}", phase="schedule", place=place) from None
    return Tuning().merged(made)


@cache
def table(target: str) -> Tuning:
    """The table that comes with the package for `target`, empty if there is none."""
    path = FOLDER / f"{target}.json"
    return parse_table(path.read_text(encoding="utf-8"), path.name) if path.exists() else Tuning()
