"""Values of a plan as JSON, and back: sizes, steps, library calls, each of a closed list of classes and functions.

A call calls an op of torch's registry, a function of `operator`, or a routine that `routines` lists; nothing else has
a name here, and no name is ever looked up in a module."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any, TypeVar, cast

from torch import Tensor
from torch._ops import OpOverload

from tilewright.artifact.file.strict_json import damaged
from tilewright.errors import ArtifactError, TilewrightError, UnsupportedError
from tilewright.ir.dtype import DTYPES, DType
from tilewright.ir.dtype import Kind as TypeKind
from tilewright.ir.graph import LibraryCall, Operand, Precondition, Routine
from tilewright.ir.task import Attention
from tilewright.ir.text.values import Json, Reader, Writer, find_op, op_name
from tilewright.plan.data import (
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
from tilewright.runtime.loops.call import LoopRunner

from .routines import KeepLoop, Raw, Routines, name_of, no_loops, written
from .tensors import TensorReader, TensorWriter
from .typed import check_types

T = TypeVar("T")
_CLASSES: Mapping[str, type] = {
    c.__name__: c
    for c in (
        Attention, Binding, Buffer, CallStep, Copy, Home, Launch, Launches, Measure, Operand, Part, Plan, PlanSegment,
        Precondition, Spec, View,
    )
}  # fmt: skip
_COMPILING = frozenset({"task", "spare", "refused", "loop", "function", "over", "line"})
"""What only compiling needs of a call."""
_OPERATORS: Mapping[str, Callable[..., object]] = {
    f.__name__: f
    for f in (
        operator.getitem, operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
        operator.neg, operator.abs, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
        operator.and_, operator.or_, operator.not_,
    )
}  # fmt: skip
"""Functions that compute, and do nothing else."""


class CallWriter:
    """Writes values. Raises UnsupportedError for a call that only this process can make, and names it."""

    def __init__(self, tensors: TensorWriter, loops: KeepLoop = no_loops) -> None:
        """`loops` writes what runs a loop, and gives the name under which it is found."""
        self.tensors = tensors
        self._loops = loops
        self._what = "the plan"
        special: dict[type, Callable[[Any], Json]] = {
            DType: _dtype,
            LibraryCall: self._call,
            Raw: lambda raw: {"raw": raw.value},
            Tensor: lambda t: {"tensor": tensors.place(t, self._what)},
        }
        self._plain = Writer(_CLASSES, special, self._refuse)

    @property
    def rows(self) -> list[Json]:
        """The expressions that values refer to."""
        return self._plain.rows

    def write(self, x: object, what: str = "the plan") -> Json:
        """A value; `what` names it for errors."""
        self._what = what
        return self._plain.write(x)

    def _refuse(self, x: object) -> Json:
        raise UnsupportedError(
            f"{self._what} holds a {type(x).__name__}, which an artifact cannot hold",
            phase="save",
            op=self._what,
            hint="compile the model where it runs (warm caches make that quick)",
        )

    def _call(self, call: LibraryCall) -> Json:
        before, self._what = self._what, call.name
        made: Json = {
            "is": "LibraryCall",
            "calls": self._function(call.function, call.name)
            if call.loop is None
            else {"loop": self._loops(call)},
            "in place": call.function is call.over,
            **self._plain.fields(call, _COMPILING),
        }
        self._what = before
        return made

    def _function(self, function: Callable[..., object], name: str) -> Json:
        if (op := op_name(function)) is not None:
            return {"op": op}
        if isinstance(function, BuiltinFunctionType) and _OPERATORS.get(function.__name__) is function:
            return {"operator": function.__name__}
        kind = name_of(function) if isinstance(function, Routine) else None
        if kind is None:
            raise UnsupportedError(
                f"{name} calls {type(function).__qualname__}, which exists only in the process that compiled it",
                phase="save", op=name, hint="compile the model where it runs (warm caches make that quick)",
            )  # fmt: skip
        inner = lambda f: self._function(f, name)  # noqa: E731
        return {"routine": kind, "fields": self._plain.write(written(cast(Routine, function), inner))}


class CallReader:
    """Reads values that a `CallWriter` wrote. Raises ArtifactError for other data."""

    def __init__(self, rows: Json, tensors: TensorReader, routines: Routines, place: str) -> None:
        self._place = place
        self._routines = routines
        special: dict[str, Callable[[Any], object]] = {
            "type": lambda name: DTYPES[name],
            "other type": lambda row: DType(str(row[0]), int(row[1]), TypeKind(row[2])),
            "tensor": tensors.__getitem__,
            "LibraryCall": self._call,
            "raw": lambda value: value,
        }
        self._plain = guarded(
            lambda: Reader(cast("Sequence[Sequence[Json]]", rows), _CLASSES, special), place
        )

    def read(self, x: Json, annotation: object) -> Any:
        """The value, which is of the annotated type through and through."""

        def checked() -> object:
            value = self._plain.read(x)
            check_types(value, annotation)
            return value

        return guarded(checked, self._place)

    def _call(self, fields: Mapping[str, Json]) -> LibraryCall:
        function = self._function(fields["calls"])
        rest = self._plain.fields({k: v for k, v in fields.items() if k not in ("calls", "in place")})
        if isinstance(function, LoopRunner):
            check_operands(function, rest.get("args"))
        if _COMPILING & rest.keys():
            raise ValueError("a call says what only compiling needs")
        return LibraryCall(function=function, over=function if fields["in place"] is True else None, **rest)

    def _function(self, told: Json) -> Callable[..., object]:
        found: object = None
        match told:
            case {"loop": str(name)}:
                return self._routines.loop(name)
            case {"op": str(name)}:
                found = find_op(name)
            case {"operator": str(name)}:
                found = _OPERATORS.get(name)
            case {"routine": str(name), "fields": fields}:
                found = self._routines.read(
                    name, cast("Mapping[str, Any]", self._plain.read(fields)), self._function
                )
            case _:
                pass
        if not isinstance(found, (OpOverload, BuiltinFunctionType, Routine)):
            raise ArtifactError(
                "it calls something that is not on the list of what artifacts may call", op=str(told)[:80],
                place=self._place, hint="import what registers the op, or make it again with this version",
            )  # fmt: skip
        return cast("Callable[..., object]", found)


def check_operands(runner: LoopRunner, args: object) -> None:
    """Raise ValueError unless the arguments of a loop's call are as many as its steps take."""
    loop = runner.loop
    match args:
        case (_, None | Operand() as gate, [*carried], [*sliced], [*outer], [*numbers]):
            given = 1 + len(carried) + len(sliced) + len(outer) + len(numbers)
            if (gate is None) is loop.gated or len(carried) != loop.carried or len(sliced) != loop.sliced:
                raise ValueError("a loop is given other operands than it takes")
            if given != len(runner.executable.plan.inputs):
                raise ValueError("the steps of a loop take other operands than it is given")
        case _:
            raise ValueError("a loop is called otherwise")


def guarded(act: Callable[[], T], place: str) -> T:
    """What `act` gives. What Python raises of data in another form becomes an ArtifactError."""
    try:
        return act()
    except TilewrightError as error:
        if isinstance(error, ArtifactError):
            raise
        raise damaged(error.message, place) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as bad:
        raise damaged(f"{type(bad).__name__}: {str(bad)[:200]}", place) from bad


def _dtype(of: DType) -> Json:
    known = DTYPES.get(of.name) is of
    return {"type": of.name} if known else {"other type": [of.name, of.bytes, of.kind.value]}
