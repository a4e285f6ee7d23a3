"""Pointwise ops that a library call can do on its result become part of it.

A routine knows what it can do (`Fusible`); here it is decided where that applies.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.ir.expr import Expr, Slot, axes_of, axis, slot, transform, walk
from tilewright.ir.graph import Graph, LibraryCall, Op, Value
from tilewright.ir.pattern import COMMUTATIVE, Rewriter
from tilewright.ir.sizes import dims
from tilewright.rewrite.normal.identities import IEEE_RULES
from tilewright.rewrite.normal.normalise import interpret
from tilewright.tuning.search_limits import CALLS

from .frozen_operands import Frozen
from .offers.offer import Epilogue, epilogues_of
from .spare import followed

LOG = logging.getLogger("tilewright")


@dataclass(frozen=True, slots=True)
class Match:
    """`ops` (the last makes the result) become the epilogue `call` of a library op; `second` is its further operand.
    `besides` is what the ops read besides the result, with its tensor if that is frozen."""

    ops: tuple[Op, ...]
    call: LibraryCall
    second: Value | None
    besides: tuple[Value, object | None] | None = None


def absorb(graph: Graph, *, exact: bool = True) -> Graph:
    """Pointwise ops that alone read a call's result, and that the call can do itself, become part of the call."""
    while True:
        finder = Finder(graph, exact)
        matches: dict[Op, Match] = {}
        taken: set[Op] = set()
        for op in graph.ops:
            match = None if op in taken else finder.match(op)
            if match is not None and not taken.intersection(match.ops):
                matches[op] = match
                taken.update(match.ops)
        if not matches:
            return graph
        graph = merge_epilogues(graph, matches)


class Finder:
    """Looks for epilogues in one graph."""

    def __init__(self, graph: Graph, exact: bool) -> None:
        self.graph, self.exact = graph, exact
        self.consumers = graph.consumers()
        self.kept = graph.kept()
        self.frozen = Frozen(graph)
        self.position = {op: n for n, op in enumerate(graph.ops)}
        self.simplify = _simplify

    def match(self, op: Op) -> Match | None:
        """The longest run of pointwise readers that is an epilogue of the call of `op`, which may also stand for an op
        of the graph with the same operands and result."""
        call = op.call
        offers = (
            [e for e in epilogues_of(call) if not (self.exact and e.hides_nan)] if call is not None else []
        )
        if not offers or len(op.outputs) != 1 or op.output in self.kept:
            return None
        best: Match | None = None
        run = PointwiseChain(
            self, op.output, max(0, call.channel % max(1, len(op.output.shape)) if call else 0)
        )
        for last in run.grow():
            if not run.closed(last) or not self._lies_well(op, last):
                continue
            found = self._offer(op, offers, run, last)
            best = found or best
        return best

    def _lies_well(self, op: Op, last: Op) -> bool:
        """Whether a result that leaves the graph may have the strides that the call gives it."""
        layout = self.graph.layouts.get(last.output)
        if last.output not in self.kept or layout is None or op.call is None or not op.call.strides:
            return True
        pairs = zip(layout.strides, op.call.strides[0], last.output.shape, strict=False)
        return all(size is dims.ONE or dims.equal(a, b) for a, b, size in pairs)

    def _offer(self, op: Op, offers: Sequence[Epilogue], run: PointwiseChain, last: Op) -> Match | None:
        body = self.simplify(run.bodies[last.output])
        for epilogue in offers:
            if epilogue.extra != run.extra:
                continue
            constants = match_body(self.simplify(epilogue.template), body)
            if constants is None:
                continue
            vector: object = None
            if epilogue.extra == "channel":
                assert run.second is not None
                vector = self.frozen.tensor(run.second)
            try:
                made = epilogue.make(constants, vector)
            except Exception:
                LOG.info("an epilogue is not offered", exc_info=True)
                continue
            second = run.second if epilogue.extra == "equal" else None
            if made.reuses is not None and made.reuses >= 0 and not self._may_reuse(op, run, last):
                continue
            besides = None if run.second is None else (run.second, vector)
            return Match(tuple(run.ops_of(last)), made, second, besides)
        return None

    def _may_reuse(self, op: Op, run: PointwiseChain, last: Op) -> bool:
        """Whether the call may write over the second operand: it is memory of its own, of the call's strides, and all
        else that reads it comes before, as a library call that `op` depends on."""
        v = run.second
        assert v is not None
        maker = self.frozen.producer.get(v)
        if maker is None or maker.call is None or v in self.kept or maker.call.reuses is None:
            return False
        if not maker.call.strides or op.call is None or maker.call.strides[0] != op.call.strides[0]:
            return False
        before = self._ancestors(op)
        readers = [r for r in self.consumers.get(v, []) if r is not last and r not in run.ops]
        return all(r.call is not None and r in before and r.call.reuses == -1 for r in readers)

    def _ancestors(self, op: Op) -> set[Op]:
        found: set[Op] = set()
        todo = [op]
        while todo:
            for v in todo.pop().inputs:
                maker = self.frozen.producer.get(v)
                if maker is not None and maker not in found:
                    found.add(maker)
                    todo.append(maker)
        return found


_simplify = Rewriter(IEEE_RULES)


