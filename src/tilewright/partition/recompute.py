"""Which pointwise results every reader computes for itself, rather than one kernel storing them for the others, and
which of these each must round; which sums no kernel may compute anew.

A value that several kernels read costs its own bytes once to write and once a reader to read; what it is computed from
costs its bytes once a reader. Where the latter are no more than the value's own, and the elements are cheap, nothing is
ever gained by storing it: the difference from a mean in fp32 is twice the half that it is made of.

The gradient of a softmax shows which sums are not computed anew: dS = P (dP - sum(P dP)), where dP is a product of
matrices. The rounding errors of dP cancel where P is near 1, but only if both terms see the same dP: another kernel may
add up in another order. Large products are computed in blocks that take their terms in order, whoever reads them; what
is small is computed in whatever order its kernel likes, and storing it costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Expr, call, cast, cost
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import PARTITION, REGION_STORES

from .regions import is_product

Consumers = Mapping[Value, Sequence[Op]]


def find_recomputed(
    graph: Graph, views: Collection[Value], consumers: Consumers, hints: SizeHints
) -> set[Op]:
    """The pointwise ops that every reader computes for itself. `views` are values that no kernel makes."""
    producer = graph.producer()
    found = _of_one_value(graph, views, consumers, producer)
    sources = _sources(graph, views, producer)
    stays = graph.kept() | {v for op in graph.ops if op.call is not None for v in op.inputs}
    for op in reversed(graph.ops):
        if op in found or not is_cheap(op, views) or op.output in stays:
            continue
        behind, readers = sources.get(op.output), consumers.get(op.output, [])
        if behind is None or not readers:
            continue
        if all(r in found for r in readers):  # as a part of what is computed again
            found.add(op)
        elif len(readers) > 1 and sum(size_bytes(v, hints) for v in behind) <= size_bytes(op.output, hints):
            found.add(op)
    return found


def _of_one_value(
    graph: Graph, views: Collection[Value], consumers: Consumers, producer: Mapping[Value, Op]
) -> set[Op]:
    """Ops that read nothing, or one value that is in memory anyway."""
    found: dict[Op, frozenset[Op]] = {}
    written = {w.value for w in graph.writes}  # made where an input lies, which nobody can read any more then
    written |= {op.inputs[0] for op in graph.ops if op.call is not None and op.call.part is not None}
    for op in graph.ops:
        if not is_cheap(op, views) or (op.output in written and op.inputs):
            continue
        stored = [v for v in op.inputs if v.numel is not dims.ONE]
        makers = [producer.get(v) for v in stored]
        in_memory = all(m is None or m.call is not None or m in found for m in makers)
        if stored and not (len(stored) == 1 and in_memory and len(consumers.get(op.output, [])) > 1):
            continue
        before = (found.get(p, frozenset[Op]()) for p in map(producer.get, op.inputs) if p is not None)
        together = frozenset[Op]().union([op], *before)
        if len(together) <= PARTITION.max_recomputed_ops:
            found[op] = together
    return set(found)


def _sources(
    graph: Graph, views: Collection[Value], producer: Mapping[Value, Op]
) -> dict[Value, frozenset[Value]]:
    """The values behind each cheap pointwise result, where all of them are in memory: what a kernel folds may be wanted
    in the same kernel."""
    found: dict[Value, frozenset[Value]] = {}
    spent: dict[Value, int] = {}
    together: dict[Value, frozenset[Op]] = {}
    for op in graph.ops:
        if not is_cheap(op, views):
            continue
        assert op.expr is not None
        instructions = cost(op.expr.body[0]) + sum(spent.get(v, 0) for v in op.inputs)
        ops = frozenset([op]).union(*(together[v] for v in op.inputs if v in together))
        if instructions >= PARTITION.min_stored_instructions or len(ops) > PARTITION.max_recomputed_ops:
            continue
        behind: set[Value] = set()
        for v in op.inputs:
            maker = producer.get(v)
            if v in found:
                behind |= found[v]
            elif maker is None or maker.call is not None:
                behind.add(v)
            else:
                break
        else:
            found[op.output], spent[op.output], together[op.output] = frozenset(behind), instructions, ops
    return found


def is_cheap(op: Op, views: Collection[Value]) -> bool:
    """Whether each reader may compute a result for itself; `views` are values that no kernel makes."""
    if op.expr is None or op.kernel >= 0 or not op.expr.is_pointwise or op.output in views:
        return False
    return cost(op.expr.body[0]) < PARTITION.min_stored_instructions


def size_bytes(v: Value, hints: SizeHints) -> int:
    """The bytes of a value, at the sizes that are seen."""
    return hints.estimate(v.numel) * v.dtype.bytes


def round_alike(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels, in all of which a half value is rounded as memory would round it, where one kernel folds it into a
    result in half (a maximum, a sum) and another reads that result and computes the value anew.

    A softmax shows why: one kernel stores m = max(x) and s = sum(exp(x - m)), another computes exp(x - m) / s. These
    add up to 1 only if both see the same x, and in registers x may have more digits."""
    times = Counter(v for kernel in kernels for op in kernel.ops for v in op.outputs if v.dtype.is_half)
    again = {v for v, count in times.items() if count > 1}
    if not again:
        return [*kernels]
    makes = {v: k for k in kernels for v in k.outputs}
    anew = {v for kernel in kernels for v in _computed_anew(kernel, again, makes)}
    return [_rounding(kernel, anew) for kernel in kernels]


