"""One Triton kernel per tile program, as the text of a Python file.

The file imports `triton`, `triton.language as tl` and perhaps `libdevice`, and defines one function under
`@triton.jit` (and helpers for reductions over tuples). Its grid is one-dimensional: `program_id(0)` counts grid points,
the last axis of the grid varies fastest. All its arguments are run-time arguments, in the order of `arguments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tilewright.errors import UnsupportedError
from tilewright.ir.program import TileProgram
from tilewright.target import Target

from .variant import Variant

ArgumentKind = Literal["pointer", "size", "error"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel. `name` in the text, `type` as in a Triton signature ("*fp16", "i64", ...).

    `index` is the number of the parameter (pointer) or of the symbol in the plan's order (size), 0 for the error word.
    `divisible` says that the build may, and a call must, take it for a multiple of 16."""

    kind: ArgumentKind
    name: str
    type: str
    index: int
    divisible: bool


@dataclass(frozen=True, slots=True)
class TritonSource:
    """A Python file with one kernel: the function `entry`, built with `warps` and `stages` for one `variant`."""

    text: str
    entry: str
    arguments: tuple[Argument, ...]
    warps: int
    stages: int
    variant: Variant

    @property
    def signature(self) -> dict[str, str]:
        """Name -> type of every argument, in order."""
        return {a.name: a.type for a in self.arguments}

    @property
    def divisible(self) -> tuple[int, ...]:
        """Positions of the arguments that are multiples of 16."""
        return tuple(k for k, a in enumerate(self.arguments) if a.divisible)


def emit_triton(
    program: TileProgram, symbols: Sequence[str], target: Target, variant: Variant, name: str
) -> TritonSource:
    """Print `program` as the kernel `name` for `target`. `symbols` is the plan's order of size symbols.

    Raises UnsupportedError for what Triton cannot express and VerifyError for a program that is not made for a GPU
    (scratch memory, tiles that are no powers of two)."""
    raise UnsupportedError("not printed yet", phase="emit")
