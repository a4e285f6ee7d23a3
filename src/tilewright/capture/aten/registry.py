"""The table from ATen overloads to declarations. A line names the arguments and calls the declaration: shapes, types of
results and access maps follow there. Promotion is the one thing done here, so that declarations get equal types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Kind
from torch._prims_common import elementwise_dtypes

from tilewright.ir.builder import Builder
from tilewright.ir.dtype import DTYPES, DType, bool_, i64
from tilewright.ir.dtype import Kind as TypeKind
from tilewright.ir.expr import Const, Expr, cast, const
from tilewright.ir.graph import Value
from tilewright.ir.ops import pointwise
from tilewright.ir.ops.strided import Lying
from tilewright.ir.sizes import dims

Size = int | Expr
Number = bool | int | float | Expr
Result = Value | tuple[Value | None, ...]
Rule = Callable[..., Result]
R = TypeVar("R", bound=Rule)

DEFAULT = Kind.DEFAULT
INT_TO_FLOAT = Kind.INT_TO_FLOAT
ALWAYS_BOOL = Kind.ALWAYS_BOOL
BOOL_TO_LONG = Kind.BOOL_TO_LONG

_TORCH: dict[str, torch.dtype] = {
    "bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip
_OURS = {t: DTYPES[name] for name, t in _TORCH.items()}


class NoDeclaration(Exception):
    """Raised by a rule for arguments that its declaration does not cover; the op then runs as a library call."""

    def __init__(self, reason: str = "no declaration") -> None:
        self.reason = reason
        super().__init__(reason)


def to_dtype(t: torch.dtype) -> DType:
    """The element type for a torch dtype; one that only library calls can hold has the kind OPAQUE."""
    known = _OURS.get(t)
    return known or DType(str(t).removeprefix("torch."), t.itemsize, TypeKind.OPAQUE)


def to_torch(d: DType) -> torch.dtype:
    """The torch dtype of an element type. Raises KeyError for an opaque one."""
    return _TORCH[d.name]


@dataclass(frozen=True, slots=True)
class OpEntry:
    """One line of the table: how to declare an op, whether it is a pure view, why its library call may be chosen, and
    which argument of a convolution is its bias (-1: none)."""

    rule: Rule
    view: bool = False
    reason: str = ""
    bias: int = -1


TABLE: dict[object, OpEntry] = {}
LATE: dict[str, OpEntry] = {}
"""The same by name, for ops that exist only once Dynamo was imported, which takes seconds."""


def entry_of(target: object) -> OpEntry | None:
    """The line for what a node calls."""
    return TABLE.get(target) or (LATE.get(str(target)) if isinstance(target, OpOverload) else None)


def lower(*overloads: object, view: bool = False, reason: str = "", bias: int = -1) -> Callable[[R], R]:
    """Register a rule for ATen overloads. It is called as rule(call, *args, **kwargs) with tensors as Values, symbolic
    sizes as Exprs, the rest as in the captured program; it returns a Value, or one per result (None: not needed)."""

    def register(rule: R) -> R:
        for overload in overloads:
            if overload in TABLE:
                raise ValueError(f"{overload} is registered twice")
            TABLE[overload] = OpEntry(rule, view, reason, bias)
        return rule

    return register


class HowHeld(Protocol):
    """How the tensors of one captured node lie in memory."""

    def operand(self) -> Lying:
        """How the first operand lies in its storage."""
        ...

    def result(self) -> Lying:
        """How the first result lies in its storage."""
        ...

    def bases(self) -> Iterator[tuple[Value, Lying]]:
        """Tensors of the first operand's type and storage, with how they lie: one that fills the storage, if the
        program has one, and the operand."""
        ...


@dataclass(frozen=True, slots=True)
class ReplacementCall:
    """A call of the library that computes what a captured node does, of other tensors or by another function."""

    function: OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]


@dataclass(slots=True)
class Call:
    """What a rule knows of the captured node: the builder, types and sizes of its results, which of them are read, and
    how its tensors lie in `memory`. A rule that reads other tensors than the node does names the call that computes the
    same of these, as nothing else may need what the node reads: `replacement`. So does one that knows the node's own
    call to be wrong."""

    b: Builder
    results: tuple[DType, ...]
    used: frozenset[int] = frozenset({0})
    sizes_of_results: tuple[tuple[Expr, ...], ...] = ()
    memory: HowHeld | None = None
    replacement: ReplacementCall | None = None

    @property
    def dtype(self) -> DType:
        """Type of the first result."""
        return self.results[0]

    @property
    def held(self) -> HowHeld:
        """How operands and results lie. Raises NoDeclaration where nothing is known of that."""
        if self.memory is None:
            raise NoDeclaration("unknown strides")
        return self.memory

    def number(self, value: Number, dtype: DType) -> Expr:
        """A scalar argument as an expression of `dtype`."""
        return cast(value, dtype) if isinstance(value, Expr) else constant(value, dtype)

    def wide(self, value: Number) -> Expr:
        """A scalar argument in the type in which the first result is computed."""
        return self.number(value, self.dtype.compute)

    def to(self, x: Value, dtype: DType) -> Value:
        """`x` in `dtype`."""
        return pointwise.to(self.b, x, dtype)

    def promote(self, *args: Value | Number, kind: Kind = DEFAULT) -> list[Value | Expr]:
        """Operands of an elementwise op in one type, by torch's promotion rules; casts are inserted where needed."""
        to = common_type(args, kind)
        if kind is ALWAYS_BOOL:
            args = tuple(a if isinstance(a, Value) else compared(a, to) for a in args)
        return [self.to(a, to) if isinstance(a, Value) else self.number(a, to) for a in args]


