"""Plans as JSON and back: every field, sizes as expressions, library calls by name and arguments.

A call whose function has no name in torch's registry (weights packed in this process, a routine of our own with its
tables, a captured sub-graph) cannot be written; its place says so, and reading such a plan back is refused. What only
compiling needs of a call (its task, what stands behind it) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch._ops import OpOverload

from tilewright.errors import InputError
from tilewright.ir.dtype import DType
from tilewright.ir.dtype import Kind as TypeKind
from tilewright.ir.graph import LibraryCall, Operand, Precondition
from tilewright.ir.text.values import Json, Reader, Writer, find_op, op_name

from .data import (
    Binding,
    Buffer,
    CallStep,
    Copy,
    Home,
    Launch,
    Launches,
    Measure,
    Part,
    Plan,
    PlanSegment,
    Spec,
    View,
)

FORMAT = 4
"""Raised when the meaning of a field changes; other numbers are refused."""

_CLASSES: dict[str, type] = {
    c.__name__: c
    for c in (
        Binding, Buffer, CallStep, Copy, DType, Home, Launch, Launches, Measure, Operand, Part, Plan, Precondition,
        PlanSegment, Spec, TypeKind, View,
    )
}  # fmt: skip
_COMPILING = frozenset({"task", "spare", "refused", "part", "over"})


def to_json(plan: Plan) -> dict[str, Json]:
    """The plan as data for `json.dumps`."""
    writer = Writer(_CLASSES, {LibraryCall: lambda call: _call(writer, call)})
    body = writer.write(plan)
    return {"format": FORMAT, "plan": body, "expressions": writer.rows}


def from_json(data: Mapping[str, Json]) -> Plan:
    """The plan that `to_json` wrote. Raises InputError for other data, and for a plan with a call that has no name."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            "this is no plan, or one of another version", phase="plan", hint="compile the model again"
        )
    try:
        reader = Reader(
            cast(Sequence[Sequence[Json]], data["expressions"]),
            _CLASSES,
            {"LibraryCall": lambda fields: _read_call(reader, fields), "private": _refuse},
        )
        plan = reader.read(data["plan"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as bad:
        raise InputError(f"the plan is damaged: {type(bad).__name__}: {bad}", phase="plan") from bad
    if not isinstance(plan, Plan):
        raise InputError("this is no plan", phase="plan")
    return plan


def _call(writer: Writer, call: LibraryCall) -> Json:
    name = op_name(call.function)
    function: Json = {"private": call.name} if name is None else name
    return {"is": "LibraryCall", "function": function, **writer.fields(call, _COMPILING | {"function"})}


def _read_call(reader: Reader, fields: Mapping[str, Json]) -> LibraryCall:
    function = fields["function"]
    if not isinstance(function, str):
        raise _private(str(cast("Mapping[str, Json]", function)["private"]))
    rest = reader.fields({k: v for k, v in fields.items() if k != "function"})
    return LibraryCall(function=_resolve(function), **rest)


def _refuse(name: object) -> object:
    raise _private(str(name))


def _private(name: str) -> InputError:
    return InputError(
        "the plan calls code that exists only in the process that compiled it", phase="plan", op=name,
        hint="compile the model in this process; with warm caches that is quick",
    )  # fmt: skip


def _resolve(name: str) -> OpOverload:
    """The op of a name. Raises InputError if this torch has none."""
    found = find_op(name)
    if found is None:
        raise InputError(
            "this torch has no such op", phase="plan", op=name, hint="load it with the torch that made it"
        )
    return found
