"""Graphs as JSON and back: `read_graph` gives a graph of the same digest, in this process or another one.

Ops of torch's registry, functions of `operator` and routines of ours that are plain data are written by name; no text
can name anything else. Tensors, other functions, and what exists only in this process (a captured module, packed
weights) are written as places in a table of `held` objects, which whoever sends the graph sends in its own way; the
text says what each is. What a call falls back to is left out.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any, cast

from torch import Tensor

from tilewright.errors import InputError
from tilewright.ir.dtype import DTYPES, DType, Kind
from tilewright.ir.expr import Axis, Expr
from tilewright.ir.graph import (
    Graph,
    Layout,
    LibraryCall,
    Loop,
    Op,
    Operand,
    Origin,
    Precondition,
    Routine,
    Share,
    Shares,
    Value,
    Write,
)
from tilewright.ir.reduction import Reduction
from tilewright.ir.task import Attention, Convolution, Offered, Product
from tilewright.ir.tensor import TensorExpr

from .values import Json, Reader, Writer, find_op, op_name

FORMAT = 1
"""Raised when the meaning of a field changes; other numbers are refused."""

_CLASSES: Mapping[str, type] = {
    c.__name__: c
    for c in (
        Attention, Convolution, Graph, Kind, Layout, LibraryCall, Loop, Offered, Op, Operand, Origin, Precondition,
        Product, Reduction, Share, Shares, TensorExpr, Write,
    )
}  # fmt: skip
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
"""What Python and torch raise of data in another form."""
_OPERATORS = "_operator"
"""The module whose functions are written by name: they compute, and do nothing else."""


def write_graph(graph: Graph) -> tuple[dict[str, Json], list[object]]:
    """The graph as data for `json.dumps`, and the objects that it holds by their places."""
    writer = _Writer()
    body = writer.plain.write(graph)
    made: dict[str, Json] = {
        "format": FORMAT, "graph": body, "values": writer.values, "expressions": writer.plain.rows,
        "held": [_shown(x) for x in writer.held],
    }  # fmt: skip
    return made, writer.held


def read_graph(data: Mapping[str, Json], held: Sequence[object] = ()) -> Graph:
    """The graph that `write_graph` wrote, with the objects that it holds, by their places. Raises InputError for other
    data, and where an object is missing."""
    again = "write it again, with this version of tilewright"
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError("this is no graph, or one of another version", phase="read", hint=again)
    try:
        count = len(cast(Sequence[Json], data["held"]))
        if len(held) < count:
            raise InputError(
                f"the graph holds {count} objects, {len(held)} are given", phase="read",
                hint="give those that write_graph gave beside it, in their order",
            )  # fmt: skip
        found = _Reader(data, held).plain.read(data["graph"])
        if isinstance(found, Graph):
            return found
    except _DAMAGED as bad:
        raise InputError(f"the graph is damaged: {bad!r}", phase="read", hint=again) from bad
    raise InputError("this is no graph", phase="read", hint=again)


def _shown(x: object) -> str:
    if isinstance(x, Tensor):
        return f"{x.dtype} {list(x.shape)} on {x.device}".removeprefix("torch.")
    return str(getattr(x, "__qualname__", type(x).__qualname__))


def routine_name(routine: Routine) -> str | None:
    """The name of a routine that is plain data, `module:class`; None for one that is equal to itself alone."""
    kind = type(routine)
    return None if kind.__eq__ is object.__eq__ else f"{kind.__module__}:{kind.__qualname__}"


def _operator_name(function: object) -> str | None:
    """The name of a function of `operator`; None for any other function."""
    if not isinstance(function, BuiltinFunctionType) or function.__module__ != _OPERATORS:
        return None
    return function.__name__


def _find_operator(name: str) -> object | None:
    """The function of `operator` that is written so; None if there is none."""
    found = getattr(operator, name, None) if name.isidentifier() else None
    return found if _operator_name(found) == name else None


def _find_routine(name: str) -> type[Routine] | None:
    """The class of a routine that is written so; None for anything else, and for one of another package."""
    module, _, inside = name.partition(":")
    found = getattr(sys.modules.get(module), inside, None) if inside.isidentifier() else None
    if not isinstance(found, type) or not issubclass(found, Routine) or not dataclasses.is_dataclass(found):
        return None
    ours = module.split(".")[0] == "tilewright" and (found.__module__, found.__qualname__) == (module, inside)
    return found if ours else None


class _Writer:
    """Values are rows (number, shape, type), each once; of types that no kernel knows, size and kind are written."""

    def __init__(self) -> None:
        self.values: list[Json] = []
        self.held: list[object] = []
        self._numbers: dict[int, int] = {}
        special: dict[type, Callable[[Any], Json]] = {
            Value: lambda v: {"value": self._value(v)},
            DType: self._dtype,
            LibraryCall: self._call,
            Axis: lambda a: {"axis": [a.name, self.plain.write(a.extent)]},
            Mapping: self._mapping,
        }
        self.plain = Writer(_CLASSES, special, lambda x: {"held": self._place(x)})

    def _value(self, v: Value) -> int:
        number = self._numbers.get(id(v))
        if number is None:
            row: list[Json] = [v.id, self.plain.write(v.shape), self._dtype(v.dtype)]
            number = self._numbers[id(v)] = len(self.values)
            self.values.append(row)
        return number

    def _dtype(self, of: DType) -> Json:
        known = DTYPES.get(of.name) is of
        return {"type": of.name} if known else {"other type": [of.name, of.bytes, of.kind.value]}

    def _mapping(self, x: Mapping[object, object]) -> Json:
        return {"mapping": [[self.plain.write(k), self.plain.write(v)] for k, v in x.items()]}

    def _place(self, x: object) -> int:
        for place, other in enumerate(self.held):
            if other is x:
                return place
        self.held.append(x)
        return len(self.held) - 1

    def _call(self, call: LibraryCall) -> Json:
        rest = self.plain.fields(call, frozenset({"function", "spare", "over"}))
        if call.over is not None:
            rest["over"] = self._function(call.over)
        return {"is": "LibraryCall", "function": self._function(call.function), **rest}

    def _function(self, function: Callable[..., object]) -> Json:
        if (name := op_name(function)) is not None:
            return {"op": name}
        if isinstance(function, Routine) and (name := routine_name(function)) is not None:
            return {"routine": name, **self.plain.fields(function)}
        if (name := _operator_name(function)) is not None:
            return {"operator": name}
        return {"held": self._place(function)}


class _Reader:
    def __init__(self, data: Mapping[str, Json], held: Sequence[object]) -> None:
        self.held = held
        special: dict[str, Callable[[Any], object]] = {
            "value": lambda number: self.values[number],
            "type": lambda name: DTYPES[name],
            "other type": lambda row: DType(row[0], row[1], Kind(row[2])),
            "axis": lambda row: Axis(row[0], cast(Expr, self.plain.read(row[1]))),
            "mapping": lambda pairs: {self.plain.read(k): self.plain.read(v) for k, v in pairs},
            "held": lambda place: held[place],
            "LibraryCall": self._call,
            "Shares": lambda fields: Shares(int(fields["value"])),
        }
        self.plain = Reader(cast(Sequence[Sequence[Json]], data["expressions"]), _CLASSES, special)
        self.values = [self._value(row) for row in cast("Sequence[list[Json]]", data["values"])]

    def _value(self, row: list[Json]) -> Value:
        shape, dtype = self.plain.read(row[1]), self.plain.read(row[2])
        return Value(cast(int, row[0]), cast("tuple[Expr, ...]", shape), cast(DType, dtype))

    def _call(self, fields: Mapping[str, Json]) -> LibraryCall:
        function, over = (
            self._function(cast("Mapping[str, Json]", fields[name])) if name in fields else None
            for name in ("function", "over")
        )
        assert function is not None
        rest = self.plain.fields({k: v for k, v in fields.items() if k not in ("function", "over")})
        return LibraryCall(function=function, over=over, **rest)

    def _function(self, given: Mapping[str, Json]) -> Callable[..., object]:
        """Raises InputError for one that this process does not have."""
        found: object = None
        match given:
            case {"op": str(name)}:
                found = find_op(name)
            case {"operator": str(name)}:
                found = _find_operator(name)
            case {"routine": str(name)}:
                kind = _find_routine(name)
                if kind is not None:
                    rest = self.plain.fields({k: v for k, v in given.items() if k != "routine"})
                    found = kind(**rest)
            case {"held": int(place)}:
                found = self.held[place]
            case _:
                pass
        if not callable(found):
            raise InputError(
                "this process has no such function", phase="read", op=str(given),
                hint="write the graph with this version, and import what registers its ops first",
            )  # fmt: skip
        return cast("Callable[..., object]", found)
