"""Element types: the ones that generated code can hold, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The arithmetic family of an element type; it decides promotion and reduction types."""

    BOOL = "bool"
    UINT = "uint"
    INT = "int"
    FLOAT = "float"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: `name` as printed, size in `bytes`, and its `kind`."""

    name: str
    bytes: int
    kind: Kind

    def __repr__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_float(self) -> bool:
        """Whether values are floating point."""
        return self.kind is Kind.FLOAT

    @property
    def is_half(self) -> bool:
        """Whether this is a 16-bit float, which is computed and held in fp32 inside a kernel."""
        return self.kind is Kind.FLOAT and self.bytes == 2

    @property
    def compute(self) -> DType:
        """The type in which a kernel computes values of this type."""
        return f32 if self.is_half else self


bool_ = DType("bool", 1, Kind.BOOL)
u8 = DType("u8", 1, Kind.UINT)
i8 = DType("i8", 1, Kind.INT)
i16 = DType("i16", 2, Kind.INT)
i32 = DType("i32", 4, Kind.INT)
i64 = DType("i64", 8, Kind.INT)
f16 = DType("f16", 2, Kind.FLOAT)
bf16 = DType("bf16", 2, Kind.FLOAT)
f32 = DType("f32", 4, Kind.FLOAT)
f64 = DType("f64", 8, Kind.FLOAT)

DTYPES: dict[str, DType] = {d.name: d for d in (bool_, u8, i8, i16, i32, i64, f16, bf16, f32, f64)}
