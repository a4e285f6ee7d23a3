"""The graph: tensors, host scalars, and ops that are tensor expressions or library calls. Frozen; a `Builder` makes it.

A captured node may become several ops; each remembers its `Origin`, so that coverage counts captured nodes and the
library call of a composite stays a candidate for exactly its region.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Flag, auto
from typing import cast

from .dtype import DType, bool_, i64
from .expr import Expr, Symbol
from .identity import LABEL, TOLD, identity
from .sizes import dims
from .task import Task
from .tensor import TensorExpr, show_tensor_expr


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor: `shape` in elements (index expressions over symbols) and element type. Identity is equality."""

    id: int = field(metadata=TOLD)
    shape: tuple[Expr, ...]
    dtype: DType

    def __repr__(self) -> str:
        return f"%{self.id}:{self.dtype}[{', '.join(map(repr, self.shape))}]"

    @property
    def numel(self) -> Expr:
        """Number of elements."""
        return dims.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Operand:
    """In the arguments of a `LibraryCall`: the op's input number `index`."""

    index: int


class Routine(ABC):
    """What a call calls that is no op of torch's registry: a dataclass, so that its fields say all there is to it."""

    @abstractmethod
    def bind(self) -> Callable[..., object]:
        """The function that runs, to be kept by whoever calls it often."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run it once."""
        return self.bind()(*args, **kwargs)


def bind(function: Callable[..., object]) -> Callable[..., object]:
    """What runs for the `function` of a call."""
    return function.bind() if isinstance(function, Routine) else function


CHECK = "check"
"""The reason of a call that only raises or does nothing."""


@dataclass(frozen=True, slots=True)
class LineAt:
    """The result is operand 0 with operand number `source` in place of one line along `dim`: the one that the single
    element of operand number `index` names. Negative numbers count from the end if they are `signed`. What is outside
    is refused. The source is as the line is, or broadcast to it; it lacks the dim where the index has none."""

    dim: int
    index: int
    source: int
    signed: bool


@dataclass(frozen=True, slots=True, eq=False)
class LibraryCall:
    """A call that is not generated. `name` is for display; `function` (an op of torch's registry, a function of
    `operator`, or a `Routine`: all of them have a name) is called with `args` and `kwargs`, in which
    `Operand`s stand for the op's inputs and `Expr`s for host scalars. `strides` are those of the results, as the
    library returns them. `reason` says why it may be called: "contraction", "convolution", "sort", "random", ... or
    "no declaration". `pure` calls may be dropped or repeated; `own` ones are code of
    ours rather than a library's.

    `task` is what providers of faster forms need to know of the call, and whether it stands for one of several that are
    offered. `wants` are the strides that it would like its operands to have (None: any). With `rows`, operand number
    `rows` and the result may have any leading dims in place of one (the result is dense). `channel` is the dim of the
    result along which a bias varies. `reuses` says whose memory the result is: an operand's by number, -1 for memory of
    its own, None if only the callable's schema tells. `bias` is the operand (the last one) that is only added along
    `channel`, and that the call may go without. `lies` are the strides that operands must have (None: any); with
    `apart`, the call addresses storage by place, and each operand needs one of its own. `seen` are those that they have
    in the program, for a call that takes any: a library may add up in another order elsewhere. `loop` is what the call
    does, if that is known step by step. `places` says which of the callable's results, counted through nested lists,
    are the op's (tensors, then the numbers that it binds); empty: the first ones. `spare` is what the program asked
    for, where this call stands in its place; `refused` says what else was offered and failed.

    A call with a `group` (None: any other call) is a collective: all processes of the group make the same ones in the
    same order, so that none is merged, dropped, repeated, run while compiling or moved past another (none is `pure`).
    One that `starts` may read its operands until another one, whose own group is empty, has waited for its results.

    With a `part`, the result is operand 0 with operand 1 in place of its elements from these places on, which lie
    inside it. `over` is called as `function` is, and does the same in the memory of operand 0: all of it or, where it
    raises, nothing. `line` says that it is one line that is replaced."""

    name: str
    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...] = ()
    strides: tuple[tuple[Expr, ...], ...] = ()
    reason: str = "no declaration"
    pure: bool = True
    task: Task | None = None
    wants: tuple[tuple[Expr, ...] | None, ...] = ()
    rows: int | None = None
    channel: int = -1
    reuses: int | None = None
    own: bool = False
    bias: int | None = None
    lies: tuple[tuple[Expr, ...] | None, ...] = ()
    seen: tuple[tuple[Expr, ...] | None, ...] = ()
    apart: bool = False
    places: tuple[int, ...] = ()
    loop: Loop | None = None
    spare: Spare | None = field(default=None, metadata=TOLD)
    refused: tuple[str, ...] = field(default=(), metadata=TOLD)
    group: str | None = None
    starts: bool = False
    part: tuple[Expr, ...] | None = None
    over: Callable[..., object] | None = None
    line: LineAt | None = None

    @property
    def is_collective(self) -> bool:
        """Whether other processes make this call too."""
        return self.group is not None

    def verify(self, inputs: Sequence[Value]) -> None:
        """Raise ValueError unless the strides of each operand are as many as its dims."""
        for known in (self.lies, self.seen):
            for v, strides in zip(inputs, known, strict=False):
                if strides is not None and len(strides) != len(v.shape):
                    raise ValueError(f"{self.name}: {strides} are no strides of {v}")


