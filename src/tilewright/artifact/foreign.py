"""A graph of a file that nobody vouches for, made harmless: whatever it says, what is built of it reads and writes
nothing but its own tensors.

It is data that somebody else has written, and its sizes, names and promises may be lies. So nothing in it is believed
that is not proved here or looked at when it runs:

- every node of an expression is one that the language has, with numbers as leaves;
- names that reach generated code are ours; sizes have the ranges that inputs are held against;
- an index that is not proved to lie inside its tensor is held inside; no divisor may be zero;
- reductions are among those that this package declares;
- calls are of functional ops of torch, on tensors and numbers, without promises of what they do."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tilewright.analysis.size_hints import SizeHints
from tilewright.artifact.op_by_op import loop_in_torch
from tilewright.artifact.text.program import Interface
from tilewright.artifact.text.tensors import spread_bytes
from tilewright.capture.harmless.ops import is_safe_op, takes_only_numbers
from tilewright.errors import ArtifactError, TilewrightError
from tilewright.ir import reduction as reductions
from tilewright.ir.dtype import DTYPES, DType, Kind, bool_, f32
from tilewright.ir.expr import (
    Axis,
    Expr,
    Symbol,
    axis,
    symbol,
    transform,
)
from tilewright.ir.graph import (
    DIVISION,
    EXTREMUM,
    INDEX,
    PART,
    Graph,
    Layout,
    LibraryCall,
    Loop,
    Op,
    Operand,
    Origin,
    Value,
)
from tilewright.ir.ops.scan import latest
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.pipeline.state import CapturedProgram
from tilewright.runtime.plan.tensors import torch_dtype
from tilewright.tuning.input_limits import ARTIFACTS, MODEL_FILES, MODELS

from .foreign_expressions import (
    SYMBOL,
    ReadsInside,
    Unsafe,
    check_divisions,
    check_node,
    nodes_of,
    plain_name,
)

_ANY_NUMBER = (-(1 << 63), None)
"""The range of a number that comes from data."""


def harmless(program: CapturedProgram, place: str) -> CapturedProgram:
    """The program with all that was not proved taken out. Raises ArtifactError where that leaves nothing to run."""
    with _proving(place):
        graph = _Harmless(program.graph).graph()
        graph.verify()
        return replace(program, graph=graph, traced=_likely(program.traced))
    raise AssertionError


def harmless_interface(made: Interface, graph: Graph, place: str) -> Interface:
    """How a harmless graph is called, with conditions over its sizes alone and tensors that take no more memory than
    a file may ask for. Raises ArtifactError for others."""
    with _proving(place):
        _check_spread(t for _, t in made.form.given if t is not None)
        conditions = _Harmless(graph).conditions(made.conditions)
        return replace(made, conditions=conditions)
    raise AssertionError


@contextmanager
def _proving(place: str) -> Generator[None]:
    """Make an ArtifactError of what cannot be proved, whatever fails on the way."""
    try:
        yield
    except _UNPROVED as bad:
        raise ArtifactError(
            f"its graph is not proved harmless: {str(bad)[:200]}", place=place,
            hint="load it with trust=True if you trust who made it",
        ) from bad  # fmt: skip


_UNPROVED = (
    Unsafe, TilewrightError, ValueError, TypeError, AttributeError, AssertionError, LookupError, ArithmeticError,
    RuntimeError,
)  # fmt: skip
"""What is raised of a graph that nobody vouches for. A nesting that is too deep for Python is a RuntimeError."""


def _likely(traced: SizeHints) -> SizeHints:
    """The sizes that a graph was traced with, as far as they may be some."""
    largest = MODEL_FILES.max_tensor_elements
    return SizeHints(
        {name: n for name, n in traced.sizes.items() if SYMBOL.fullmatch(name) and 0 <= n <= largest}
    )


def _check_spread(tensors: Iterable[Tensor]) -> None:
    """Raise Unsafe where tensors, made dense, would take much more memory than the file."""
    if sum(map(spread_bytes, tensors)) > ARTIFACTS.max_spread_bytes:
        raise Unsafe("its tensors are larger than what it holds of them")


class _Harmless:
    """Makes one graph harmless."""

    def __init__(self, graph: Graph, around: Mapping[str, tuple[int, int | None]] | None = None) -> None:
        """`around`: the ranges of symbols that have one where the graph is the body of a loop."""
        if len(graph.ops) > MODELS.max_file_nodes:
            raise Unsafe(f"{len(graph.ops)} ops are too many")
        self._given = graph
        self._memo: dict[Expr, Expr] = {}
        self._values: dict[Value, Value] = {}
        self._ranges: dict[str, tuple[int, int | None]] = {}
        for e in _sizes_of_inputs(graph):
            for s in (x.value for x in nodes_of(e) if isinstance(x.value, Symbol)):
                low, high = self._ranges.get(s.name, (s.low, s.high))
                wide = None if high is None or s.high is None else max(high, s.high)
                # Nothing divides by a size of 0 then. A call with such a size is refused.
                self._ranges[s.name] = max(1, min(low, s.low)), wide

        for at in graph.layouts.values():
            for name in _names(at.strides):
                self._ranges.setdefault(name, (0, None))  # a step that an input tells: torch has none below 0
        numbers = {n for op in graph.ops for n in _names(op.binds)}
        for name in {n for op in graph.ops for v in op.outputs for n in _names(v.shape)} - numbers:
            self._ranges.setdefault(name, (0, None))  # a size that a call tells
        self._ranges |= around or {}

    def graph(self) -> Graph:
        """The graph, of the same meaning if it was an honest one."""
        given = self._given
        inputs = tuple(self._value(v) if isinstance(v, Value) else self._size(v) for v in given.inputs)
        _check_spread(t for t in given.constants.values() if isinstance(t, Tensor))
        constants = {self._value(v): _constant(v, t) for v, t in given.constants.items()}
        ops = tuple(self._op(op) for op in given.ops)
        outputs = tuple(
            self._value(v) if isinstance(v, Value) else v if v is None else self._size(v)
            for v in given.outputs
        )
        for number in (*(w.input for w in given.writes), *(k for k, _ in given.placed)):
            if not 0 <= number < len(inputs) or not isinstance(inputs[number], Value):
                raise Unsafe(f"there is no input {number}")
        kept = {v for v in given.inputs if isinstance(v, Value)}
        return Graph(
            inputs,
            ops,
            outputs,
            tuple(
                Origin(k, plain_name(o.name), plain_name(o.place), view=bool(o.view))
                for k, o in enumerate(given.origins)
            ),
            {self._value(v): self._layout(at) for v, at in given.layouts.items() if v in kept},
            constants,
            tuple(replace(w, value=self._value(w.value)) for w in given.writes),
            tuple(
                replace(
                    p,
                    size=self._size(p.size),
                    op=plain_name(p.op),
                    place=plain_name(p.place),
                    count=None if p.count is None else self._size(p.count),
                    why=p.why if p.why in (DIVISION, EXTREMUM, INDEX, PART) else EXTREMUM,
                )
                for p in given.preconditions
            ),
            tuple(None if at is None else self._layout(at) for at in given.returned),
            tuple((k, self._size(e)) for k, e in given.placed),
        )

    def conditions(self, given: Sequence[Expr]) -> tuple[Expr, ...]:
        """Conditions that only read sizes of the graph."""
        for c in given:
            unknown = set(_names([c])) - self._ranges.keys()
            if c.dtype is not bool_ or unknown:
                raise Unsafe(f"a condition on {sorted(unknown)}")
        return tuple(map(self._size, given))

    # --- parts ---

    def _value(self, v: Value) -> Value:
        if v not in self._values:
            if DTYPES.get(v.dtype.name) is not v.dtype and v.dtype.kind is not Kind.OPAQUE:
                raise Unsafe(f"{v.dtype} is no type")
            torch_dtype(v.dtype)
            self._values[v] = Value(int(v.id), tuple(map(self._size, v.shape)), v.dtype)
        return self._values[v]

    def _layout(self, at: Layout) -> Layout:
        return Layout(self._strides(at.strides))

    def _strides(self, given: Sequence[Expr]) -> tuple[Expr, ...]:
        """Steps that no tensor of torch's has would be believed of it, and lead in front of it or far behind it."""
        strides = tuple(map(self._size, given))
        for s in strides:
            fixed = dims.static(s)
            if not dims.at_least(s, 0) or (fixed is not None and fixed > MODEL_FILES.max_shape_product):
                raise Unsafe(f"{s} is no step of a tensor")
        return strides

    def _size(self, e: Expr) -> Expr:
        """A size, which reads nothing."""
        if any(x.op in ("read", "axis") for x in nodes_of(e)):
            raise Unsafe(f"{e} is no size")
        return self._expr(e)

    def _expr(self, e: Expr) -> Expr:
        """An expression with the symbols that inputs have."""
        for x in nodes_of(e):
            check_node(x)
        made = transform(e, self._renamed, self._memo)
        check_divisions(made)
        return made

    def _renamed(self, x: Expr) -> Expr | None:
        if not isinstance(x.value, Symbol):
            return None
        return symbol(x.value.name, *self._ranges.get(x.value.name, _ANY_NUMBER))

    def _op(self, op: Op) -> Op:
        inputs, outputs = tuple(map(self._value, op.inputs)), tuple(map(self._value, op.outputs))
        origin = op.origin if 0 <= op.origin < len(self._given.origins) else -1
        binds = tuple(map(self._size, op.binds))
        made = Op(plain_name(op.name), inputs, outputs, origin=origin, binds=binds)
        if op.expr is not None:
            return replace(made, expr=self._tensor_expr(op.expr, inputs))
        if op.call is None:
            raise Unsafe("an op without a meaning")
        if op.call.loop is not None:
            return replace(made, call=self._loop(op.call, op.call.loop, inputs))
        return replace(made, call=self._call(op.call, len(inputs)))

    # --- tensor expressions ---

    def _tensor_expr(self, given: TensorExpr, inputs: Sequence[Value]) -> TensorExpr:
        if given.reduction is not None and given.reduction not in _declared():
            raise Unsafe(f"{plain_name(given.reduction.name)} is no declared reduction")
        names = [*(f"i{k}" for k in range(len(given.axes))), *(f"r{k}" for k in range(len(given.reduce)))]
        axes = (*given.axes, *given.reduce)
        if len({a.name for a in axes}) < len(axes) or (
            given.scan is not None and given.scan not in given.axes
        ):
            raise Unsafe("axes that are not told apart")
        new = {a: Axis(name, self._size(a.extent)) for a, name in zip(axes, names, strict=True)}
        table = {axis(a): axis(b) for a, b in new.items()}

        def renamed(x: Expr) -> Expr | None:
            return table.get(x) or self._renamed(x)

        memo: dict[Expr, Expr] = {}
        body: list[Expr] = []
        for b in given.body:
            for x in nodes_of(b):
                check_node(x)
            if any(x.op == "axis" and x not in table for x in nodes_of(b)):
                raise Unsafe("an axis that is not declared")
            made = transform(b, renamed, memo)
            check_divisions(made)
            body.append(ReadsInside(made, inputs).held(made, ()))
        return TensorExpr(
            tuple(new[a] for a in given.axes), tuple(body), tuple(new[a] for a in given.reduce), given.reduction,
            None if given.scan is None else new[given.scan],
        )  # fmt: skip

    # --- calls ---

    def _call(self, call: LibraryCall, operands: int) -> LibraryCall:
        """A call without promises: what it gives is looked at when it runs."""
        if call.group is not None or call.starts:
            raise Unsafe(f"{plain_name(call.name)} needs other processes")
        if not is_safe_op(call.function, apart=call.apart is True):
            raise Unsafe(
                f"{plain_name(call.name)} is no functional op of torch's own that looks at what it is given"
            )
        args, kwargs = (
            self._argument(call.args, operands),
            self._argument([v for _, v in call.kwargs], operands),
        )
        assert isinstance(args, tuple) and isinstance(kwargs, list)
        if takes_only_numbers(call.function) and any(
            isinstance(a, (str, list, tuple))
            for a in (*args, *kwargs)  # pyright: ignore[reportUnknownVariableType]
        ):
            raise Unsafe(f"{plain_name(call.name)} is given no numbers")
        names = [str(name) for name, _ in call.kwargs]
        return LibraryCall(
            plain_name(call.name), call.function, args, tuple(zip(names, kwargs, strict=True)),  # pyright: ignore[reportUnknownArgumentType]
            strides=tuple(map(self._strides, call.strides)), reason=_reason(call.reason), pure=False,
            lies=tuple(None if s is None else self._strides(s) for s in call.lies), apart=bool(call.apart),
            places=tuple(int(p) for p in call.places if p >= 0),
        )  # fmt: skip

    def _loop(self, call: LibraryCall, given: Loop, inputs: Sequence[Value]) -> LibraryCall:
        """A loop whose steps are harmless, called as what it says of itself asks for."""
        match call.args:
            case (_, None | Operand(), [*_], [*_], [*_], [*told]):
                numbers = tuple(self._size(e) if isinstance(e, Expr) else self._scalar(e) for e in told)
            case _:
                raise Unsafe("a loop is called otherwise")
        body, first = given.body, given.gated + given.carried + given.sliced
        scalars = [e for e in body.inputs if isinstance(e, Expr)]
        if len(scalars) != len(numbers) or not given.gated <= first <= len(inputs) or body.preconditions:
            raise Unsafe("a loop is given other numbers than its steps take")
        around = dict(self._ranges)
        for e, number in zip(scalars, numbers, strict=True):
            if not isinstance(e.value, Symbol) or SYMBOL.fullmatch(str(e.value.name)) is None:
                raise Unsafe(f"{e} is no number of a loop")
            name = e.value.name
            same = isinstance(number, Expr) and isinstance(number.value, Symbol) and number.value.name == name
            if not same and name in around:
                raise Unsafe(f"{name} is one number in a loop, and another one around it")
            around.setdefault(name, _ANY_NUMBER)
        inside = _Harmless(body, around).body()
        steps = None if given.steps is None else self._size(given.steps)
        loop = replace(given, body=inside, steps=steps)
        places = list(map(Operand, range(len(inputs))))
        sliced = places[given.gated + given.carried : first]
        for k in sliced:
            if steps is None or not dims.at_least(dims.sub(inputs[k.index].shape[0], steps), 0):
                raise Unsafe("a loop may take more parts of a tensor than it has")
        return LibraryCall(
            "loop", loop_in_torch(loop),
            (
                steps, places[0] if given.gated else None, places[given.gated : given.gated + given.carried], sliced,
                places[first:], list(numbers),
            ),
            reason="loop", pure=False, reuses=-1, lies=tuple(dims.dense_strides(v.shape) for v in inputs), loop=loop,
        )  # fmt: skip

    def body(self) -> Graph:
        """The graph as what a step runs, which finds all that it is given dense."""
        made = self.graph()
        if made.writes or made.placed or any(not isinstance(v, Value) for v in made.outputs):
            raise Unsafe("a step writes, or gives what is no tensor")
        shown = [v for v in (*made.inputs, *made.outputs) if isinstance(v, Value) and v not in made.constants]
        return replace(
            made, layouts={v: Layout(dims.dense_strides(v.shape)) for v in shown}, returned=(),
        )  # fmt: skip

    def _scalar(self, a: object) -> object:
        """A number as it stands."""
        if type(a) not in (bool, int, float):
            raise Unsafe("a loop is given what is no number")
        return a

    def _argument(self, a: object, operands: int) -> object:
        match a:
            case Operand():
                if not 0 <= a.index < operands:
                    raise Unsafe(f"there is no operand {a.index}")
                return a
            case Expr():
                return self._size(a)
            case list():
                return [self._argument(x, operands) for x in a]  # pyright: ignore[reportUnknownVariableType]
            case tuple():
                return tuple(self._argument(x, operands) for x in a)  # pyright: ignore[reportUnknownVariableType]
            case None | bool() | int() | float() | complex() | str():
                return a
            case torch.dtype() | torch.layout() | torch.memory_format():
                return a
            case torch.device() if a.type == "cpu":
                return a
            case _:
                raise Unsafe(f"a call is given a {type(a).__name__}")


