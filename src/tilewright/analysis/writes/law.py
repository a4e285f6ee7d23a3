"""The law of writes in place: what is stored over an input is read by nobody any more.

A write may be done where its input lies if the value becomes of the input by *changes*, one after the other, and at the
time of each no step, output or other write reads what was there before, but for the kernel that stores: it may read the
elements that it stores over, each at the point that stores it. A change is a kernel that computes all elements, one
that computes a part (`LibraryCall.part`), or a call that has a form for this (`LibraryCall.over`). The value lies as
the input does, and no two elements of the input share a place. That no other input does is what each way into a plan
sees to: `capture/aliasing/called` under torch.compile, `runtime/call/fast_path` behind it.

Nothing is decided here about what is fast, and nothing is changed: the answer says for each write `None`, or the first
condition that fails. `order` looks at the loops of a tile program, which this one knows nothing of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tilewright.analysis.runtime_checks import divisor, from_data, inside_of
from tilewright.ir.expr import Axis, Expr, Symbol, axis, substitute, symbol, walk
from tilewright.ir.graph import LibraryCall, Op, Operand, Value, Write
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Step, ViewStep, results_of
from tilewright.ir.ops.strided import nested
from tilewright.ir.sizes import dims
from tilewright.ir.writes import (
    NOTHING_IN_PLACE,
    DoneInPlace,
    PlaceFromData,
    StoredInInput,
    WriteCopied,
    WriteVerdict,
)
from tilewright.tuning.search_limits import IN_PLACE

Keeps = Callable[[Kernel, Value, StoredInInput], bool]
"""Whether the loops of a kernel that stores a value so load each element before they store over it, and store it
there."""


def decide(cover: Cover, keeps: Keeps = lambda kernel, value, stored: True) -> DoneInPlace:
    """The answer of the law for each write of a cover."""
    graph = cover.graph
    if not graph.writes:
        return NOTHING_IN_PLACE
    reads = MemoryReads(cover)
    verdicts: list[WriteVerdict] = []
    stored: dict[Value, StoredInInput] = {}
    calls: dict[Op, int] = {}
    for w in graph.writes:
        try:
            found = _Chain(reads, w, keeps).changes()
            if stored.keys() & found.stored or calls.keys() & found.calls:
                raise _Copied(WriteCopied.SEVERAL)  # it is copied from where it lies for the other write
        except _Copied as why:
            verdicts.append(WriteVerdict(w.input, why.reason))
            continue
        stored |= found.stored
        calls |= found.calls
        verdicts.append(WriteVerdict(w.input, None))
    return DoneInPlace(tuple(verdicts), stored, calls)


class _Copied(Exception):
    def __init__(self, reason: WriteCopied) -> None:
        super().__init__(reason.value)
        self.reason = reason


class MemoryReads:
    """When each value of a cover is made, of whose memory it is, and who reads it when."""

    def __init__(self, cover: Cover) -> None:
        self.cover, self.graph = cover, cover.graph
        self.maker: dict[Value, tuple[int, Step]] = {}
        self.root: dict[Value, Value] = {}
        self.of: dict[Value, list[tuple[int, Step, Value]]] = {}
        """The reads of a memory, by the value that owns it: time, step, and the value that is read."""
        for time, step in enumerate(cover.steps):
            for v in _read_by(step):
                self.of.setdefault(self.owner(v), []).append((time, step, v))
            for v in results_of(step):
                self.maker[v] = time, step
                source = _shown_by(step)
                self.root[v] = v if source is None else self.owner(source)

        graph = cover.graph
        self.shown = frozenset(self.owner(v) for v in graph.outputs if isinstance(v, Value))
        """Memories that outputs show."""
        self.copied = frozenset(self.owner(w.value) for w in graph.writes)
        """Memories that hold what is written."""
        self.times_written = Counter(w.input for w in graph.writes)
        self._may_fail: dict[Kernel, bool] = {}

    def may_fail(self, kernel: Kernel) -> bool:
        """Whether a kernel tests what it computes with."""
        if kernel not in self._may_fail:
            self._may_fail[kernel] = any(map(may_fail, kernel.ops))
        return self._may_fail[kernel]

    def owner(self, v: Value) -> Value:
        """The value whose memory `v` is, as long as nothing is done in place."""
        return self.root.get(v, v)

    def strides(self, v: Value) -> tuple[Expr, ...]:
        """How a value lies."""
        layout = self.cover.layouts.get(v) or self.graph.layouts.get(v)
        return layout.strides if layout is not None else dims.dense_strides(v.shape)


def _read_by(step: Step) -> tuple[Value, ...]:
    match step:
        case Kernel():
            return step.inputs
        case LibraryStep():
            return step.op.inputs
        case ViewStep():
            return ()  # who reads the view reads its memory


def _shown_by(step: Step) -> Value | None:
    """Whose memory the results of a step are; None: their own. (What a call's schema leaves open is copied where the
    call gives memory of an operand.)"""
    if isinstance(step, ViewStep):
        return step.source
    if isinstance(step, LibraryStep) and step.op.call is not None:
        k = reused_operand(step.op.call)
        return step.op.inputs[k] if k is not None and 0 <= k < len(step.op.inputs) else None
    return None


def reused_operand(call: LibraryCall) -> int | None:
    """Which operand's memory the results are (-1: none), as the call or its callable's schema says; None if unknown."""
    if call.reuses is not None:
        return call.reuses
    schema = getattr(call.function, "_schema", None)
    if schema is None:
        return None
    return 0 if any(r.alias_info is not None for r in schema.returns) else -1


@dataclass(frozen=True, slots=True)
class _Change:
    """`value` is what lies there when step `step` of the cover is done."""

    value: Value
    time: int
    step: Kernel | LibraryStep

    @property
    def part(self) -> tuple[Expr, ...] | None:
        """Where the lines that it changes begin; None: it may change any element."""
        call = self.step.op.call if isinstance(self.step, LibraryStep) else None
        return call.part if call is not None else None


class _Chain:
    """The values that one after the other lie in the memory of an input."""

    def __init__(self, reads: MemoryReads, write: Write, keeps: Keeps) -> None:
        self.reads, self.write, self.keeps = reads, write, keeps
        given = reads.graph.inputs[write.input]
        assert isinstance(given, Value)
        self.given = given
        self.strides = reads.strides(given)
        self.old: list[Value] = [given]
        """What lay there before the next change, the input first."""
        self.last = -1
        """When that was stored."""

    def changes(self) -> DoneInPlace:
        """What is done in place. Raises _Copied where the law forbids it."""
        graph, k = self.reads.graph, self.write.input
        if self.reads.times_written[k] > 1:
            raise _Copied(WriteCopied.SEVERAL)
        alone = nested(self.given.shape, self.strides)
        moving = sum(n is not dims.ONE for n in self.given.shape)
        if alone is None or len(alone) < moving or any(place == k for place, _ in graph.placed):
            raise _Copied(WriteCopied.OVERLAPS)
        stored: dict[Value, StoredInInput] = {}
        calls: dict[Op, int] = {}
        for change in self._found():
            if not self._lies_alike(change.value):
                raise _Copied(WriteCopied.LAYOUT)
            made = self._placed(change)
            stored |= made.stored
            calls |= made.calls
            self.old.append(change.value)
        if self._is_viewed():
            raise _Copied(WriteCopied.VIEWED)
        return DoneInPlace((), stored, calls)

    def _is_viewed(self) -> bool:
        """Whether an output shows the new value in another form at sizes that are not known: it is then no memory of an
        input by our books, and would be a copy."""
        graph, new = self.reads.graph, self.write.value
        views = [
            v for v in graph.outputs if isinstance(v, Value) and v is not new and self.reads.owner(v) is new
        ]
        return bool(views) and bool(graph.symbols())

    def _found(self) -> list[_Change]:
        """The changes that lead to the value that is written, in order."""
        found: list[_Change] = []
        value = self.write.value
        while value is not self.given:
            time, step = self.reads.maker.get(value, (-1, None))
            if isinstance(step, Kernel):
                found.append(_Change(value, time, step))
                break
            if not isinstance(step, LibraryStep):
                raise _Copied(WriteCopied.OTHER_BASE if found else WriteCopied.GIVEN)
            call = step.op.call
            if call is None or (call.part is None and (call.over is None or not call.args or call.apart)):
                raise _Copied(WriteCopied.CALL)
            if call.args[0] != Operand(0) or len(step.op.outputs) != 1:
                raise _Copied(WriteCopied.CALL)
            if _times_read((call.args, [v for _, v in call.kwargs]), Operand(0)) > 1:
                raise _Copied(WriteCopied.OTHER_ELEMENTS)
            found.append(_Change(value, time, step))
            value = step.op.inputs[0]
        if not found:
            raise _Copied(WriteCopied.GIVEN)
        return found[::-1]

    def _lies_alike(self, v: Value) -> bool:
        triples = zip(self.given.shape, self.strides, self.reads.strides(v), strict=True)
        return v.dtype is self.given.dtype and all(n is dims.ONE or dims.equal(a, b) for n, a, b in triples)

    def _placed(self, change: _Change) -> DoneInPlace:
        """How a change is stored; `last` becomes the time at which it is."""
        step, part = change.step, change.part
        if isinstance(step, Kernel):
            return self._by_kernel(step, change, change.value, (dims.ZERO,) * len(self.given.shape))
        if part is not None:
            lines = step.op.inputs[1]
            maker = self.reads.maker.get(lines, (-1, None))[1]
            if isinstance(maker, Kernel) and self._is_only_for(lines, step):
                try:
                    return self._by_kernel(maker, change, lines, part)
                except _Copied:
                    pass  # the lines are copied where they are needed
        line = self._line(step)
        if line is not None:
            maker, value, at = line
            try:
                return self._by_kernel(maker, change, value, (dims.ZERO,) * len(self.given.shape), at)
            except _Copied:
                pass  # the call does it
        self._check_readers(change, change.time)
        if any(self.reads.owner(v) in self.old for v in step.op.inputs[1:]):
            raise _Copied(WriteCopied.OTHER_ELEMENTS)
        self.last = change.time
        return DoneInPlace(calls={step.op: self.write.input})

    def _line(self, step: LibraryStep) -> tuple[Kernel, Value, PlaceFromData] | None:
        """The kernel that makes the line which a call puts somewhere, the line, and where that is, if the kernel may
        know it."""
        line = step.op.call.line if step.op.call is not None else None
        if line is None:
            return None
        source, index = step.op.inputs[line.source], step.op.inputs[line.index]
        time, maker = self.reads.maker.get(source, (-1, None))
        known = self.reads.maker.get(index, (-1, None))[0]
        if not isinstance(maker, Kernel) or known >= time or not self._is_only_for(source, step):
            return None
        shape = tuple(dims.ONE if d == line.dim else n for d, n in enumerate(self.given.shape))
        if len(source.shape) != len(shape) or not all(map(dims.equal, source.shape, shape)):
            return None
        if self.reads.owner(index) in self.old:
            return None
        reach = (
            dims.mul(dims.sub(n, dims.ONE), s) for n, s in zip(self.given.shape, self.strides, strict=True)
        )
        size = dims.add(dims.ONE, *reach)
        at = PlaceFromData(index, self.strides[line.dim], self.given.shape[line.dim], size, line.signed)
        return maker, source, at

    def _is_only_for(self, lines: Value, step: LibraryStep) -> bool:
        """Whether nobody else reads the lines, and they lie as those that they replace."""
        readers = self.reads.of.get(lines, [])
        lies = all(
            n is dims.ONE or dims.equal(a, b)
            for n, a, b in zip(lines.shape, self.strides, self.reads.strides(lines), strict=True)
        )
        return [s for _, s, _ in readers] == [step] and lines not in self.reads.graph.kept() and lies

    def _by_kernel(
        self,
        kernel: Kernel,
        change: _Change,
        value: Value,
        starts: tuple[Expr, ...],
        at: PlaceFromData | None = None,
    ) -> DoneInPlace:
        """A kernel stores `value` where it lies in the input."""
        time, _ = self.reads.maker[value]
        self._check_readers(change, time)
        if self.reads.may_fail(kernel):
            raise _Copied(WriteCopied.MAY_FAIL)
        over = frozenset(v for v in kernel.inputs if self.reads.owner(v) in self.old)
        stored = StoredInInput(self.write.input, starts, over, at)
        if over:
            if (
                at is not None
                or not over <= set(self.old)
                or not reads_what_it_stores(kernel, value, starts, over)
            ):
                raise _Copied(WriteCopied.OTHER_ELEMENTS)
        if (over or at is not None) and not self.keeps(kernel, value, stored):
            raise _Copied(WriteCopied.ORDER)
        self.last = time
        ops = () if isinstance(change.step, Kernel) else (change.step.op,)
        return DoneInPlace(stored={value: stored}, calls=dict.fromkeys(ops, stored.input))

    def _check_readers(self, change: _Change, time: int) -> None:
        """Raise _Copied if anybody needs what was there before once it is changed at that time."""
        if time <= self.last:
            raise _Copied(WriteCopied.READ_LATER)
        owners = set(self.old)
        if not self.reads.shown.isdisjoint(owners):
            raise _Copied(WriteCopied.SHOWN)
        if not self.reads.copied.isdisjoint(owners):
            raise _Copied(WriteCopied.READ_LATER)
        for owner in self.old:
            for when, step, v in self.reads.of.get(owner, ()):
                if step is change.step and v is self.old[-1]:
                    continue
                begins = isinstance(step, LibraryStep) and step.op.call is not None and step.op.call.starts
                if when > time or begins or (when == time and not isinstance(step, Kernel)):
                    raise _Copied(WriteCopied.READ_LATER)


def may_fail(op: Op) -> bool:
    """Whether an op tests what it computes with: a kernel says that only when all of it has run."""
    for x in (x for b in (op.expr.body if op.expr is not None else ()) for x in walk(b)):
        if x.op == "checked" or divisor(x) is not None:
            return True
        if x.op == "read" and isinstance(x.value, int):
            places = zip(x.args, op.inputs[x.value].shape, strict=True)
            if any(from_data(i) and inside_of(i, n) is not None for i, n in places):
                return True
    return False


def _times_read(args: object, operand: Operand) -> int:
    if isinstance(args, (list, tuple)):
        return sum(_times_read(a, operand) for a in cast(Sequence[object], args))
    return int(args == operand)


def reads_what_it_stores(
    kernel: Kernel, stored: Value, starts: Sequence[Expr], old: frozenset[Value]
) -> bool:
    """Whether results that are made of the `old` values are made, along each dim, of the element that is stored over
    or of all that a loop runs through: never of one beside it, nor along another dim. (That all of these are loaded
    before is seen in the loops: see `order`.)"""
    makers = {v: op for op in kernel.ops for v in op.outputs}
    reached = _made_of(kernel, old)
    for v in kernel.outputs:
        if v not in reached:
            continue
        expr = makers[v].expr
        assert expr is not None
        alike = len(v.shape) == len(stored.shape) and all(map(dims.equal, v.shape, stored.shape))
        points = tuple(_at(a) if alike else _any_of(a) for a in expr.axes)
        want = points if alike else (None,) * len(starts)
        try:
            for place in _elements(v, points, makers, old & reached):
                moved = (dims.sub(e, start) for e, start in zip(place, starts, strict=True))
                if not all(_is_passed(e, w) for e, w in zip(moved, want, strict=True)):
                    return False
        except _TooMany:
            return False
    return True


def _at(a: Axis) -> Expr:
    return dims.ZERO if a.extent is dims.ONE else axis(a)


def _any_of(a: Axis) -> Expr:
    """A place along an axis, whichever."""
    return dims.ZERO if a.extent is dims.ONE else symbol(f"{_ANY}{a.name}", 0)


_ANY = "any of "


def _is_passed(place: Expr, want: Expr | None) -> bool:
    """Whether a place is the wanted one, or one of those that a loop runs through."""
    if want is not None and dims.equal(place, want):
        return True
    if want is None and place is dims.ZERO:
        return True
    return isinstance(place.value, Symbol) and place.value.name.startswith(_ANY)


class _TooMany(Exception):
    pass


def _made_of(kernel: Kernel, old: frozenset[Value]) -> frozenset[Value]:
    found = set(old)
    for op in kernel.ops:
        if found.intersection(op.inputs):
            found.update(op.outputs)
    return frozenset(found)


def _elements(
    v: Value, at: tuple[Expr, ...], makers: Mapping[Value, Op], old: frozenset[Value]
) -> Iterator[tuple[Expr, ...]]:
    """The places of the `old` values of which the element of `v` at a place is made. Raises _TooMany."""
    todo = [(v, at)]
    seen: set[tuple[Value, tuple[Expr, ...]]] = set()
    while todo:
        v, at = todo.pop()
        if (v, at) in seen:
            continue
        seen.add((v, at))
        if len(seen) > IN_PLACE.max_followed_reads:
            raise _TooMany
        if v in old:
            yield at
            continue
        op = makers.get(v)
        if op is None or op.expr is None:
            continue
        place = {axis(a): i for a, i in zip(op.expr.axes, at, strict=True)}
        ran = (*op.expr.reduce, *((op.expr.scan,) if op.expr.scan is not None else ()))
        place |= {axis(a): _any_of(a) for a in ran}
        for r in op.expr.reads():
            assert isinstance(r.value, int)
            todo.append((op.inputs[r.value], tuple(substitute(a, place) for a in r.args)))
