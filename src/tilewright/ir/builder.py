"""Making a graph op by op, each with the captured node that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType

from .dtype import DType
from .expr import Axis, Expr, Symbol, axes_of, axis, read, show, substitute, walk
from .graph import (
    DIVISION,
    PART,
    Graph,
    Layout,
    LibraryCall,
    Op,
    Origin,
    Precondition,
    Value,
    Write,
    verify_expr,
)
from .sizes import dims
from .tensor import TensorExpr, output_axes


class Builder:
    """Collects ops; every declaration in `ir.ops` is a function of a Builder and values."""

    def __init__(self, first_id: int = 0) -> None:
        self.ops: list[Op] = []
        self.origins: list[Origin] = []
        self.constants: dict[Value, object] = {}
        self.preconditions: list[Precondition] = []
        self._next = first_id
        self._origin = -1

    def value(self, shape: Sequence[Expr], dtype: DType) -> Value:
        """A new value that nothing defines yet."""
        self._next += 1
        return Value(self._next - 1, tuple(shape), dtype)

    def constant(self, tensor: object, shape: Sequence[Expr], dtype: DType) -> Value:
        """A frozen tensor."""
        v = self.value(shape, dtype)
        self.constants[v] = tensor
        return v

    def emit(self, name: str, inputs: Sequence[Value], expr: TensorExpr) -> tuple[Value, ...]:
        """Add an op with a tensor expression; shapes and types of the results are derived from it."""
        outputs = tuple(self.value(expr.shape, t) for t in expr.dtypes)
        op = Op(name, tuple(inputs), outputs, expr=expr, origin=self._origin)
        verify_expr(op, expr)
        self.ops.append(op)
        return outputs

    def library(
        self,
        call: LibraryCall,
        inputs: Sequence[Value],
        results: Sequence[tuple[Sequence[Expr], DType]],
        binds: Sequence[Expr] = (),
    ) -> tuple[Value, ...]:
        """Add an op that runs as a library call, with the shapes and types of its results, and the symbols it binds."""
        outputs = tuple(self.value(s, t) for s, t in results)
        self.ops.append(
            Op(call.name, tuple(inputs), outputs, call=call, origin=self._origin, binds=tuple(binds))
        )
        return outputs

    def require(self, size: Expr) -> None:
        """The captured node at hand needs a size that is not 0."""
        if not dims.at_least(size, 1):
            origin = self.origins[self._origin]
            self.preconditions.append(Precondition(size, origin.name, origin.place))

    def require_divisor(self, by: Value | Expr, shape: Sequence[Expr] | None = None) -> None:
        """The captured node at hand divides integers: by a number, or by one for each element of a result of this
        `shape`. A divisor made of sizes alone must not be 0; kernels test those from data, or made of axes."""
        e = self.number_of(by) if isinstance(by, Value) else by
        if (
            e is None
            or e.dtype.is_float
            or e.op == "const"
            or axes_of(e)
            or any(x.op == "read" for x in walk(e))
        ):
            return
        if not dims.at_least(e, 1) and not dims.at_least(dims.sub(dims.ZERO, e), 1):
            origin = self.origins[self._origin]
            count = None if shape is None else dims.prod(shape)
            self.preconditions.append(Precondition(e, origin.name, origin.place, count, DIVISION))

    def maker_of(self, v: Value) -> Op | None:
        """The op that makes a value; None for inputs and constants."""
        return next((op for op in reversed(self.ops) if v in op.outputs), None)

    def number_of(self, v: Value) -> Expr | None:
        """What each element of a value is, if that is one number made of sizes alone: a scalar, filled or cast."""
        made: Expr | None = None
        while (op := self.maker_of(v)) is not None:
            if op.expr is None or op.expr.reduce or len(op.expr.body) != 1:
                return None
            (body,) = op.expr.body
            made = body if made is None else _with_reads(made, body)
            match op.inputs:
                case ():
                    return made
                case (given,):
                    v = given
                case _:
                    return None
        return None

    def require_equal(self, a: Expr, b: Expr) -> None:
        """The captured node at hand needs two sizes to be equal."""
        if not dims.equal(a, b):
            apart = dims.sub(a, b)
            is_equal = dims.maximum(dims.sub(dims.ONE, dims.mul(apart, apart)), dims.ZERO)
            origin = self.origins[self._origin]
            self.preconditions.append(Precondition(is_equal, origin.name, origin.place, why=PART))

    @contextmanager
    def origin(self, name: str, place: str = "", node: str = "") -> Generator[int, None, None]:
        """Ops emitted inside belong to one captured node; give its call and values to `close_origin` afterwards."""
        outer, self._origin = self._origin, len(self.origins)
        self.origins.append(Origin(self._origin, name, place, node=node))
        try:
            yield self._origin
        finally:
            self._origin = outer

    def close_origin(
        self,
        id: int,
        call: LibraryCall | None,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        view: bool = False,
    ) -> None:
        """Record what a captured node read and made, and the library call that computes the same."""
        self.origins[id] = replace(
            self.origins[id], call=call, inputs=tuple(inputs), outputs=tuple(outputs), view=view
        )

    def pointwise(self, name: str, compute: Callable[..., Expr], *inputs: Value) -> Value:
        """Add an elementwise op: `compute` receives one element of each input (broadcast as torch does) and
        returns one."""
        shape = broadcast(*[v.shape for v in inputs])
        axes = output_axes(shape)
        elements = [element(k, v, axes) for k, v in enumerate(inputs)]
        (out,) = self.emit(name, inputs, TensorExpr(axes, (compute(*elements),)))
        return out

    def finish(
        self, inputs: Sequence[Value | Expr], outputs: Sequence[Value | Expr | None],
        layouts: Mapping[Value, Layout] | None = None, writes: Sequence[Write] = (),
    ) -> Graph:  # fmt: skip
        """The graph of what was collected, verified."""
        graph = Graph(
            tuple(inputs), tuple(self.ops), tuple(outputs), tuple(self.origins), layouts or {},
            dict(self.constants), tuple(writes), tuple(self.preconditions),
        )  # fmt: skip
        graph.verify(bodies=False)  # `emit` has looked at them
        return graph


def _with_reads(e: Expr, made: Expr) -> Expr:
    """`e` with what its reads find."""
    return substitute(e, {x: made for x in walk(e) if x.op == "read"})


def broadcast(*shapes: Sequence[Expr]) -> tuple[Expr, ...]:
    """The common shape after torch's broadcasting. Unlike expressions that had one value in the trace were compared
    there, and are equal in each call. Raises ValueError for others: one of them may be 1 in each call and stretched."""
    rank = max((len(s) for s in shapes), default=0)
    out: list[Expr] = []
    for k in range(rank):
        sizes = [s[len(s) - rank + k] for s in shapes if len(s) - rank + k >= 0]
        wide = list(dict.fromkeys(s for s in sizes if s is not dims.ONE))
        fixed = [s for s in wide if dims.static(s) is not None]
        if len(wide) > 1 and (len(fixed) > 1 or not _were_equal(wide)):
            raise ValueError(f"sizes {', '.join(map(show, wide))} are not known to broadcast")
        out.append(next(iter((*fixed, *wide)), dims.ONE))
    return tuple(out)


_traced: ContextVar[Mapping[str, int]] = ContextVar("traced", default=MappingProxyType({}))


@contextmanager
def traced_with(sizes: Mapping[str, int]) -> Generator[None]:
    """Within it, what is built was traced with these sizes (by name of symbol)."""
    token = _traced.set(sizes)
    try:
        yield
    finally:
        _traced.reset(token)


def _were_equal(sizes: Iterable[Expr]) -> bool:
    """Whether sizes had one value in the trace, as far as that is known."""
    traced = _traced.get()
    known = [s for s in sizes if all(x.value.name in traced for x in walk(s) if isinstance(x.value, Symbol))]
    return len({dims.evaluate(s, dict(traced)) for s in known}) <= 1


def element(operand: int, v: Value, axes: Sequence[Axis]) -> Expr:
    """The element of `v` at output `axes`, aligned from the right; size-1 dims are read at 0."""
    index: list[Expr] = []
    shift = len(axes) - len(v.shape)
    for k, size in enumerate(v.shape):
        a = axes[k + shift]
        stretched = size is dims.ONE and a.extent is not dims.ONE
        index.append(dims.ZERO if stretched or a.extent is dims.ONE else axis(a))
    return read(operand, index, v.dtype)
