"""The values that an imported model computes with: tensors, and small integers kept on the host.

Shape arithmetic (`Shape`, then `Gather`, `Concat`, `Cast`, ...) is done on python numbers or torch's symbolic
numbers, so that a symbolic size stays a symbol and no operation depends on data.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from onnx import TensorProto
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tilewright.errors import ModelError, UnsupportedError
from tilewright.tuning.input_limits import MODEL_FILES

from .ratio import Ratio

Number = int | float
"""One host number. While torch captures, it may also be one of torch's symbolic numbers, which are used alike."""

Dim = int
"""A size: an int, or (while torch captures) a SymInt, which torch too lets stand for an int."""


@dataclass(frozen=True)
class Host:
    """A small array whose elements are host numbers, in row-major order.

    `shape` is static; `dtype` is the type that the array has when it becomes a tensor.
    """

    values: tuple[Number, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def ints(self) -> list[int]:
        """The elements as integers (symbolic ones stay symbolic)."""
        return [to_int(v) for v in self.values]

    def floats(self) -> list[float]:
        """The elements as floats (symbolic ones stay symbolic)."""
        return [plain(v) if is_symbolic(v) else float(v) for v in self.values]

    def item(self) -> Number:
        """The only element; ModelError when there is not exactly one."""
        if len(self.values) != 1:
            raise ModelError(f"expected one element, found shape {list(self.shape)}", phase="capture")
        return plain(self.values[0])

    def int(self) -> int:
        """The only element as an integer."""
        return to_int(self.values[0]) if len(self.values) == 1 else to_int(self.item())


Value = Tensor | Host | list["Value"] | None
"""What an edge of the model carries; a list is an ONNX sequence, None an absent optional."""


def to_int(value: Number | Ratio) -> int:
    """Truncate to an integer; a symbolic number stays symbolic (typed as int, as torch itself does)."""
    if isinstance(value, Ratio):
        if value.denominator == 1 or surely(value >= 0):
            return value.floor()
        return value.ceil() if value < 0 else value.floor()
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, torch.SymFloat):
        return torch.sym_int(value)  # type: ignore[return-value]
    return int(value)


def host(values: Iterable[Number], dtype: torch.dtype = torch.int64) -> Host:
    """A host vector."""
    items = tuple(values)
    return Host(items, (len(items),), dtype)


def scalar(value: Number, dtype: torch.dtype = torch.int64) -> Host:
    """A host value of rank 0."""
    return Host((value,), (), dtype)


def is_static(size: object) -> bool:
    """Whether a size is a plain int."""
    return isinstance(size, int)


