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

import math
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from tilewright.analysis.runtime_checks import from_data, inside_of
from tilewright.analysis.size_hints import SizeHints
from tilewright.artifact.text.program import Interface
from tilewright.artifact.text.tensors import spread_bytes
from tilewright.capture.safe_ops import is_safe_op, takes_only_numbers
from tilewright.errors import ArtifactError, TilewrightError
from tilewright.ir import reduction as reductions
from tilewright.ir.dtype import DTYPES, DType, Kind, bool_, f32, i64
from tilewright.ir.expr import (
    OF_PROGRAM,
    SCALARS,
    Axis,
    Expr,
    Symbol,
    axis,
    conjuncts,
    make,
    symbol,
    transform,
    walk,
)
from tilewright.ir.graph import Graph, Layout, LibraryCall, Op, Operand, Origin, Value
from tilewright.ir.ops.scan import latest
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.pipeline.state import CapturedProgram
from tilewright.runtime.plan.tensors import torch_dtype
from tilewright.tuning.input_limits import ARTIFACTS, MODEL_FILES, MODELS

_SYMBOL = re.compile(r"[su][0-9]{1,9}")
_UNTOLD = re.compile(r"[^A-Za-z0-9_.:]")
_ANY_NUMBER = (-(1 << 63), None)
"""The range of a number that comes from data."""
_DIVISIONS = frozenset({"floordiv", "mod", "truncdiv", "fmod"})


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


class _Harmful(Exception):
    """What cannot be made harmless."""


_UNPROVED = (
    _Harmful, TilewrightError, ValueError, TypeError, AttributeError, AssertionError, LookupError, ArithmeticError,
    RuntimeError,
)  # fmt: skip
"""What is raised of a graph that nobody vouches for. A nesting that is too deep for Python is a RuntimeError."""


def _likely(traced: SizeHints) -> SizeHints:
    """The sizes that a graph was traced with, as far as they may be some."""
    largest = MODEL_FILES.max_tensor_elements
    return SizeHints(
        {name: n for name, n in traced.sizes.items() if _SYMBOL.fullmatch(name) and 0 <= n <= largest}
    )


def _check_spread(tensors: Iterable[Tensor]) -> None:
    """Raise _Harmful where tensors, made dense, would take much more memory than the file."""
    if sum(map(spread_bytes, tensors)) > ARTIFACTS.max_spread_bytes:
        raise _Harmful("its tensors are larger than what it holds of them")