def compared(value: Number, dtype: DType) -> Number:
    """A number as torch compares with it: of half types it takes what they hold of it, where sums and products take
    all digits."""
    if isinstance(value, Expr) or not dtype.is_half:
        return value
    return torch.tensor(value, dtype=to_torch(dtype)).item()


def constant(value: Const, dtype: DType) -> Expr:
    """A constant of `dtype`; a float for an integer type is refused, as it would lose digits."""
    if isinstance(value, complex):
        raise NoDeclaration("complex")
    if not dtype.is_float and isinstance(value, float) and not float(value).is_integer():
        raise NoDeclaration("a fraction as an integer")
    if dtype.kind is TypeKind.UINT and value < 0:
        value = int(value) % 256
    return const(value, dtype)


def common_type(args: Sequence[Value | Number], kind: Kind) -> DType:
    """The type in which an elementwise op takes its operands: halves stay halves, comparisons compare in it."""
    if any(isinstance(a, complex) for a in args):
        raise NoDeclaration("complex")
    operands = [_stand_in(a) for a in args]
    asked = DEFAULT if kind is ALWAYS_BOOL else kind
    _, result = elementwise_dtypes(*operands, type_promotion_kind=asked)
    return to_dtype(result)


_stand_ins: dict[tuple[DType, bool], torch.Tensor] = {}


def _stand_in(a: Value | Number) -> torch.Tensor | bool | int | float:
    """Something with the dtype and the rank class of an operand: all that promotion looks at."""
    if isinstance(a, Value):
        key = (a.dtype, bool(a.shape))
        if key not in _stand_ins:
            _stand_ins[key] = torch.empty((1,) if a.shape else (), dtype=to_torch(a.dtype), device="meta")
        return _stand_ins[key]
    if isinstance(a, Expr):
        return True if a.dtype is bool_ else 1 if a.dtype is i64 else 1.0
    return a


def size(value: Size) -> Expr:
    """A size argument as an index expression."""
    return value if isinstance(value, Expr) else dims.integer(int(value))


def sizes(values: Sequence[Size]) -> tuple[Expr, ...]:
    """Size arguments as index expressions."""
    return tuple(size(v) for v in values)


def known(value: Size) -> int:
    """A size argument that must be a constant. Raises NoDeclaration if it is symbolic."""
    if isinstance(value, Expr):
        fixed = dims.static(value)
        if fixed is None:
            raise NoDeclaration("symbolic attribute")
        return fixed
    return int(value)


def dtype_or(asked: torch.dtype | None, otherwise: DType) -> DType:
    """The dtype argument of a call if given."""
    return otherwise if asked is None else to_dtype(asked)
