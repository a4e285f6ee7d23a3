"""Which captured nodes run as library calls: contractions, by choice, but for small ones."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from tilewright.errors import UnsupportedError
from tilewright.ir.expr import Axis, Expr, axes_of
from tilewright.ir.graph import Graph, LibraryCall, Op, Origin, Value
from tilewright.ir.kernel import Cover, Kernel, LibraryStep
from tilewright.ir.sizes import dims
from tilewright.ir.task import Product
from tilewright.rewrite.normal.normalise import binds, bound_symbols
from tilewright.tuning.thresholds import LIBRARY

from .frozen_operands import Frozen
from .offers.registry import is_offered


def is_contraction(op: Op) -> bool:
    """Whether an op is a sum of products whose two reads split its parallel axes (matmul, convolution, ...)."""
    sides = factor_axes(op)
    return any(a - b and b - a for n, a in enumerate(sides) for b in sides[n + 1 :])


def is_vector_product(op: Op) -> bool:
    """Whether an op is a sum of products of two reads, one of which has all of its parallel axes and the other fewer
    (a matrix and a vector)."""
    sides = factor_axes(op)
    return len(sides) == 2 and sides[0] != sides[1] and (sides[0] <= sides[1] or sides[1] <= sides[0])


def factor_axes(op: Op) -> list[set[Axis]]:
    """The parallel axes that each factor of a sum of products uses; none if it is no such sum."""
    e = op.expr
    if e is None or e.reduction is None or e.reduction.combiner != "add" or e.scan is not None:
        return []
    factors = _product(e.body[0])
    found = [{a for x in axes_of(f) for a in e.axes if x.value == a} for f in factors]
    return found if len(factors) > 1 else []


def _product(e: Expr) -> list[Expr]:
    """The factors of a product, seen through casts and guards."""
    if e.op in ("cast", "narrow"):
        return _product(e.args[0])
    if e.op == "where":
        return _product(e.args[1])
    if e.op == "mul":
        return _product(e.args[0]) + _product(e.args[1])
    return [e]


def slides(op: Op, call: LibraryCall) -> bool:
    """Whether an op is a depthwise convolution over more than one place: each channel has its own weights, so that it
    is no contraction, but the library knows it."""
    e = op.expr
    if e is None or e.reduction is None or call.reason != "convolution":
        return False
    return len(_product(e.body[0])) > 1 and any(a.extent is not dims.ONE for a in e.axes[2:])


def select(graph: Graph, *, repeated: bool = False, small: float = 0.0) -> Graph:
    """Replace each captured node that contains a contraction by its library call. Its other ops go with it. Products of
    at most `small` operations are generated, where no frozen weight lies so that kernels gather it. In what is
    `repeated` step by step, products with frozen weights are calls as well where they have a single row, and more
    products of what is not frozen are none."""
    chosen: dict[int, Origin] = {}
    frozen = Frozen(graph)
    for op in graph.ops:
        origin = graph.origins[op.origin] if op.origin >= 0 else None
        if origin is None or op.kernel >= 0 or origin.call is None:
            continue
        if (
            _called_each_step(op, origin.call, frozen)
            if repeated
            else _called_once(op, origin.call, frozen, small)
        ):
            chosen[op.origin] = origin
    return _called(graph, {o: origin.call for o, origin in chosen.items() if origin.call is not None})


def selected_as(graph: Graph, selected: Graph) -> Graph:
    """The graph, of an earlier phase, with those captured nodes as library calls that are calls in `selected`."""
    return _spared(graph, (op.origin for op in selected.ops if op.call is not None))


def keep_as_calls(graph: Graph, origins: Iterable[int], reason: str) -> Graph:
    """The graph with the captured nodes `origins` as library calls, for a `reason`; itself if none of them has one."""
    return _spared(graph, origins, reason)


def _spared(graph: Graph, origins: Iterable[int], reason: str = "") -> Graph:
    calls = {o: call for o in origins if o >= 0 and (call := graph.origins[o].call) is not None}
    left = {op.origin for op in graph.ops if op.call is None}
    calls = {o: replace(call, reason=reason or call.reason) for o, call in calls.items() if o in left}
    return _called(graph, calls) if calls else graph


def _called(graph: Graph, calls: Mapping[int, LibraryCall]) -> Graph:
    """The graph with the call of each of these captured nodes instead of its ops. A node keeps its ops where an operand
    of its call is made by nothing: its view left with ops that had no need of it."""
    found = _replaced(graph, calls)
    lost = _without_operand(found, calls)
    return _called(graph, {o: call for o, call in calls.items() if o not in lost}) if lost else found


def _replaced(graph: Graph, calls: Mapping[int, LibraryCall]) -> Graph:
    ops: list[Op] = []
    done: set[int] = set()
    made: set[Value] = set()
    for op in graph.ops:
        call = calls.get(op.origin)
        if call is None or op.kernel >= 0:
            ops.append(op)
            continue
        origin = graph.origins[op.origin]
        if op.origin not in done and set(origin.outputs) & set(op.outputs):
            done.add(op.origin)
            ops.append(Op(call.name, origin.inputs, origin.outputs, call=call, origin=op.origin))
            made |= set(origin.outputs)
        else:
            ops.append(op)
    left = [op for op in ops if op.call is not None or not set(op.outputs) & made]
    return drop_unread(graph.with_ops(left))


def _without_operand(graph: Graph, calls: Container[int]) -> set[int]:
    """Which of these nodes are calls that read what nothing makes."""
    known = {*graph.inputs, *graph.constants, *(v for op in graph.ops for v in op.outputs)}
    return {
        op.origin for op in graph.ops if op.call is not None and op.origin in calls and set(op.inputs) - known
    }


def _called_once(op: Op, call: LibraryCall, frozen: Frozen, small: float) -> bool:
    """Whether a product outside loops is a call: if it is no small one, if its size is not known, or if a kernel would
    gather its weight."""
    if not is_contraction(op):
        return slides(op, call)
    if call.reason != "contraction":
        return True
    work = _operations(op)
    return work is None or work > small or _gathers_weight_for_many_rows(op, call, frozen)


def _called_each_step(op: Op, call: LibraryCall, frozen: Frozen) -> bool:
    """Whether a product in the body of a loop is a call."""
    if not (is_contraction(op) or is_vector_product(op)):
        return slides(op, call)
    if _packs(op, call, frozen):
        return True
    work = _operations(op)
    return is_contraction(op) and work is not None and work > LIBRARY.max_generated_step_work


def _packs(op: Op, call: LibraryCall, frozen: Frozen) -> bool:
    """Whether an operand is frozen, for which the call may have a faster form."""
    return is_offered(call) and any(frozen.tensor(v) is not None for v in op.inputs)


def _gathers_weight_for_many_rows(op: Op, call: LibraryCall, frozen: Frozen) -> bool:
    """Whether so many rows meet a frozen weight whose columns do not lie side by side that a kernel, which gathers them
    for each row, is slower than the library, which copies such a weight first."""
    task = call.task
    if not isinstance(task, Product):
        return False
    rows = dims.static(dims.prod(task.shape[:-1]))
    held = [t for v in op.inputs if (t := frozen.tensor(v)) is not None and t.dim() == 2]
    apart = any(t.stride(1 if task.transposed else 0) != 1 for t in held)
    return apart and (rows is None or rows > LIBRARY.max_gathering_rows)


def _operations(op: Op) -> int | None:
    """2 x multiply-adds of a sum of products; None if a size is not known."""
    e = op.expr
    work = None if e is None else dims.static(dims.prod([a.extent for a in (*e.axes, *e.reduce)]))
    return None if work is None else 2 * work


def call_contractions(graph: Graph) -> Graph:
    """The graph with each contraction as the call of the node that it stands for, to be priced only: the views that
    the call itself would read through may be gone."""

    def call_of(op: Op) -> LibraryCall | None:
        origin = graph.origins[op.origin] if op.origin >= 0 else None
        if origin is None or origin.call is None or not is_contraction(op):
            return None
        return replace(origin.call, seen=(), lies=())  # of operands that may have other shapes here

    ops = [(op, call_of(op)) for op in graph.ops]
    return graph.with_ops(
        [op if c is None else Op(c.name, op.inputs, op.outputs, call=c, origin=op.origin) for op, c in ops]
    )


def drop_unread(graph: Graph) -> Graph:
    """The graph with only its live ops, and the constants they read."""
    live = live_ops(graph)
    needed = set(graph.kept()).union(*(op.inputs for op in live))
    constants = {v: t for v, t in graph.constants.items() if v in needed}
    return replace(graph, ops=tuple(op for op in graph.ops if op in live), constants=constants)


def live_ops(graph: Graph) -> set[Op]:
    """The ops whose results somebody reads, or that have effects or bind sizes."""
    needed, bound = set(graph.kept()), bound_symbols(graph)
    live: set[Op] = set()
    for op in reversed(graph.ops):
        effects = op.call is not None and not op.call.pure
        if effects or set(op.outputs) & needed or binds(op, bound):
            live.add(op)
            needed |= set(op.inputs)
    return live


def library_cover(graph: Graph) -> Cover:
    """Every captured node as its own library call: what runs where no C++ compiler is found.

    Ops whose origin has no call, or whose origin's results they are not, must be calls themselves."""
    steps: list[Kernel | LibraryStep] = []
    done: set[int] = set()
    for op in graph.ops:
        if op.call is not None:
            steps.append(LibraryStep(op, choice=False, origins=(op.origin,)))
            done.add(op.origin)
            continue
        if op.origin < 0 or op.origin in done:
            continue
        origin = graph.origins[op.origin]
        if origin.call is None:
            raise UnsupportedError("an op without a library call", phase="partition", op=op.name)
        done.add(op.origin)
        call = Op(origin.call.name, origin.inputs, origin.outputs, call=origin.call, origin=op.origin)
        steps.append(LibraryStep(call, choice=False, origins=(op.origin,)))
    return Cover(graph, tuple(steps))