class _Harmless:
    """Makes one graph harmless."""

    def __init__(self, graph: Graph) -> None:
        if len(graph.ops) > MODELS.max_file_nodes:
            raise _Harmful(f"{len(graph.ops)} ops are too many")
        self._given = graph
        self._memo: dict[Expr, Expr] = {}
        self._values: dict[Value, Value] = {}
        self._ranges: dict[str, tuple[int, int | None]] = {}
        for e in _sizes_of_inputs(graph):
            for s in (x.value for x in _nodes(e) if isinstance(x.value, Symbol)):
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
                raise _Harmful(f"there is no input {number}")
        kept = {v for v in given.inputs if isinstance(v, Value)}
        return Graph(
            inputs,
            ops,
            outputs,
            tuple(
                Origin(k, _name(o.name), _name(o.place), view=bool(o.view))
                for k, o in enumerate(given.origins)
            ),
            {self._value(v): self._layout(at) for v, at in given.layouts.items() if v in kept},
            constants,
            tuple(replace(w, value=self._value(w.value)) for w in given.writes),
            tuple(
                replace(p, size=self._size(p.size), op=_name(p.op), place=_name(p.place))
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
                raise _Harmful(f"a condition on {sorted(unknown)}")
        return tuple(map(self._size, given))

    # --- parts ---

    def _value(self, v: Value) -> Value:
        if v not in self._values:
            if DTYPES.get(v.dtype.name) is not v.dtype and v.dtype.kind is not Kind.OPAQUE:
                raise _Harmful(f"{v.dtype} is no type")
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
                raise _Harmful(f"{s} is no step of a tensor")
        return strides

    def _size(self, e: Expr) -> Expr:
        """A size, which reads nothing."""
        if any(x.op in ("read", "axis") for x in _nodes(e)):
            raise _Harmful(f"{e} is no size")
        return self._expr(e)

    def _expr(self, e: Expr) -> Expr:
        """An expression with the symbols that inputs have."""
        for x in _nodes(e):
            _check_node(x)
        made = transform(e, self._renamed, self._memo)
        _check_divisions(made)
        return made

    def _renamed(self, x: Expr) -> Expr | None:
        if not isinstance(x.value, Symbol):
            return None
        return symbol(x.value.name, *self._ranges.get(x.value.name, _ANY_NUMBER))

    def _op(self, op: Op) -> Op:
        inputs, outputs = tuple(map(self._value, op.inputs)), tuple(map(self._value, op.outputs))
        origin = op.origin if 0 <= op.origin < len(self._given.origins) else -1
        binds = tuple(map(self._size, op.binds))
        made = Op(_name(op.name), inputs, outputs, origin=origin, binds=binds)
        if op.expr is not None:
            return replace(made, expr=self._tensor_expr(op.expr, inputs))
        if op.call is None:
            raise _Harmful("an op without a meaning")
        return replace(made, call=self._call(op.call, len(inputs)))

    # --- tensor expressions ---

    def _tensor_expr(self, given: TensorExpr, inputs: Sequence[Value]) -> TensorExpr:
        if given.reduction is not None and given.reduction not in _declared():
            raise _Harmful(f"{_name(given.reduction.name)} is no declared reduction")
        names = [*(f"i{k}" for k in range(len(given.axes))), *(f"r{k}" for k in range(len(given.reduce)))]
        axes = (*given.axes, *given.reduce)
        if len({a.name for a in axes}) < len(axes) or (
            given.scan is not None and given.scan not in given.axes
        ):
            raise _Harmful("axes that are not told apart")
        new = {a: Axis(name, self._size(a.extent)) for a, name in zip(axes, names, strict=True)}
        table = {axis(a): axis(b) for a, b in new.items()}

        def renamed(x: Expr) -> Expr | None:
            return table.get(x) or self._renamed(x)

        memo: dict[Expr, Expr] = {}
        body: list[Expr] = []
        for b in given.body:
            for x in _nodes(b):
                _check_node(x)
            if any(x.op == "axis" and x not in table for x in _nodes(b)):
                raise _Harmful("an axis that is not declared")
            made = transform(b, renamed, memo)
            _check_divisions(made)
            body.append(_Inside(made, inputs).held(made, ()))
        return TensorExpr(
            tuple(new[a] for a in given.axes), tuple(body), tuple(new[a] for a in given.reduce), given.reduction,
            None if given.scan is None else new[given.scan],
        )  # fmt: skip

    # --- calls ---

    def _call(self, call: LibraryCall, operands: int) -> LibraryCall:
        """A call without promises: what it gives is looked at when it runs."""
        if call.loop is not None or call.group is not None or call.starts:
            raise _Harmful(f"{_name(call.name)} is a loop or needs other processes")
        if not is_safe_op(call.function, apart=call.apart is True):
            raise _Harmful(
                f"{_name(call.name)} is no functional op of torch's own that looks at what it is given"
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
            raise _Harmful(f"{_name(call.name)} is given no numbers")
        names = [str(name) for name, _ in call.kwargs]
        return LibraryCall(
            _name(call.name), call.function, args, tuple(zip(names, kwargs, strict=True)),  # pyright: ignore[reportUnknownArgumentType]
            strides=tuple(map(self._strides, call.strides)), reason=_reason(call.reason), pure=False,
            lies=tuple(None if s is None else self._strides(s) for s in call.lies), apart=bool(call.apart),
            places=tuple(int(p) for p in call.places if p >= 0),
        )  # fmt: skip

    def _argument(self, a: object, operands: int) -> object:
        match a:
            case Operand():
                if not 0 <= a.index < operands:
                    raise _Harmful(f"there is no operand {a.index}")
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
                raise _Harmful(f"a call is given a {type(a).__name__}")


def _check_divisions(e: Expr) -> None:
    """Raise _Harmful where a divisor may be zero. One that comes from data is tested when it runs."""
    for x in walk(e):
        if (
            x.op in _DIVISIONS
            and not x.dtype.is_float
            and not from_data(x.args[1])
            and not dims.at_least(x.args[1], 1)
        ):
            raise _Harmful(f"{x} may divide by zero")


class _Inside:
    """Moves the reads of one expression to places inside of their tensors."""

    def __init__(self, whole: Expr, inputs: Sequence[Value]) -> None:
        self._inputs = inputs
        self._reading: set[Expr] = set()
        for x in walk(whole):
            if x.op == "read" or not self._reading.isdisjoint(x.args):
                self._reading.add(x)
        self._made: dict[tuple[Expr, tuple[Expr, ...]], Expr] = {}

    def held(self, e: Expr, known: tuple[Expr, ...]) -> Expr:
        """A part of the expression with each read inside, under conditions that are `known` to hold."""
        if e not in self._reading:
            return e
        found = self._made.get((e, known))
        if found is None:
            if len(self._made) > ARTIFACTS.max_expression_nodes:
                raise _Harmful("an expression has too many parts")
            found = self._made[e, known] = self._moved(e, known)
        return found

    def _moved(self, e: Expr, known: tuple[Expr, ...]) -> Expr:
        if e.op == "read":
            assert isinstance(e.value, int)
            if not 0 <= e.value < len(self._inputs) or len(e.args) != len(self._inputs[e.value].shape):
                raise _Harmful(f"{e} reads no operand")
            index = [self.held(i, known) for i in e.args]
            shape = self._inputs[e.value].shape
            places = tuple(_place(i, n, known) for i, n in zip(index, shape, strict=True))
            return make("read", places, e.dtype, e.value)
        if e.op == "where":
            condition = self.held(e.args[0], known)
            yes = self.held(e.args[1], (*known, *conjuncts(condition)))
            return _again(e, (condition, yes, self.held(e.args[2], known)))
        return _again(e, tuple(self.held(a, known) for a in e.args))


def _again(e: Expr, args: tuple[Expr, ...]) -> Expr:
    return e if args == e.args else make(e.op, args, e.dtype, e.value)


def _place(i: Expr, size: Expr, known: tuple[Expr, ...]) -> Expr:
    """An index inside a dim of `size`. One that comes from data is tested when it runs."""
    missing = inside_of(i, size)
    if missing is None or from_data(i) or set(conjuncts(missing)) <= set(known):
        return i
    if not dims.at_least(size, 1):
        raise _Harmful(f"{i} may lie outside of {size} elements")
    return dims.minimum(dims.maximum(i, dims.ZERO), dims.sub(size, dims.ONE))


def _check_node(x: Expr) -> None:
    """Raise _Harmful unless a node is one of the language."""
    if DTYPES.get(x.dtype.name) is not x.dtype:
        raise _Harmful(f"{x.dtype} is no type of an element")
    match x.op:
        case "const":
            whole = type(x.value) in (bool,) if x.dtype.kind is Kind.BOOL else type(x.value) is int
            whole = type(x.value) in (float, Fraction) if x.dtype.is_float else whole
            good = (
                whole and not x.args and (not isinstance(x.value, Fraction) or math.isfinite(float(x.value)))
            )
        case "symbol":
            good = isinstance(x.value, Symbol) and _is_size(x.value) and not x.args and x.dtype is i64
        case "axis":
            good = isinstance(x.value, Axis) and not x.args and x.dtype is i64
        case "read":
            good = type(x.value) is int and all(a.dtype is i64 for a in x.args)
        case _:
            rule = SCALARS.get(x.op)
            good = rule is not None and rule.arity == len(x.args) and x.value in (None, OF_PROGRAM)
            good = good and _fits(x, rule.result if rule is not None else "")
    if not good:
        raise _Harmful(f"{_name(x.op)} {_name(x.value)} is no node of an expression")


def _is_size(s: Symbol) -> bool:
    ends = type(s.low) is int and (s.high is None or (type(s.high) is int and s.high >= s.low))
    return type(s.name) is str and _SYMBOL.fullmatch(s.name) is not None and ends


def _fits(x: Expr, result: str) -> bool:
    """Whether the types of a node are those that its operation has."""
    types = [a.dtype for a in x.args]
    if result == "branch":
        return types[0] is bool_ and types[1] is types[2] is x.dtype
    if result == "given":
        return True
    return len(set(types)) == 1 and (x.dtype is bool_ if result == "bool" else x.dtype is types[0])


def _nodes(e: Expr) -> Iterable[Expr]:
    found = walk(e)
    if len(found) > ARTIFACTS.max_expression_nodes:
        raise _Harmful(f"an expression has {len(found)} parts")
    return found


def _sizes_of_inputs(graph: Graph) -> Iterable[Expr]:
    for v in graph.inputs:
        yield from v.shape if isinstance(v, Value) else (v,)


def _names(sizes: Iterable[Expr]) -> Iterable[str]:
    return [x.value.name for e in sizes for x in _nodes(e) if isinstance(x.value, Symbol)]


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
        raise _Harmful(f"{v} is another tensor")
    return t.contiguous()


_REASONS = frozenset({"contraction", "convolution", "attention", "sort", "random", "check", "no declaration"})


def _reason(text: str) -> str:
    return text if text in _REASONS else "no declaration"


def _name(text: object) -> str:
    """A name that may stand in generated code."""
    return _UNTOLD.sub("_", str(text))[:80] or "op"