class PointwiseChain:
    """Pointwise ops behind a call's result `start`, with their bodies over slots: e0 is its element, e1 that of a
    `second` tensor, which is of the same shape or a frozen vector along dim `channel`."""

    def __init__(self, finder: Finder, start: Value, channel: int) -> None:
        self.finder, self.start, self.channel = finder, start, channel
        self.ops: list[Op] = []
        self.bodies: dict[Value, Expr] = {start: slot("e", 0, start.dtype)}
        self.second: Value | None = None
        self.extra = ""

    def grow(self) -> list[Op]:
        """Take ops in, nearest first; returns them."""
        todo = list(self.finder.consumers.get(self.start, []))
        while todo and len(self.ops) < CALLS.max_epilogue_ops:
            op = min(todo, key=lambda o: self.finder.position[o])
            todo.remove(op)
            if op in self.ops or not self._take(op):
                continue
            todo += self.finder.consumers.get(op.output, [])
        return list(self.ops)

    def _take(self, op: Op) -> bool:
        e = op.expr
        if (
            e is None
            or op.kernel >= 0
            or not e.is_pointwise
            or e.shape != self.start.shape
            or op.output.dtype != self.start.dtype
        ):
            return False
        here = [_place(a.extent, axis(a)) for a in e.axes]
        table: dict[Expr, Expr] = {}
        second, extra = self.second, self.extra
        for r in e.reads():
            assert isinstance(r.value, int)
            v = op.inputs[r.value]
            if v in self.bodies:
                if list(r.args) != here:
                    return False
                table[r] = self.bodies[v]
                continue
            kind = self._kind(v, r, here)
            if not kind or (second is not None and second is not v):
                return False
            second, extra = v, kind
            table[r] = slot("e", 1, v.dtype)
        self.second, self.extra = second, extra
        body = transform(e.body[0], table.get)
        if axes_of(body):
            return False
        self.bodies[op.output] = body
        self.ops.append(op)
        return True

    def _kind(self, v: Value, r: Expr, here: list[Expr]) -> str:
        if v.dtype != self.start.dtype:
            return ""
        if v.shape == self.start.shape and list(r.args) == here:
            return "" if self.finder.frozen.tensor(v) is not None else "equal"
        along = [i for i in r.args if i is not dims.ZERO]
        fits = (
            len(along) == 1 and along[0] is here[self.channel] and v.numel is self.start.shape[self.channel]
        )
        return "channel" if fits and self.finder.frozen.tensor(v) is not None else ""

    def ops_of(self, last: Op) -> list[Op]:
        """The ops that `last` needs, itself at the end."""
        needed = {last}
        for op in reversed(self.ops):
            if any(op.output in o.inputs for o in needed):
                needed.add(op)
        return [op for op in self.ops if op in needed]

    def closed(self, last: Op) -> bool:
        """Whether nothing but the ops up to `last` reads what they make on the way."""
        inside = self.ops_of(last)
        within = [self.start, *(op.output for op in inside if op is not last)]
        readers = [r for v in within for r in self.finder.consumers.get(v, [])]
        uses_second = self.second is None or any(self.second in op.inputs for op in inside)
        return uses_second and not self.finder.kept.intersection(within) and all(r in inside for r in readers)


def match_body(template: Expr, body: Expr) -> tuple[float, ...] | None:
    """The constants c0, c1, ... with which `template` is `body`; None if there are none. Arguments of commutative
    operations may stand in either order."""
    found: dict[int, float] = {}
    if template is not body and not _same(template, body, found):
        return None
    wanted = {x.value.index for x in walk(template) if isinstance(x.value, Slot) and x.value.side == "c"}
    return tuple(found[k] for k in sorted(wanted)) if wanted <= set(found) else None


def _same(t: Expr, e: Expr, found: dict[int, float]) -> bool:
    if isinstance(t.value, Slot) and t.value.side == "c":
        if e.op != "const" or e.dtype != t.dtype or isinstance(e.value, Slot):
            return False
        number = float(e.value)  # type: ignore[arg-type]
        return found.setdefault(t.value.index, number) == number
    if t is e:
        return True
    if t.op != e.op or t.dtype != e.dtype or t.value != e.value or len(t.args) != len(e.args) or not t.args:
        return False
    orders = [e.args, e.args[::-1]] if t.op in COMMUTATIVE else [e.args]
    for args in orders:
        trial = dict(found)
        if all(_same(a, b, trial) for a, b in zip(t.args, args, strict=True)):
            found.update(trial)
            return True
    return False


def merge_epilogues(graph: Graph, matches: Mapping[Op, Match]) -> Graph:
    """The graph with each op and the ops of its match as one, at the place of the last of them."""
    at = {match.ops[-1]: _fused(op, match) for op, match in matches.items()}
    gone = {*matches, *(o for match in matches.values() for o in match.ops)}
    return graph.with_ops([at.get(op, op) for op in graph.ops if op in at or op not in gone])


def _fused(op: Op, match: Match) -> Op:
    last, call = match.ops[-1], match.call
    second = () if match.second is None else (match.second,)
    origins = tuple(dict.fromkeys(o.origin for o in match.ops if o.origin >= 0 and o.origin != op.origin))
    assert op.call is not None
    spare = followed(op.call.spare, op.output, match.ops, match.besides, interpret, call)
    # The leading dims may be others than at capture.
    call = replace(call, strides=op.call.strides, spare=spare, refused=op.call.refused)
    return replace(
        op, call=call, inputs=(*op.inputs, *second), outputs=last.outputs, absorbed=(*op.absorbed, *origins)
    )


def _place(extent: Expr, index: Expr) -> Expr:
    return dims.ZERO if extent is dims.ONE else index
