"""Where Triton text goes: lines with indentation, terms with their block axes, and names of what has been computed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from tilewright.emit.cpp.scope import variables
from tilewright.errors import UnsupportedError
from tilewright.ir.dtype import DType
from tilewright.ir.expr import Axis, Expr

TYPES = {"bool": "tl.int1", "u8": "tl.uint8", "i8": "tl.int8", "i16": "tl.int16", "i32": "tl.int32", "i64": "tl.int64",
         "f16": "tl.float16", "bf16": "tl.bfloat16", "f32": "tl.float32", "f64": "tl.float64"}  # fmt: skip
SIGNATURE = {"bool": "u8", "u8": "u8", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64", "f16": "fp16",
             "bf16": "bf16", "f32": "fp32", "f64": "fp64"}  # fmt: skip
"""Element type -> its name in the type of a pointer argument; a truth value is a byte in memory."""

COMPARE, OR, XOR, AND, SHIFT, SUM, PRODUCT, UNARY, ATOM = range(9)
"""How tightly Python's operators bind, loosest first."""


@dataclass(frozen=True, slots=True)
class Term:
    """An expression as text, how tightly its outermost operator binds, and the block axes that it has, in order.
    `number` marks a bare literal, which takes the type of what it meets. `mixed` marks a sum of several terms over one
    axis: the language's compiler (until 3.6) takes every element of it to be as aligned as the first one is."""

    text: str
    level: int = ATOM
    dims: tuple[Axis, ...] = ()
    number: bool = False
    mixed: bool = False

    def at(self, level: int) -> str:
        """The text where an operator of `level` takes it."""
        return self.text if self.level >= level else f"({self.text})"


def type_of(dtype: DType) -> str:
    """The language's name of the type in which `dtype` is computed. Raises UnsupportedError if it has none."""
    return named_type(dtype.compute)


def named_type(dtype: DType) -> str:
    """The language's name of `dtype`. Raises UnsupportedError if it has none."""
    if dtype.name not in TYPES:
        raise UnsupportedError(f"elements of type {dtype.name} in a Triton kernel", phase="emit")
    return TYPES[dtype.name]


def memory_type(dtype: DType) -> str:
    """The name of the type of an element in memory, as a signature has it. Raises UnsupportedError if it has none."""
    named_type(dtype)
    return SIGNATURE[dtype.name]


def memory_name(dtype: DType) -> str:
    """The language's name of the type of an element in memory. Raises UnsupportedError if it has none."""
    return "tl.uint8" if memory_type(dtype) == "u8" else named_type(dtype)


class Lines:
    """Text under construction."""

    def __init__(self, depth: int = 1) -> None:
        self.lines: list[str] = []
        self.depth = depth

    def put(self, text: str) -> None:
        """Append one line."""
        self.lines.append("    " * self.depth + text if text else "")

    @contextmanager
    def block(self, head: str) -> Generator[None]:
        """`head:` around what the body of the `with` puts; `pass` if that is nothing."""
        self.put(f"{head}:")
        before = len(self.lines)
        self.depth += 1
        yield
        if len(self.lines) == before:
            self.put("pass")
        self.depth -= 1

    def text(self) -> str:
        """All lines."""
        return "".join(line + "\n" for line in self.lines)


class Scope:
    """Names of expressions computed in this block of text, or in one around it."""

    def __init__(self, parent: Scope | None = None) -> None:
        self.parent = parent
        self.names: dict[tuple[Expr, bool], Term] = {}

    def find(self, key: tuple[Expr, bool], states: set[int]) -> Term | None:
        """The name of an expression. What reads a state has its name in its own block only."""
        scope: Scope | None = self
        private = bool(variables(key[0]) & states)
        while scope is not None:
            if key in scope.names:
                return scope.names[key]
            scope = None if private else scope.parent
        return None

    def forget(self, states: set[int]) -> None:
        """Drop names of this block for what reads one of the `states`."""
        self.names = {k: n for k, n in self.names.items() if not states & variables(k[0])}