class Spare:
    """A call that does the same on the same operands, until the faster one has run once."""

    def __init__(self, call: LibraryCall) -> None:
        self.call: LibraryCall | None = call

    def release(self) -> None:
        """It is not needed any more, nor are the weights that it reads."""
        self.call = None


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """What a call does step by step: `body`, a graph whose inputs are a counter (int64, no dims, from 0), `carried`
    values, `sliced` ones, what is the same in every step, and host scalars.

    Its outputs are a bool that says whether another step follows (if `conditional`), the next carried values, and
    `stacked` ones. The operands of the call are a bool that allows the first step (if `gated`), the first carried
    values, tensors whose parts along dim 0 are the slices (the last first if `backwards`, and results are stacked in
    the same order), and the rest as they are; it is called with (steps, the bool or None, carried, sliced, the rest,
    host scalars). It gives the last carried values and what was stacked along a new dim 0. There are `steps` steps,
    at most so many if `conditional`; None: the condition alone ends the loop."""

    body: Graph
    steps: Expr | None
    carried: int
    sliced: int
    stacked: int
    conditional: bool = False
    gated: bool = False
    backwards: bool = False

    def verify(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        """Raise ValueError unless body, operands and results fit each other, and carried values keep their form."""
        self.body.verify()
        places = [v for v in self.body.inputs[1:] if isinstance(v, Value)]
        made, given = self.body.outputs[self.conditional :], inputs[self.gated :]
        self._verify_ends(inputs, places)
        if len(made) != self.carried + self.stacked or len(outputs) != len(made) or len(given) != len(places):
            raise ValueError(f"a loop of {len(given)} operands, {len(made)} and {len(outputs)} results")
        if self.steps is None and not self.conditional:
            raise ValueError("a loop without an end")
        if self.body.writes:
            raise ValueError("a loop's body writes into what it reads")
        for k, (place, v) in enumerate(zip(places, given, strict=True)):
            sliced = self.carried <= k < self.carried + self.sliced
            if place.dtype != v.dtype or not _equal(place.shape, v.shape[sliced:]):
                raise ValueError(f"a loop hands {v} to {place}")
        for k, (v, part) in enumerate(zip(outputs, made, strict=True)):
            stacked = k >= self.carried
            if (
                not isinstance(part, Value)
                or v.dtype != part.dtype
                or not _equal(v.shape[stacked:], part.shape)
            ):
                raise ValueError(f"a loop gives {part} as {v}")
            if not stacked and not (v.dtype == places[k].dtype and _equal(v.shape, places[k].shape)):
                raise ValueError(f"a loop carries {places[k]} on as {v}")

    def _verify_ends(self, inputs: Sequence[Value], places: Sequence[Value]) -> None:
        """Raise ValueError unless a step is given its number first and scalars last, and what ends the loop is a bool:
        whoever runs it has one element for each."""
        first = self.body.inputs[0] if self.body.inputs else None
        if not _is_single(first, i64) or list(self.body.inputs[1 : 1 + len(places)]) != list(places):
            raise ValueError(
                "a loop's step is given something else first than its number, or scalars between tensors"
            )
        if min(self.carried, self.sliced, self.stacked) < 0:
            raise ValueError("a loop of fewer values than none")
        ends = [*self.body.outputs[: self.conditional], *inputs[: self.gated]]
        if len(ends) != self.conditional + self.gated or not all(_is_single(v, bool_) for v in ends):
            raise ValueError("a loop is ended by something else than a bool")

    def show(self) -> str:
        """What identifies the loop, as text."""
        kind = f"{self.carried} {self.sliced} {self.stacked} {self.conditional} {self.gated} {self.backwards}"
        return f"loop {self.steps} {kind} {self.body.digest()}"


def _is_single(v: object, dtype: DType) -> bool:
    return isinstance(v, Value) and v.dtype is dtype and not v.shape


def _equal(one: Sequence[Expr], other: Sequence[Expr]) -> bool:
    return len(one) == len(other) and all(map(dims.equal, one, other))


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """One captured node: display name, place in the user's source, and its library call with inputs and outputs.
    `view` marks pure views, which coverage does not count; `node` is the name that capture gave this one."""

    id: int = field(metadata=TOLD)
    name: str = field(metadata=TOLD)
    place: str = field(default="", metadata=TOLD)
    call: LibraryCall | None = None
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    view: bool = False
    node: str = field(default="", metadata=TOLD)


EXTREMUM, INDEX = "an extremum over no elements", "an index into no elements"
PART = "a part is written with a tensor of another size"
DIVISION = "an integer is divided by zero"
"""Why a precondition is asked: what a program would do where it does not hold."""


@dataclass(frozen=True, slots=True)
class Precondition:
    """A number that must not be 0 when `op`, at `place` in the user's source, runs: the size of the dim over which it
    takes an extremum or into which it indexes, a divisor of integers, or what is 1 if two sizes are equal and 0 if not
    (see `Builder.require_equal`). Where `count`, the number of points that the op computes, is 0, nothing is asked.
    `why` is one of the reasons above, for the error."""

    size: Expr
    op: str = field(default="", metadata=TOLD)
    place: str = field(default="", metadata=TOLD)
    count: Expr | None = None
    why: str = field(default=EXTREMUM, metadata=TOLD)


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """`expr` (a tensor expression whose operand k is `inputs[k]`) or `call` (a library call): exactly one is given.
    `binds` are the symbols that a call returns as host scalars, after its tensors. `absorbed` are the origins of ops
    that a call does besides its own. Ops of equal `kernel` (if not -1) are chosen to become one kernel, of nothing
    else."""

    name: str = field(metadata=TOLD)
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    expr: TensorExpr | None = None
    call: LibraryCall | None = None
    origin: int = field(default=-1, metadata=TOLD)
    binds: tuple[Expr, ...] = ()
    absorbed: tuple[int, ...] = field(default=(), metadata=TOLD)
    kernel: int = field(default=-1, metadata=LABEL)

    @property
    def output(self) -> Value:
        """The only output."""
        (only,) = self.outputs
        return only


@dataclass(frozen=True, slots=True)
class Layout:
    """How a value lies in memory: strides in elements, per dim. (Offset and blocking are added by the phase
    that needs them.)"""

    strides: tuple[Expr, ...]


class Shares(Flag):
    """Whose memory an output of the program is: an input's; or that of another output, or of what is written into an
    input."""

    NOTHING = 0
    INPUT = auto()
    OUTPUT = auto()


@dataclass(frozen=True, slots=True)
class Share:
    """What an output shares its memory with, and the number of its storage in the program, which it has in common with
    the outputs that the program keeps in the same one."""

    kind: Shares
    storage: int


@dataclass(frozen=True, slots=True)
class Write:
    """The value is written into the storage of graph input number `input` after everything else has read it."""

    input: int
    value: Value


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """`inputs` are tensors or host scalars (an Expr, usually a symbol) in calling order; `outputs` likewise.
    `layouts` gives the strides of graph inputs and outputs (by value), and `returned` those that the caller expects, by
    place among the outputs (None: any), since one value may be returned in several forms. `constants` holds frozen
    tensors by value. `preconditions` are those that only the sizes of a call can tell."""

    inputs: tuple[Value | Expr, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value | Expr | None, ...]
    origins: tuple[Origin, ...] = field(default=(), metadata=TOLD)
    layouts: Mapping[Value, Layout] = field(default_factory=dict)
    constants: Mapping[Value, object] = field(default_factory=dict)
    writes: tuple[Write, ...] = ()
    preconditions: tuple[Precondition, ...] = ()
    returned: tuple[Layout | None, ...] = ()
    placed: tuple[tuple[int, Expr], ...] = ()
    """Inputs, by number, whose storage the program addresses by place, and the offset that they must have there."""

    def producer(self) -> dict[Value, Op]:
        """Value -> the op that makes it."""
        return {v: op for op in self.ops for v in op.outputs}

    def consumers(self) -> dict[Value, list[Op]]:
        """Value -> the ops that read it, in order."""
        out: dict[Value, list[Op]] = {}
        for op in self.ops:
            for v in dict.fromkeys(op.inputs):
                out.setdefault(v, []).append(op)
        return out

    def fresh_id(self) -> int:
        """A number above those of all values."""
        values = [v for v in self.inputs if isinstance(v, Value)]
        values += [*self.constants, *(v for op in self.ops for v in op.outputs)]
        return 1 + max((v.id for v in values), default=0)

    def kept(self) -> set[Value]:
        """Values that leave the graph: outputs and writes."""
        return {v for v in self.outputs if isinstance(v, Value)} | {w.value for w in self.writes}

    def symbols(self) -> list[Expr]:
        """Every size symbol of the graph, in order of first use."""
        found: dict[Expr, None] = {}
        values = [*self.inputs, *(v for op in self.ops for v in (*op.outputs, *op.binds))]
        for v in values:
            for e in v.shape if isinstance(v, Value) else (v,):
                found |= dict.fromkeys(dims.symbols_of(e))
        return list(found)

    def found_by_calls(self) -> dict[str, Op]:
        """The names of symbols that no input tells, with the first call that does: as sizes or numbers it gives and
        does not get itself, as a part of a larger graph may. (By name, since what is known of a symbol's range differs
        from place to place.)"""
        given = symbols_in((self.inputs, [self.layouts.get(v) for v in self.inputs if isinstance(v, Value)]))
        found: dict[str, Op] = {}
        for op in self.ops:
            if op.call is not None:
                got = symbols_in((op.inputs, op.call.args, op.call.kwargs))
                found = dict.fromkeys(symbols_in((op.outputs, op.binds)) - got - given, op) | found
        return found

    def verify(self, *, bodies: bool = True) -> None:
        """Raise ValueError unless values are defined before use, shapes and types agree with the expressions (which
        are not looked at without `bodies`)."""
        known: set[Value] = {v for v in self.inputs if isinstance(v, Value)} | set(self.constants)
        numbers = {v.id for v in known}
        if len(numbers) < len(known):
            raise ValueError("two inputs or constants have one number")
        for op in self.ops:
            if (op.expr is None) == (op.call is None):
                raise ValueError(f"{op.name}: needs exactly one of expression and library call")
            missing = [v for v in op.inputs if v not in known]
            if missing:
                raise ValueError(f"{op.name}: reads {missing} before definition")
            if op.expr is not None and bodies:
                verify_expr(op, op.expr)
            if op.call is not None and bodies:
                op.call.verify(op.inputs)
                if op.call.loop is not None:
                    op.call.loop.verify(op.inputs, op.outputs)
            if not known.isdisjoint(op.outputs):
                raise ValueError(f"{op.name}: defines a value twice")
            known.update(op.outputs)
            taken = [v for v in op.outputs if v.id in numbers]
            if taken or len({v.id for v in op.outputs}) < len(op.outputs):
                raise ValueError(f"{op.name}: gives the number of another value to {taken or op.outputs}")
            numbers.update(v.id for v in op.outputs)
        loose = [v for v in self.kept() if v not in known]
        if loose:
            raise ValueError(f"outputs {loose} are never defined")
        self._verify_layouts()

    def _verify_layouts(self) -> None:
        """Raise ValueError unless the strides of each value, and of each place that is returned, are as many as its
        dims."""
        if self.returned and len(self.returned) != len(self.outputs):
            raise ValueError(f"{len(self.returned)} layouts are returned for {len(self.outputs)} outputs")
        pairs = (*self.layouts.items(), *zip(self.outputs, self.returned, strict=False))
        for v, layout in pairs:
            if isinstance(v, Value) and layout is not None and len(layout.strides) != len(v.shape):
                raise ValueError(f"{layout} is no layout of {v}")

    def show(self) -> str:
        """The graph as text, one op a line."""
        lines = ["graph(" + ", ".join(map(repr, self.inputs)) + ")"]
        for op in self.ops:
            out = ", ".join(map(repr, op.outputs))
            ins = ", ".join(f"%{v.id}" for v in op.inputs)
            what = show_tensor_expr(op.expr) if op.expr else f"library {op.call.name if op.call else ''}"
            lines.append(f"  {out} = {op.name}({ins}) {what}")
        lines.append(
            "  return " + ", ".join(f"%{v.id}" if isinstance(v, Value) else repr(v) for v in self.outputs)
        )
        return "\n".join(lines)

    def digest(self) -> str:
        """Equal for graphs that differ only in which objects they are made of, in where ops come from, and in what
        constants hold."""
        return identity(self)

    def with_ops(self, ops: Sequence[Op], outputs: Sequence[Value | Expr | None] | None = None) -> Graph:
        """The same graph with other ops (and outputs)."""
        return replace(self, ops=tuple(ops), outputs=self.outputs if outputs is None else tuple(outputs))


def symbols_in(x: object) -> set[str]:
    """The names of all symbols in a value of the compiler, whatever field they stand in."""
    if isinstance(x, Expr):
        return {s.value.name for s in dims.symbols_of(x) if isinstance(s.value, Symbol)}
    if isinstance(x, Mapping):
        parts = [*cast(Mapping[object, object], x).items()]
    elif isinstance(x, (list, tuple)):
        parts = [*cast(Sequence[object], x)]
    elif is_dataclass(x) and not isinstance(x, type):
        parts = [getattr(x, f.name) for f in fields(x)]
    else:
        return set()
    return {s for part in parts for s in symbols_in(part)}


def verify_expr(op: Op, expr: TensorExpr) -> None:
    """Raise ValueError unless the expression is one of `op`: types, sizes, and what it reads."""
    expr.verify()
    if tuple(v.dtype for v in op.outputs) != expr.dtypes:
        raise ValueError(f"{op.name}: result types {[v.dtype for v in op.outputs]} are not {expr.dtypes}")
    for v in op.outputs:
        if v.shape != expr.shape:
            raise ValueError(f"{op.name}: shape {v.shape} is not {expr.shape}")
    for r in expr.reads():
        assert isinstance(r.value, int)
        if r.value >= len(op.inputs):
            raise ValueError(f"{op.name}: reads operand {r.value} of {len(op.inputs)}")
        if len(r.args) != len(op.inputs[r.value].shape) or r.dtype != op.inputs[r.value].dtype:
            raise ValueError(f"{op.name}: {r} does not fit {op.inputs[r.value]}")