def is_symbolic(value: object) -> bool:
    """Whether a number is one of torch's symbolic ones."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, Ratio))


def plain(value: Number | Ratio) -> Number:
    """An exact fraction as the float that it stands for; anything else unchanged."""
    return value.real() if isinstance(value, Ratio) else value


def place_of(axis: int, rank: int) -> int:
    """An axis counted from the front; ModelError unless it is one of `rank`."""
    if not -rank <= axis < rank:
        raise ModelError(f"axis {axis} of a tensor with {rank} dims", phase="capture")
    return axis % rank if rank else 0


def sym_max(a: Dim, b: Dim) -> Dim:
    """The larger size, without a guard."""
    return torch.sym_max(a, b)  # type: ignore[return-value]


def surely(condition: object) -> bool:
    """Whether a condition holds for all sizes; never adds a guard."""
    if isinstance(condition, torch.SymBool):
        return statically_known_true(condition)
    return bool(condition)


def known_equal(a: Dim, b: Dim) -> bool:
    """Whether two sizes are equal for all values of their symbols; never adds a guard."""
    return surely(a == b)


def broadcast_dims(shape_: Sequence[Dim], wanted: Sequence[Dim]) -> list[Dim]:
    """Sizes after broadcasting `shape_` with `wanted` (a 1 on either side yields to the other)."""
    rank = max(len(shape_), len(wanted))
    a = [1] * (rank - len(shape_)) + list(shape_)
    b = [1] * (rank - len(wanted)) + list(wanted)
    return [
        x if is_static(y) and y == 1 else y if is_static(x) and x == 1 else _join(x, y)
        for x, y in zip(a, b, strict=True)
    ]


def _join(x: Dim, y: Dim) -> Dim:
    return x if not is_static(y) and is_static(x) else y


def dense(x: Tensor) -> Tensor:
    """x itself if its strides are known to fall without gaps, else a copy."""
    size: Dim = 1
    for n, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not known_equal(stride, size):
            return x.clone(memory_format=torch.contiguous_format)
        size = size * n
    return x


def has_symbols(x: Tensor) -> bool:
    """Whether a size of x is symbolic."""
    return any(isinstance(d, torch.SymInt) for d in x.shape)


def order_strides(x: Tensor, known: set[tuple[object, ...]]) -> Tensor:
    """A contiguous copy where torch would have to guess the order of symbolic strides.

    Its rule for the strides of elementwise results asks whether a size divides a smaller stride, which becomes a
    guard that export cannot prove. With static sizes, and with strides of known order, x is returned. What is `known`
    of strides in one trace holds to its end: many tensors have the same ones, and each proof takes its time.
    """
    strides = x.stride()
    key = tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in strides)
    if key in known or all(is_static(s) for s in strides):
        return x
    for i, a in enumerate(strides):
        for b in strides[i + 1 :]:
            if not (is_static(a) and is_static(b)) and not surely(a >= b):
                return x.clone(memory_format=torch.contiguous_format)
    known.add(key)
    return x


def as_tensor(value: Value, device: torch.device) -> Value:
    """A host value as a tensor on `device`; anything else unchanged."""
    if not isinstance(value, Host):
        return value
    if not any(is_symbolic(v) for v in value.values):
        return torch.tensor(value.values, dtype=value.dtype, device=device).reshape(value.shape)
    parts = [
        torch.ops.aten.scalar_tensor.default(plain(v), dtype=value.dtype, device=device) for v in value.values
    ]
    if value.rank == 0:
        return parts[0]
    return torch.stack(parts).reshape(value.shape)


def as_host(value: Value) -> Value:
    """A tensor as a host value (this reads its data); anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    flat = value.reshape(-1)
    if type(value) is Tensor or isinstance(value, torch.nn.Parameter):
        items: Sequence[Number] = flat.tolist()
    else:  # under a tracer one element at a time, so that each becomes a symbol
        items = [flat[i].item() for i in range(flat.shape[0])]
    return Host(tuple(items), tuple(int(d) for d in value.shape), value.dtype)


class TooLarge(Exception):
    """A tensor above the limit in force; only `size_limit` sets one below the absolute limit."""


_limit: ContextVar[int] = ContextVar("onnx_size_limit", default=MODEL_FILES.max_tensor_elements)


@contextmanager
def size_limit(elements: int) -> Generator[None]:
    """Let `check_size` raise TooLarge above so many elements."""
    token = _limit.set(elements)
    try:
        yield
    finally:
        _limit.reset(token)


def check_size(dims: Iterable[Dim], op: str) -> None:
    """Refuse a tensor that no machine can hold; ModelError. Symbolic dims are not looked at."""
    if torch.compiler.is_compiling():
        return
    known = [d for d in dims if is_static(d)]
    if any(d < 0 for d in known):
        raise ModelError(f"negative size in {known}", phase="capture", op=op)
    if MODEL_FILES.max_tensor_elements >= math.prod(known) > _limit.get():
        raise TooLarge
    if math.prod(known) > MODEL_FILES.max_tensor_elements:
        raise ModelError(
            f"a tensor of shape {known} is too large", phase="capture", op=op, hint="is the file intact?"
        )


_DTYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT8: torch.int8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.UINT8: torch.uint8,
    TensorProto.UINT16: torch.uint16,
    TensorProto.UINT32: torch.uint32,
    TensorProto.UINT64: torch.uint64,
    TensorProto.BOOL: torch.bool,
    TensorProto.COMPLEX64: torch.complex64,
    TensorProto.COMPLEX128: torch.complex128,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    TensorProto.FLOAT8E8M0: torch.float8_e8m0fnu,
}

WIDE = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Unsigned types for which torch has few kernels: arithmetic goes through int64."""

FLOAT8 = frozenset(
    {
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    }
)


def torch_dtype(code: int) -> torch.dtype:
    """The torch dtype of an ONNX element type; UnsupportedError for strings and sub-byte types."""
    found = _DTYPES.get(code)
    if found is None:
        known = code in TensorProto.DataType.values()
        name = TensorProto.DataType.Name(code) if known else f"number {code}"
        raise UnsupportedError(
            f"element type {name} has no torch dtype",
            phase="capture",
            hint="convert the model to float, integer or bool tensors",
        )
    return found