def _computed_anew(kernel: Kernel, again: Collection[Value], makes: Mapping[Value, Kernel]) -> set[Value]:
    """The halves among those that are computed `again` that a kernel makes and of which it reads statistics that other
    kernels made."""
    own = {v for op in kernel.ops for v in op.outputs if v in again}
    given = [v for v in kernel.inputs if v.dtype.is_half and v in makes] if own else []
    return own & {x for v in given for x in _folded_halves(v, makes[v])}


def _rounding(kernel: Kernel, anew: Collection[Value]) -> Kernel:
    found = {op for op in kernel.ops if any(v in anew for v in op.outputs)}
    ops = tuple(_rounded(op) if op in found else op for op in kernel.ops)
    return replace(kernel, ops=ops) if found else kernel


def _folded_halves(result: Value, kernel: Kernel) -> set[Value]:
    """The halves that a kernel folds on the way to one of its results, pointwise ops and views of them included."""
    producer = {v: op for op in kernel.ops for v in op.outputs}
    found: set[Value] = set()
    todo, seen = [(result, False)], set[tuple[Value, bool]]()
    while todo:
        v, folded = todo.pop()
        op = producer.get(v)
        if op is None or op.expr is None or (v, folded) in seen:
            continue
        seen.add((v, folded))
        folds = op.expr.reduction is not None
        if folded and v.dtype.is_half:
            found.add(v)
        if not (folded and (folds or v.dtype.is_half and not op.expr.is_view())):
            todo += [(x, folded or folds) for x in op.inputs]
    return found


def _rounded(op: Op) -> Op:
    """A pointwise op whose result is rounded as it would be in memory."""
    if op.expr is None or not op.expr.is_pointwise or op.expr.is_view():
        return op
    (body,) = op.expr.body
    return replace(op, expr=replace(op.expr, body=(_in_memory(body),)))


def _in_memory(body: Expr) -> Expr:
    wide = body.args[0] if body.op == "narrow" else call("cast", body, dtype=body.dtype.compute)
    return body if body.op == "cast" else cast(wide, body.dtype)


class RefoldedProducts:
    """The small products of a region of which other values hold folds: a kernel that is given such a value must not
    make the product too."""

    def __init__(self, region: Graph, hints: SizeHints) -> None:
        readers = region.consumers()
        self._folded: dict[Value, frozenset[Op]] = {}
        above: dict[Value, frozenset[Op]] = {}
        for op in region.ops:
            small = is_product(op) and hints.estimate(op.output.numel) < REGION_STORES.max_small_elements
            own = {op} if small and _keeps_digits(op.output, readers.get(op.output, ())) else set[Op]()
            folded = frozenset[Op]().union(*(self._folded.get(v, ()) for v in op.inputs))
            seen = frozenset[Op]().union(*(above.get(v, ()) for v in op.inputs))
            folds = op.expr is not None and op.expr.reduction is not None
            for v in op.outputs:
                self._folded[v] = folded | seen if folds else folded
                above[v] = seen | own
        ever = frozenset[Op]().union(*self._folded.values())
        self.products = tuple(op.output for op in region.ops if op in ever)
        """What a kernel may be given instead."""

    def are_in(self, kernel: Kernel, given: Collection[Value]) -> bool:
        """Whether a kernel makes a product of which it is given a fold."""
        return any(not self._folded[v].isdisjoint(kernel.ops) for v in given)


def _keeps_digits(v: Value, readers: Collection[Op]) -> bool:
    """Whether someone reads more of a value than a half, which hides how it was summed."""
    return (
        v.dtype.is_float
        and not v.dtype.is_half
        and not (readers and all(r.output.dtype.is_half for r in readers))
    )
