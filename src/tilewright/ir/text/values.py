"""Values of the compiler as JSON and back: numbers, texts, sequences, dataclasses by name, expressions row by row."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from fractions import Fraction
from typing import Any, TypeAlias, cast

import torch
from torch._ops import OpOverload

from tilewright.ir.dtype import DTYPES
from tilewright.ir.expr import OF_PROGRAM, Axis, Expr, Leaf, OfProgram, Slot, Symbol, make
from tilewright.tuning.input_limits import ARTIFACTS

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"

_DIGITS = f"[0-9]{{1,{ARTIFACTS.max_fraction_digits}}}"
_RATIO = re.compile(f"-?{_DIGITS}(/{_DIGITS})?")
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def op_name(function: object) -> str | None:
    """The name of an op in torch's registry, `namespace.op.overload`; None for any other function."""
    if not isinstance(function, OpOverload):
        return None
    packet = function.overloadpacket.__name__
    return f"{function.namespace}.{packet}.{function._overloadname}"  # pyright: ignore[reportPrivateUsage]


def find_op(name: str) -> OpOverload | None:
    """The op of a name; None if this torch has none."""
    found: object = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None) if part.isidentifier() else None
    return found if isinstance(found, OpOverload) else None


class Writer:
    """Expressions are rows (operation, type, value, row numbers of arguments), each once. `classes` are the dataclasses
    and enumerations that are written by name; `special` writes values of a type in another way, `other` what is left
    over."""

    def __init__(
        self,
        classes: Mapping[str, type],
        special: Mapping[type, Callable[[Any], Json]],
        other: Callable[[object], Json] = lambda x: {"private": type(x).__name__},
    ) -> None:
        self.rows: list[Json] = []
        self.classes, self.special, self.other = classes, special, other
        self._known: dict[Expr, int] = {}

    def write(self, x: object) -> Json:
        """A value with a mark of its kind; `None`, bools, ints, strings and finite floats are themselves."""
        if x is None or (isinstance(x, (bool, int, str)) and not isinstance(x, Enum)):
            return x
        if isinstance(x, float):
            return x if math.isfinite(x) else {"float": str(x)}
        if isinstance(x, (list, tuple)):
            items = cast("list[object]", list(x))  # pyright: ignore[reportUnknownArgumentType]
            return {type(x).__name__: [self.write(i) for i in items]}
        if isinstance(x, Expr):
            return {"expression": self._row(x)}
        for of, write in self.special.items():
            if isinstance(x, of):
                return write(x)
        if isinstance(x, Enum) and type(x).__name__ in self.classes:
            return {"is": type(x).__name__, "value": str(x.value)}
        if dataclasses.is_dataclass(x) and type(x).__name__ in self.classes:
            return {"is": type(x).__name__, **self.fields(x)}
        plain = _plain(x)
        return self.other(x) if plain is None else plain

    def fields(self, x: object, without: frozenset[str] = frozenset()) -> dict[str, Json]:
        """The fields of a dataclass, but for those named."""
        names = [f.name for f in dataclasses.fields(x)]  # pyright: ignore[reportArgumentType]
        return {name: self.write(getattr(x, name)) for name in names if name not in without}

    def _row(self, e: Expr) -> int:
        found = self._known.get(e)
        if found is None:
            args: list[Json] = [self._row(a) for a in e.args]
            self.rows.append([e.op, e.dtype.name, self._leaf(e.value), args])
            found = self._known[e] = len(self.rows) - 1
        return found

    def _leaf(self, value: Leaf) -> Json:
        match value:
            case Symbol():
                return {"symbol": value.name, "low": value.low, "high": value.high}
            case Axis():
                return {"axis": value.name, "extent": self._row(value.extent)}
            case Slot():
                return {"slot": value.side, "index": value.index}
            case OfProgram():
                return {"of program": True}
            case Fraction():
                return {"fraction": str(value)}
            case tuple():
                return {"pair": list(value)}
            case None | bool() | int() | float():
                return self.write(value)