def _sizes_of_inputs(graph: Graph) -> Iterable[Expr]:
    for v in graph.inputs:
        yield from v.shape if isinstance(v, Value) else (v,)


def _names(sizes: Iterable[Expr]) -> Iterable[str]:
    return [x.value.name for e in sizes for x in nodes_of(e) if isinstance(x.value, Symbol)]


def _declared() -> frozenset[Reduction]:
    """The reductions that captured graphs may have."""
    of_type: tuple[Callable[[DType], Reduction], ...] = (
        reductions.sum_, reductions.product, reductions.maximum, reductions.minimum, reductions.argmax,
        reductions.argmin,
    )  # fmt: skip
    numbers = list(DTYPES.values())
    found = [make_(t) for make_ in of_type for t in numbers]
    found += [f(t) for f in (reductions.moments, reductions.logsumexp) for t in (f32, DTYPES["f64"])]
    found += [latest(t, better) for better in ("ge", "le") for t in numbers]
    return frozenset([*found, reductions.any_(), reductions.all_()])


def _constant(v: Value, t: object) -> Tensor:
    """A constant as its value promises it: dense."""
    shape = tuple(dims.static(n) for n in v.shape)
    if not isinstance(t, Tensor) or t.dtype is not torch_dtype(v.dtype) or tuple(t.shape) != shape:
        raise Unsafe(f"{v} is another tensor")
    return t.contiguous()


_REASONS = frozenset({"contraction", "convolution", "attention", "sort", "random", "check", "no declaration"})


def _reason(text: str) -> str:
    return text if text in _REASONS else "no declaration"
