"""Convolutions take the sum and the ReLU behind them, where that is measured to be faster than a pass of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from tilewright.ir.graph import Graph, LibraryCall, Op, Value

from .epilogue import Finder, Match, merge_epilogues
from .offers.cudnn import FusibleConvolution, fusible
from .spare import offered


@dataclass(frozen=True, slots=True)
class FusedForm:
    """A convolution, the form of it that does more, their operands, and what a kernel behind the first would move."""

    plain: LibraryCall
    fused: LibraryCall
    inputs: tuple[Value, ...]
    second: Value | None
    result: Value


class IsFaster(Protocol):
    """Measures the two forms, on the machine."""

    def __call__(self, form: FusedForm) -> bool:
        """Whether the fused form gives what the two others give, and is faster."""
        ...


def fuse_convolutions(graph: Graph, is_faster: IsFaster) -> Graph:
    """The graph with convolutions that add and rectify while they write, where `is_faster` says so and somebody needs
    the result in memory."""
    wrapped = graph.with_ops([_wrapped(op) for op in graph.ops])
    finder = Finder(wrapped, exact=True)
    matches: dict[Op, Match] = {}
    taken: set[Op] = set()
    for op in wrapped.ops:
        form = op.call.function if op.call is not None else None
        match = finder.match(op) if isinstance(form, FusibleConvolution) and op not in taken else None
        if match is None or taken.intersection(match.ops) or not _is_stored(match, finder):
            continue
        assert isinstance(form, FusibleConvolution)
        if is_faster(FusedForm(form.plain, match.call, op.inputs, match.second, op.output)):
            matches[op] = match
            taken.update(match.ops)
    return _unwrapped(merge_epilogues(wrapped, matches))


def _wrapped(op: Op) -> Op:
    call = fusible(op.call, len(op.inputs)) if op.call is not None and op.expr is None else None
    if call is None or op.call is None:
        return op
    return replace(op, call=offered(call, op.call, {}))


def _unwrapped(graph: Graph) -> Graph:
    """The calls that took nothing, as they were."""

    def plain(op: Op) -> Op:
        form = op.call.function if op.call is not None else None
        return replace(op, call=form.plain) if isinstance(form, FusibleConvolution) else op

    return graph.with_ops(list(map(plain, graph.ops)))


def _is_stored(match: Match, finder: Finder) -> bool:
    """Whether a call, or whoever calls the graph, needs the result: else the ops may go into a kernel that reads it."""
    result = match.ops[-1].output
    return result in finder.kept or any(r.call is not None for r in finder.consumers.get(result, []))