def _plain(x: object) -> Json:
    """Types of torch and complex numbers; None for anything else."""
    for kind, of in _NAMED.items():
        if isinstance(x, of):
            return {kind: str(x).removeprefix("torch.")}
    if isinstance(x, torch.device):
        return {"device": str(x)}
    if isinstance(x, complex):
        return {"complex": [_plain(x.real), _plain(x.imag)]}
    if isinstance(x, float):
        return x if math.isfinite(x) else {"float": str(x)}
    return None


def _fraction(text: str) -> Fraction:
    """The exact number that is written so, as a ratio alone: with an exponent, few characters are much memory."""
    if _RATIO.fullmatch(text) is None:
        raise ValueError(f"{text[:40]} is no ratio of whole numbers")
    return Fraction(text)


class Reader:
    """Reads what a `Writer` wrote. `special` reads objects of a name, and marked values of other kinds."""

    def __init__(
        self,
        rows: Sequence[Sequence[Json]],
        classes: Mapping[str, type],
        special: Mapping[str, Callable[[Any], object]],
    ) -> None:
        self.classes, self.special = classes, special
        self._exprs: list[Expr] = []
        written: list[int] = []
        below = 0
        for op, dtype, value, args in rows:
            numbers = [self._earlier(a) for a in cast(Sequence[Json], args)]
            parts = 1 + sum(written[n] for n in numbers)
            written.append(parts)
            below += min(parts, len(written))
            if parts > ARTIFACTS.max_expression_written or below > ARTIFACTS.max_parts_below:
                raise ValueError(f"expression {len(written) - 1} has too many parts")
            self._exprs.append(
                make(str(op), tuple(self._exprs[n] for n in numbers), DTYPES[str(dtype)], self._leaf(value))
            )

    def _at(self, row: Json) -> Expr:
        return self._exprs[self._earlier(row)]

    def _earlier(self, row: Json) -> int:
        """The number of a row that stands above."""
        if type(row) is not int or not 0 <= row < len(self._exprs):
            raise ValueError(f"there is no expression {str(row)[:40]}")
        return row

    def _leaf(self, value: Json) -> Leaf:
        if not isinstance(value, Mapping):
            return cast(Leaf, value)
        match value:
            case {"symbol": name, "low": low, "high": high}:
                return Symbol(str(name), cast(int, low), cast("int | None", high))
            case {"axis": name, "extent": extent}:
                return Axis(str(name), self._at(extent))
            case {"slot": side, "index": index}:
                return Slot(str(side), cast(int, index))
            case {"of program": True}:
                return OF_PROGRAM
            case {"pair": [first, second]}:
                return cast(int, first), cast(int, second)
            case {"fraction": text}:
                return _fraction(str(text))
            case _:
                return float(str(value["float"]))

    def read(self, x: Json) -> object:
        """What `Writer.write` wrote."""
        if not isinstance(x, Mapping):
            return x
        if "is" in x:
            return self._object(str(x["is"]), {k: v for k, v in x.items() if k != "is"})
        ((kind, value),) = x.items()
        if kind in self.special:
            return self.special[kind](value)
        if kind in ("list", "tuple"):
            items = [self.read(i) for i in cast(Sequence[Json], value)]
            return items if kind == "list" else tuple(items)
        if kind == "expression":
            return self._at(value)
        if kind in _NAMED:
            found = getattr(torch, str(value))
            if not isinstance(found, _NAMED[kind]):
                raise ValueError(f"{value} is no {kind}")
            return found
        if kind == "device":
            return torch.device(str(value))
        if kind == "float":
            return float(str(value))
        if kind == "complex":
            real, imaginary = (cast(float, self.read(v)) for v in cast(Sequence[Json], value))
            return complex(real, imaginary)
        raise ValueError(f"{kind} {value} cannot be read")

    def _object(self, name: str, fields: Mapping[str, Json]) -> object:
        if name in self.special:
            return self.special[name](fields)
        of = self.classes[name]
        if issubclass(of, Enum):
            return of(fields["value"])
        return of(**self.fields(fields))

    def fields(self, fields: Mapping[str, Json]) -> dict[str, Any]:
        """The fields of a dataclass."""
        return {k: self.read(v) for k, v in fields.items()}
