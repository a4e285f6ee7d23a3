"""Plans as JSON and back: every field, sizes as expressions, library calls by name and arguments.

A call whose function has no name in torch's registry (weights packed in this process, a routine of our own with its
tables, a captured sub-graph) cannot be written; its place says so, and reading such a plan back is refused. What only
compiling needs of a call (its task, what stands behind it) is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from fractions import Fraction
from typing import TypeAlias, cast

import torch
from torch._ops import OpOverload

from tilewright.errors import InputError
from tilewright.ir.dtype import DTYPES, DType
from tilewright.ir.dtype import Kind as TypeKind
from tilewright.ir.expr import Axis, Expr, Leaf, Symbol, make
from tilewright.ir.graph import LibraryCall, Operand, Precondition

from .data import (
    Binding,
    Buffer,
    Call,
    Copy,
    Home,
    Launch,
    Launches,
    Measure,
    Part,
    Plan,
    Segment,
    Spec,
    View,
)

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"

FORMAT = 1
"""Raised when the meaning of a field changes; other numbers are refused."""

_CLASSES: dict[str, type] = {
    c.__name__: c
    for c in (
        Binding, Buffer, Call, Copy, DType, Home, Launch, Launches, Measure, Operand, Part, Plan, Precondition,
        Segment, Spec, TypeKind, View,
    )
}  # fmt: skip
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_COMPILING = frozenset({"task", "spare", "refused"})


def to_json(plan: Plan) -> dict[str, Json]:
    """The plan as data for `json.dumps`."""
    writer = _Writer()
    body = writer.any(plan)
    return {"format": FORMAT, "plan": body, "expressions": writer.rows}


def from_json(data: Mapping[str, Json]) -> Plan:
    """The plan that `to_json` wrote. Raises InputError for other data, and for a plan with a call that has no name."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            "this is no plan, or one of another version", phase="plan", hint="compile the model again"
        )
    try:
        reader = _Reader(cast(Sequence[Sequence[Json]], data["expressions"]))
        plan = reader.any(data["plan"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as bad:
        raise InputError(f"the plan is damaged: {type(bad).__name__}: {bad}", phase="plan") from bad
    if not isinstance(plan, Plan):
        raise InputError("this is no plan", phase="plan")
    return plan


def function_name(function: object) -> str | None:
    """The name of an op in torch's registry, `namespace.op.overload`; None for any other function."""
    if not isinstance(function, OpOverload):
        return None
    packet = function.overloadpacket.__name__
    return f"{function.namespace}.{packet}.{function._overloadname}"  # pyright: ignore[reportPrivateUsage]


class _Writer:
    """Expressions are rows (operation, type, value, row numbers of arguments), each once."""

    def __init__(self) -> None:
        self.rows: list[Json] = []
        self._known: dict[Expr, int] = {}

    def any(self, x: object) -> Json:
        """A value with a mark of its kind; `None`, bools, ints, strings and finite floats are themselves."""
        if x is None or (isinstance(x, (bool, int, str)) and not isinstance(x, Enum)):
            return x
        if isinstance(x, float):
            return x if math.isfinite(x) else {"float": str(x)}
        if isinstance(x, (list, tuple)):
            items = cast("list[object]", list(x))  # pyright: ignore[reportUnknownArgumentType]
            return {type(x).__name__: [self.any(i) for i in items]}
        if isinstance(x, Expr):
            return {"expression": self._row(x)}
        if isinstance(x, LibraryCall):
            return self._call(x)
        if isinstance(x, Enum) and type(x).__name__ in _CLASSES:
            return {"is": type(x).__name__, "value": str(x.value)}
        if dataclasses.is_dataclass(x) and type(x).__name__ in _CLASSES:
            fields = {f.name: self.any(getattr(x, f.name)) for f in dataclasses.fields(x)}
            return {"is": type(x).__name__, **fields}
        return self._plain(x)

    def _plain(self, x: object) -> Json:
        for kind, of in _NAMED.items():
            if isinstance(x, of):
                return {kind: str(x).removeprefix("torch.")}
        if isinstance(x, torch.device):
            return {"device": str(x)}
        if isinstance(x, complex):
            return {"complex": [self.any(x.real), self.any(x.imag)]}
        return {"private": type(x).__name__}

    def _call(self, call: LibraryCall) -> Json:
        name = function_name(call.function)
        fields: dict[str, Json] = {
            f.name: self.any(getattr(call, f.name))
            for f in dataclasses.fields(call)
            if f.name != "function" and f.name not in _COMPILING
        }
        function: Json = {"private": call.name} if name is None else name
        return {"is": "LibraryCall", "function": function, **fields}

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
            case Fraction():
                return {"fraction": str(value)}
            case None | bool() | int() | float():
                return self.any(value)
            case _:
                return {"private": type(value).__name__}


class _Reader:
    def __init__(self, rows: Sequence[Sequence[Json]]) -> None:
        self._exprs: list[Expr] = []
        for op, dtype, value, args in rows:
            made = make(
                str(op),
                tuple(self._at(a) for a in cast(Sequence[Json], args)),
                DTYPES[str(dtype)],
                self._leaf(value),
            )
            self._exprs.append(made)

    def _at(self, row: Json) -> Expr:
        return self._exprs[cast(int, row)]

    def _leaf(self, value: Json) -> Leaf:
        if not isinstance(value, Mapping):
            return cast(Leaf, value)
        if "symbol" in value:
            return Symbol(str(value["symbol"]), cast(int, value["low"]), cast("int | None", value["high"]))
        if "axis" in value:
            return Axis(str(value["axis"]), self._at(value["extent"]))
        return Fraction(str(value["fraction"])) if "fraction" in value else float(str(value["float"]))

    def any(self, x: Json) -> object:
        """What `_Writer.any` wrote."""
        if not isinstance(x, Mapping):
            return x
        if "is" in x:
            return self._object(str(x["is"]), {k: v for k, v in x.items() if k != "is"})
        ((kind, value),) = x.items()
        if kind in ("list", "tuple"):
            items = [self.any(i) for i in cast(Sequence[Json], value)]
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
            real, imaginary = (cast(float, self.any(v)) for v in cast(Sequence[Json], value))
            return complex(real, imaginary)
        raise _private(str(value))

    def _object(self, name: str, fields: Mapping[str, Json]) -> object:
        if name == "LibraryCall":
            function = fields["function"]
            if not isinstance(function, str):
                raise _private(str(cast("Mapping[str, Json]", function)["private"]))
            rest = {k: self.any(v) for k, v in fields.items() if k != "function"}
            return LibraryCall(function=_resolve(function), **rest)  # pyright: ignore[reportArgumentType]
        of = _CLASSES[name]
        if issubclass(of, Enum):
            return of(fields["value"])
        return of(**{k: self.any(v) for k, v in fields.items()})


def _private(name: str) -> InputError:
    return InputError(
        "the plan calls code that exists only in the process that compiled it", phase="plan", op=name,
        hint="compile the model in this process; with warm caches that is quick",
    )  # fmt: skip


def _resolve(name: str) -> OpOverload:
    """The op of a name. Raises InputError if this torch has none."""
    found: object = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None) if part.isidentifier() else None
    if not isinstance(found, OpOverload):
        raise InputError(
            "this torch has no such op", phase="plan", op=name, hint="load it with the torch that made it"
        )
    return found
