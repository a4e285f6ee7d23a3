"""Where C++ text goes: lines with indentation, names of locals, and the place in which an expression is evaluated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tilewright.ir.dtype import DType, Kind
from tilewright.ir.expr import Axis, Expr, walk
from tilewright.ir.program import Var

CPP = {"bool": "bool", "u8": "u8", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64", "f16": "half", "bf16": "bf16",
       "f32": "float", "f64": "double"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Style:
    """How element values are written: vectors of at most `lanes` elements, or (`exact`) one exact number at a time."""

    lanes: int
    exact: bool = False

    def memory(self, dtype: DType) -> str:
        """The C++ type of an element in memory."""
        return "Exact" if self.exact and dtype.is_float else CPP[dtype.name]

    def scalar(self, dtype: DType) -> str:
        """The C++ type of one value in a register."""
        return "Exact" if self.exact and dtype.is_float else CPP[dtype.compute.name]

    def vector(self, dtype: DType, lanes: str) -> str:
        """The C++ type of `lanes` values in registers."""
        return f"mask<{lanes}>" if dtype.kind is Kind.BOOL else f"vec<{CPP[dtype.compute.name]}, {lanes}>"


@dataclass(frozen=True, slots=True)
class VectorUnit:
    """The part of a block that one piece of straight-line code computes.

    `lane` is the vector axis (None: scalars), `lanes` how many of its values one register holds, as text. `values` is
    the C++ text of each bound axis (of the lane axis: of its first value), `index` the position inside arrays.
    """

    values: dict[Axis, str]
    lane: Axis | None = None
    lanes: str = "1"
    index: dict[Axis, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RegisterPlace:
    """Where a value lives: its name, its block axes with their tiles (the vector axis last), and whether the
    registers of the block form an array."""

    name: str
    var: Var
    dims: tuple[tuple[Axis, int], ...]
    array: bool


class Lines:
    """Text under construction."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def put(self, text: str) -> None:
        """Append one line."""
        self.lines.append("  " * self.depth + text if text else "")

    @contextmanager
    def block(self, head: str, tail: str = "}") -> Generator[None]:
        """`head {` ... `}` around what the body of the `with` puts."""
        self.put(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.put(tail)

    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines) + "\n"


class Scope:
    """Locals that are visible here: expressions that already have a name, in this block or one around it."""

    def __init__(self, parent: Scope | None = None, own: frozenset[Axis] = frozenset()) -> None:
        self.parent = parent
        self.own = own
        """Axes that have another value here than outside."""
        self.names: dict[tuple[Expr, bool | DType], str] = {}
        """By expression and form: lanes (True), one value (False), or lanes of another type."""

    def forget(self, states: set[int]) -> None:
        """Drop locals of this block that read one of the `states`."""
        self.names = {k: n for k, n in self.names.items() if not states & variables(k[0])}


def variables(e: Expr) -> set[int]:
    """Numbers of the values that `e` reads."""
    return {x.value for x in walk(e) if x.op == "var" and isinstance(x.value, int)}


def count_uses(roots: Sequence[Expr]) -> Counter[Expr]:
    """How often each node is used by another one or as a root."""
    counts: Counter[Expr] = Counter(roots)
    seen: set[Expr] = set()
    for root in roots:
        for x in walk(root):
            if x not in seen:
                seen.add(x)
                counts.update(x.args)
    return counts


def bare(text: str) -> str:
    """`text` without a pair of parentheses around all of it."""
    if not text.startswith("(") or not text.endswith(")"):
        return text
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and k < len(text) - 1:
            return text
    return text[1:-1]
