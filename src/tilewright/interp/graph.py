"""The meaning of a `Graph`: every op in order, every tensor whole, every library call called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilewright.errors import InputError, VerifyError
from tilewright.ir.dtype import bool_, f64, i64
from tilewright.ir.expr import Expr, Symbol
from tilewright.ir.graph import Graph, LibraryCall, Loop, Op, Operand, Value
from tilewright.ir.sizes import dims

from .algebra import FLOATS, Algebra, Array, to_numpy
from .evaluate import Evaluator, Symbols, TensorEvaluator


def run_graph(
    graph: Graph, inputs: Sequence[object], algebra: Algebra = FLOATS
) -> list[Array | int | float | bool | None]:
    """The outputs of `graph` for `inputs` (arrays or torch tensors for values, numbers for host scalars).

    Tensors come back as arrays of the algebra, host scalars as Python numbers. Raises InputError for inputs
    that do not fit, IndexOutOfRange and ZeroDivisionError as eager does."""
    values, symbols = run_values(graph, inputs, algebra)
    scalars = Evaluator(FLOATS, symbols=symbols)
    outputs: list[Array | int | float | bool | None] = []
    for out in graph.outputs:
        if isinstance(out, Expr):
            outputs.append(np.asarray(scalars.value(out)).item())
        else:
            outputs.append(None if out is None else values[out])
    return outputs


def run_values(
    graph: Graph, inputs: Sequence[object], algebra: Algebra = FLOATS
) -> tuple[dict[Value, Array], Symbols]:
    """Every value of the graph and every size, for tests that look inside (and for `graph.writes`)."""
    if len(inputs) != len(graph.inputs):
        raise InputError(f"{len(graph.inputs)} inputs expected, got {len(inputs)}", phase="interp")
    values: dict[Value, Array] = {v: algebra.load(tensor, v.dtype) for v, tensor in graph.constants.items()}
    symbols: dict[str, int | float] = {}
    for want, given in zip(graph.inputs, inputs, strict=True):
        if isinstance(want, Expr):
            if isinstance(want.value, Symbol):
                symbols[want.value.name] = to_numpy(given).item()
        else:
            values[want] = algebra.load(given, want.dtype)
    for v in graph.inputs:
        if isinstance(v, Value):
            bind(v, values[v].shape, symbols)
    run_ops(graph, values, symbols, algebra)
    return values, symbols


def run_ops(
    graph: Graph, values: dict[Value, Array], symbols: dict[str, int | float], algebra: Algebra
) -> None:
    """Run the ops of `graph` in order; `values` and `symbols` hold its inputs and constants, and then everything."""
    for op in graph.ops:
        operands = [values[v] for v in op.inputs]
        if op.expr is not None:
            results = TensorEvaluator(op.expr, algebra, operands, symbols).run()
        elif op.call is not None and op.call.loop is not None:
            results = _loop(op, op.call.loop, operands, symbols, algebra)
        elif op.call is not None:
            results = _call(op, op.call, operands, symbols, algebra)
        else:
            raise VerifyError("op without a meaning", phase="interp", op=op.name)
        for v, result in zip(op.outputs, results, strict=True):
            bind(v, result.shape, symbols)
            values[v] = result


def bind(value: Value, shape: tuple[int, ...], symbols: dict[str, int | float]) -> None:
    """Learn sizes from the shape of a value and check it against those that are known. Raises InputError."""
    if len(shape) != len(value.shape):
        raise InputError(f"{value} got rank {len(shape)}", phase="interp")
    for e, size in zip(value.shape, shape, strict=True):
        unknown = [
            s for s in dims.symbols_of(e) if isinstance(s.value, Symbol) and s.value.name not in symbols
        ]
        if len(unknown) == 1 and isinstance(unknown[0].value, Symbol):
            solved = _solve(e, unknown[0], size, symbols)
            if solved is None:
                continue
            symbols[unknown[0].value.name] = solved
        elif unknown:
            continue
        known = evaluate_size(e, symbols)
        if known != size:
            raise InputError(f"{value} got shape {shape}, where {e} is {known}", phase="interp")


def evaluate_size(e: Expr, symbols: Symbols) -> int:
    """A size as a number. Raises KeyError for an unknown symbol."""
    return dims.evaluate(e, {name: int(v) for name, v in symbols.items()})


def _solve(e: Expr, unknown: Expr, size: int, symbols: Symbols) -> int | None:
    """The value of `unknown` for which the affine size `e` is `size` (rounded down), or None."""
    factor = dims.coefficient(e, unknown)
    if factor is None:
        return None
    slope = evaluate_size(factor, symbols)
    rest = evaluate_size(dims.sub(e, dims.mul(factor, unknown)), symbols)
    return (size - rest) // slope if slope else None


def _call(
    op: Op, call: LibraryCall, operands: Sequence[Array], symbols: dict[str, int | float], algebra: Algebra
) -> list[Array]:
    if any(x.dtype.names for x in operands):
        raise VerifyError(
            "a library call has no meaning over this element type", phase="interp", op=call.name
        )
    tensors = [to_torch(np.asarray(x)) for x in operands]
    args = [_argument(a, tensors, symbols) for a in call.args]
    kwargs: Mapping[str, object] = {k: _argument(a, tensors, symbols) for k, a in call.kwargs}
    result = call.function(*args, **kwargs)
    parts = result if isinstance(result, (tuple, list)) else [result]
    results = [r for r in parts if r is not None]
    for e, number in zip(op.binds, results[len(op.outputs) :], strict=False):  # more results: unused
        if isinstance(e.value, Symbol):
            symbols[e.value.name] = to_numpy(number).item()
    return [algebra.load(r, v.dtype) for v, r in zip(op.outputs, results[: len(op.outputs)], strict=True)]


def _loop(
    op: Op, loop: Loop, operands: Sequence[Array], symbols: dict[str, int | float], algebra: Algebra
) -> list[Array]:
    """The body's meaning, step after step."""
    body, rest = loop.body, list(operands)
    goes = not loop.gated or bool(to_numpy(rest.pop(0)).item())
    state, slices = rest[: loop.carried], rest[loop.carried : loop.carried + loop.sliced]
    outer = rest[loop.carried + loop.sliced :]
    most = (
        None if loop.steps is None else int(np.asarray(Evaluator(FLOATS, symbols=symbols).value(loop.steps)))
    )
    places = [v for v in body.inputs if isinstance(v, Value)]
    constants = {v: algebra.load(tensor, v.dtype) for v, tensor in body.constants.items()}
    collected: list[list[Array]] = [[] for _ in range(loop.stacked)]
    done = 0
    while goes and (most is None or done < most):
        place = most - 1 - done if loop.backwards and most is not None else done
        counter = algebra.load(np.asarray(done, np.int64), i64)
        values = dict(zip(places, (counter, *state, *(x[place] for x in slices), *outer), strict=True))
        values |= constants
        run_ops(body, values, dict(symbols), algebra)
        made = [values[v] for v in body.outputs if isinstance(v, Value)]
        goes = not loop.conditional or bool(to_numpy(made.pop(0)).item())
        state = made[: loop.carried]
        for column, value in zip(collected, made[loop.carried :], strict=True):
            column.append(value)
        done += 1
    stacks = [
        np.stack(column[::-1] if loop.backwards else column) if column else _nothing(v, symbols, algebra)
        for column, v in zip(collected, op.outputs[loop.carried :], strict=True)
    ]
    return [*state, *stacks]


def _nothing(v: Value, symbols: Symbols, algebra: Algebra) -> Array:
    """The stack of no results."""
    shape = [evaluate_size(n, symbols) for n in v.shape[1:]]
    return algebra.load(np.zeros((0, *shape)), v.dtype)


def _argument(a: object, tensors: Sequence[object], symbols: Symbols) -> object:
    if isinstance(a, Operand):
        return tensors[a.index]
    if isinstance(a, Expr):
        number = np.asarray(Evaluator(FLOATS, symbols=symbols).value(a)).item()
        assert a.dtype in (i64, f64, bool_) or isinstance(number, (int, float))
        return number
    if isinstance(a, (list, tuple)):
        return type(a)(_argument(x, tensors, symbols) for x in a)
    return a


def to_torch(x: Array) -> object:
    """A torch tensor with the elements of a numpy array (bf16 included), in storage of its own."""
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(x.view(np.int16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))
