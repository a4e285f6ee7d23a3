"""Which of several ways to do a library call is taken: the one that is fastest here, by measurement.

What is compared is a region: the call with the pointwise readers that it can absorb. A way that cannot absorb them pays
for the pass over memory that stays. Equal regions are measured once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tilewright.ir.expr import Expr, cost
from tilewright.ir.graph import Graph, LibraryCall, Op, Value
from tilewright.ir.identity import identity
from tilewright.ir.task import Offered

from .epilogue import Finder, PointwiseChain, merge_epilogues
from .offers.offer import Offer
from .spare import behind

LOG = logging.getLogger("tilewright")


@dataclass(frozen=True, slots=True)
class Pass:
    """What passes through memory once more, and the instructions that each element of it costs there."""

    value: Value
    work: int


@dataclass(frozen=True, slots=True)
class TimedOffer:
    """One way to do a region: its call on tensors like `inputs`, the passes that are left behind it, and whether it
    parts steps that one native call would run."""

    name: str
    call: LibraryCall
    inputs: tuple[Value, ...]
    passes: tuple[Pass, ...] = ()
    parts: bool = False


class OfferTimer(Protocol):
    """Measures, and remembers what it found."""

    def size(self, e: Expr) -> int:
        """The value of a size, typical ones for its symbols."""
        ...

    def known_choice(self, task: str) -> str | None:
        """The name of the candidate that has won this task before, if one has."""
        ...

    def measure(self, task: str, candidates: Sequence[TimedOffer]) -> str:
        """Time the candidates and return the name of the fastest."""
        ...


Offers = Mapping[int, Sequence[Offer]]
"""The offers that calls stand for, by the numbers of these (`Offered`)."""


def choose(graph: Graph, offers: Offers, timer: OfferTimer | None, *, exact: bool = True) -> Graph:
    """The graph with one of its offers in the place of each call that stands for some; without a timer, the first that
    fits."""
    waiting = [op for op in graph.ops if op.call is not None and isinstance(op.call.task, Offered)]
    if not waiting:
        return graph
    chosen: dict[Op, Op] = {}
    if timer is None:
        for op in waiting:
            chosen[op] = next(iter(_ways(op, offers).values()))
        return _with(graph, chosen)
    finder = Finder(graph, exact)
    looped = any(op.call is not None and op.call.loop is not None for op in graph.ops)
    choices: dict[str, str] = {}
    for op in waiting:
        task = _task(op, finder, timer, looped)
        name = choices.get(task) or timer.known_choice(task)
        ways = _ways(op, offers, name)
        if len(ways) > 1:
            present = _with(graph, chosen)
            candidates = _candidates(present, op, ways, exact)
            # Loops and calls of our own are one native call, as long as nothing else stands between.
            name = timer.measure(task, [replace(e, parts=looped and not e.call.own) for e in candidates])
        choices[task] = name if name in ways else next(iter(ways))
        chosen[op] = ways[choices[task]]
    return _with(graph, chosen)


def _with(graph: Graph, chosen: Mapping[Op, Op]) -> Graph:
    return graph.with_ops([chosen.get(op, op) for op in graph.ops])


def _ways(op: Op, offers: Offers, name: str | None = None) -> dict[str, Op]:
    """The ways to do `op` that fit: only `name` if that is one of them. A way that raises is none; if there is no
    other, what the program asked for is the way."""
    call, left = op.call, list(offers[_offered(op).number])
    assert call is not None
    left.sort(key=lambda offer: offer.coarse)
    coarse = {offer.name for offer in left if offer.coarse}
    for wanted in (None if name in coarse else name, None):
        found: dict[str, LibraryCall] = {}
        for offer in tuple(left):
            if offer.coarse and not coarse.issuperset(found):
                continue
            try:
                made = offer.make() if wanted in (None, offer.name) else None
            except Exception as error:
                LOG.info("%s is no way to do %s", offer.name, op.name, exc_info=True)
                call = refuse(call, offer.name, error)
                left.remove(offer)
                continue
            if made is not None:
                found[offer.name] = _on_rows_of(call, made)
        if found:
            return {n: replace(op, call=behind(made, call)) for n, made in found.items()}
    if call.spare is None or call.spare.call is None:
        raise AssertionError(f"no way to do {op.name} fits")
    return {PLAIN: replace(op, call=replace(_on_rows_of(call, call.spare.call), refused=call.refused))}


def _on_rows_of(call: LibraryCall, made: LibraryCall) -> LibraryCall:
    """A way to do `call`, whose leading dims may be others than at capture."""
    return made if call.rows is None else replace(made, strides=call.strides)


PLAIN = "plain"
"""The name of what the program asked for, as a way."""


def _offered(op: Op) -> Offered:
    assert op.call is not None and isinstance(op.call.task, Offered)
    return op.call.task


def refuse(call: LibraryCall, name: str, error: Exception) -> LibraryCall:
    """The call, which tells of an offer that raised."""
    lines = str(error).splitlines() or [type(error).__name__]
    said = f"{name} failed: {lines[0]}"
    return replace(call, refused=tuple(dict.fromkeys((*call.refused, said))))


def _task(op: Op, finder: Finder, timer: OfferTimer, looped: bool) -> str:
    """What is to be done by which ways, so that equal regions are one task."""
    call = op.call
    assert call is not None
    shapes = tuple((v.dtype, tuple(map(timer.size, v.shape))) for v in (*op.inputs, op.output))
    run = PointwiseChain(finder, op.output, max(0, call.channel % max(1, len(op.output.shape))))
    after = tuple(finder.simplify(run.bodies[o.output]) for o in run.grow() if run.closed(o))
    offered = _offered(op)
    return identity(
        call.reason, offered.key, offered.names, shapes, after, run.extra, _alone(op, finder), looped
    )


def _alone(op: Op, finder: Finder) -> bool:
    """Whether only library calls read what comes of `op` and its pointwise readers."""
    end = op.output
    while True:
        readers = finder.consumers.get(end, [])
        if len(readers) == 1 and readers[0].expr is not None and readers[0].expr.is_pointwise:
            end = readers[0].output
            continue
        return all(r.call is not None for r in readers)


def _candidates(graph: Graph, op: Op, ways: Mapping[str, Op], exact: bool) -> list[TimedOffer]:
    """Each way with what it can absorb, in the graph that holds what was chosen before."""
    grown = {name: _grown(graph, op, way, exact) for name, way in ways.items()}
    longest = max((ops for _, ops in grown.values()), key=len)
    alone = _alone(op, Finder(graph, exact))
    found: list[TimedOffer] = []
    for name, (way, absorbed) in grown.items():
        rest = longest[len(absorbed) :] if alone else ()
        work = sum(cost(o.expr.body[0]) for o in rest if o.expr is not None)
        assert way.call is not None
        found.append(TimedOffer(name, way.call, way.inputs, tuple(Pass(o.output, work) for o in rest[-1:])))
    return found


def _grown(graph: Graph, op: Op, way: Op, exact: bool) -> tuple[Op, tuple[Op, ...]]:
    """A way to do `op` with all that it can absorb, and those ops in order."""
    graph = _with(graph, {op: way})
    absorbed: tuple[Op, ...] = ()
    while (match := Finder(graph, exact).match(way)) is not None:
        graph = merge_epilogues(graph, {way: match})
        way = graph.producer()[match.ops[-1].output]
        absorbed = (*absorbed, *match.ops)
    return way, absorbed
