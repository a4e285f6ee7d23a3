"""From a cover to a plan: who owns which memory, how long, in which order, and how each size is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, zip_longest

from tilewright.analysis.size_hints import SizeHints
from tilewright.analysis.writes.law import reused_operand
from tilewright.errors import VerifyError
from tilewright.ir.dtype import DType
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph, Layout, Op, Share, Shares, Value, symbols_in
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, ViewStep
from tilewright.ir.kernel import Step as CoverStep
from tilewright.ir.sizes import dims

from .bind import bind_symbols, check_bound, names_in, symbol_name
from .data import Buffer, CallStep, Copy, Home, Launch, Launches, Measure, Plan, PlanSegment, Spec, Step, View
from .lazy_allocation import is_worth_it, touched, with_makes, with_own_memory
from .needed_sizes import needed_sizes
from .verify import check_memory

Time = Callable[[Kernel | LibraryStep], Expr | None]
"""Nanoseconds that one core takes for a step; None where nothing is known."""

Kernels = Mapping[Kernel, tuple[int, tuple[Value, ...]]]
"""Kernel of the cover -> its number in the built unit, and the values behind its parameters."""


def build_plan(
    cover: Cover,
    kernels: Kernels,
    symbols: Sequence[str] = (),
    shares: Sequence[Share] | None = None,
    *,
    core_ns: Time = lambda step: None,
    lazy_hints: SizeHints | None = None,
) -> Plan:
    """The plan of `cover`.

    `symbols` is the order in which generated code receives sizes. `shares[k]` says whose memory output k may be, as in
    the program: an input's, or that of outputs in the same storage; other outputs get memory of their own. `core_ns`
    says how long one core takes for a step. With `lazy_hints`, memory is taken when it is needed, for plans whose
    inputs are given back while they run, or whose results pile up; its sizes say what is worth it. Raises VerifyError
    where a value has no home or a size symbol cannot be found.
    """
    plan = _Builder(cover, kernels, shares, core_ns, lazy_hints).build(tuple(symbols))
    check_memory(plan)
    return plan


class _Builder:
    def __init__(
        self,
        cover: Cover,
        kernels: Kernels,
        shares: Sequence[Share] | None,
        core_ns: Time,
        lazy_hints: SizeHints | None,
    ) -> None:
        self.cover = cover
        self.in_place = cover.in_place
        self.changes: dict[int, int] = {}
        """How often the memory of each buffer was changed so far by what is stored where it lies."""
        self.by_kernels: set[int] = set()
        """The numbers of inputs that kernels store into."""
        self.core_ns = core_ns
        self.lazy_hints = lazy_hints
        """The sizes at which it is weighed whether memory is taken when it is needed; None: it is not."""
        self.graph: Graph = cover.graph
        self.kernels = kernels
        alone = (Share(Shares.NOTHING, k) for k in range(len(self.graph.outputs)))
        self.shares = tuple(shares if shares is not None else alone)
        self.buffers: list[Buffer] = []
        self.number: dict[Value, int] = {}
        self.segments: list[PlanSegment] = []
        self.steps: list[Step] = []
        self.shown: set[int] = set()
        """View buffers that already have a tensor."""
        self.clock = 0
        self.started: dict[int, tuple[int, ...]] = {}
        """Results of collectives that nothing has waited for yet, with the buffers that these may still read."""

    def build(self, symbols: tuple[str, ...]) -> Plan:
        graph = self.graph
        arguments = [self._input(k, v) for k, v in enumerate(graph.inputs)]
        for k, v in enumerate(graph.constants):
            self._add(v, Home.CONSTANT, index=k)
        inputs = tuple(
            self.buffers[b].spec if b >= 0 else v for b, v in zip(arguments, graph.inputs, strict=True)
        )
        bindings = bind_symbols(inputs)  # pyright: ignore[reportArgumentType]  (what has no buffer is a scalar)
        known = {b.symbol for b in bindings}
        found_symbols = set(graph.found_by_calls()) - known
        for step, listed in self._listed():
            self._check_known(step, found_symbols - known)
            match step:
                case Kernel():
                    self._kernel(step, listed)
                case LibraryStep():
                    self._library(step, known)
                case ViewStep():
                    source = self._of(step.source)
                    self._add(
                        step.value, Home.VIEW, strides=step.layout.strides, source=source, offset=step.offset
                    )
            self.clock += 1
        outputs = self._outputs()
        self._writes()
        self.segments.append(PlanSegment(tuple(self.steps)))
        self._own_what_crosses()
        for operands in self.started.values():
            self._own(operands)
        self._preconditions({b.symbol for b in bindings})
        returned = {o for o in outputs if isinstance(o, int)}
        is_lazy = self.lazy_hints is not None and is_worth_it(self.segments, self.buffers, self.lazy_hints)
        if self.lazy_hints is not None and is_lazy:
            self.buffers = list(with_own_memory(self.buffers, self.lazy_hints))
        segments = _with_frees(self.segments, self.buffers, returned)
        plan = Plan(
            inputs=inputs,  # pyright: ignore[reportArgumentType]
            arguments=tuple(arguments),
            bindings=bindings,
            buffers=tuple(self.buffers),
            segments=with_makes(segments, self.buffers) if is_lazy else segments,
            outputs=outputs,
            written=tuple(sorted({w.input for w in graph.writes})),
            changed=tuple(sorted(self.by_kernels)),
            writes=tuple((v.input, v.reason.value if v.reason else "") for v in self.in_place.verdicts),
            symbols=symbols,
            placed=graph.placed,
        )
        check_bound(plan)
        return plan

    def _preconditions(self, known: set[str]) -> None:
        """Each precondition stands where its sizes are first known; `known` are those of the inputs."""
        pending = [*self.graph.preconditions, *needed_sizes(self.graph)]
        for number, segment in enumerate(self.segments):
            now = [p for p in pending if known.issuperset(names_in((p.size, p.count or p.size)))]
            pending = [p for p in pending if p not in now]
            self.segments[number] = replace(segment, preconditions=tuple(dict.fromkeys(now)))
            known |= {m.symbol for m in segment.measures}

    def _own_what_crosses(self) -> None:
        """An arena ends with its segment: what a later segment reads gets memory of its own."""
        for number, segment in enumerate(self.segments):
            for b in {self._root(x) for step in segment.steps for x in touched(step)}:
                if self.buffers[b].home is Home.ARENA and self.buffers[b].segment < number:
                    self.buffers[b] = replace(self.buffers[b], home=Home.OUTPUT)

    def _own(self, buffers: Sequence[int]) -> None:
        """Give buffers memory of their own instead of a part of an arena."""
        for b in map(self._root, buffers):
            if self.buffers[b].home is Home.ARENA:
                self.buffers[b] = replace(self.buffers[b], home=Home.OUTPUT)

    def _wait(self, results: Sequence[int]) -> None:
        """Keep what the collectives read up to now that made `results`: others may have read it until now."""
        for operands in [self.started.pop(r) for r in map(self._root, results) if r in self.started]:
            for b in operands:
                self._extend(b)
            here = len(self.segments)
            self._own([b for b in operands if self.buffers[self._root(b)].segment != here])

    # --- buffers ---

    def _strides(self, v: Value) -> tuple[Expr, ...]:
        layout = self.cover.layouts.get(v) or self.graph.layouts.get(v)
        return layout.strides if layout else dims.dense_strides(v.shape)

    def _add(
        self, v: Value, home: Home, *, strides: tuple[Expr, ...] | None = None, index: int = -1, source: int = -1,
        offset: Expr = dims.ZERO,
    ) -> int:  # fmt: skip
        spec = Spec(v.dtype, v.shape, self._strides(v) if strides is None else strides)
        place = len(self.segments)
        version = self.buffers[source].version if source >= 0 else 0
        self.buffers.append(
            Buffer(spec, home, index, source, offset, self.clock, self.clock + 1, place, version)
        )
        self.number[v] = len(self.buffers) - 1
        return self.number[v]

    def _input(self, k: int, v: Value | Expr) -> int:
        if isinstance(v, Expr):
            return -1
        layout = self.graph.layouts.get(v)
        return self._add(v, Home.INPUT, strides=layout.strides if layout else None, index=k)

    def _of(self, v: Value) -> int:
        found = self.number.get(v)
        if found is None:
            raise VerifyError(f"{v} is read before any step makes it", phase="plan")
        self._extend(found)
        return found

    def _extend(self, b: int) -> None:
        """Keep buffer `b`, and what it is a view of, up to now."""
        while b >= 0:
            self.buffers[b] = replace(self.buffers[b], end=max(self.buffers[b].end, self.clock + 1))
            b = self.buffers[b].source

    def _root(self, b: int) -> int:
        while self.buffers[b].source >= 0:
            b = self.buffers[b].source
        return b

    def _tensor(self, b: int) -> int:
        """Buffer `b`, with a step that makes its tensor if it is a view without one."""
        if self.buffers[b].home is Home.VIEW and b not in self.shown:
            self._tensor(self.buffers[b].source)
            self.steps.append(View(b))
            self.shown.add(b)
        return b

    # --- steps ---

    def _listed(self) -> Iterator[tuple[CoverStep, range]]:
        """The steps, each with the times at which those of its list run."""
        steps = self.cover.steps
        keys = [self._list_of(step) for step in steps]
        for key, run in groupby(range(len(steps)), lambda k: keys[k] or k):
            times = list(run)
            listed = range(times[0], times[-1] + 1) if isinstance(key, tuple) and len(times) > 1 else range(0)
            yield from ((steps[k], listed) for k in times)

    def _list_of(self, step: CoverStep) -> tuple[int, int] | None:
        """The numbers of a kernel's list and of its program."""
        if not isinstance(step, Kernel) or step not in self.cover.lists:
            return None
        return self.cover.lists[step], self.kernels[step][0]

    def _kernel(self, kernel: Kernel, listed: range) -> None:
        number, params = self.kernels[kernel]
        lines = {kernel.outputs[b] for b, _ in kernel.lines}
        for v in kernel.outputs:
            if v in self.in_place.stored:
                stored = self.in_place.stored[v]
                if (stored.at is None) == (v in lines):
                    raise VerifyError("a line is stored where its kernel does not put it", phase="plan")
                self._change(v, stored.input, stored.starts)
                self.by_kernels.add(stored.input)
            elif v in lines:
                raise VerifyError("a kernel stores a line where no input is", phase="plan")
            elif v in self.in_place.successors:
                self._succeed(v, self.in_place.successors[v])
            elif v not in self.number:
                self._add(v, Home.ARENA)
        places = tuple(self._of(v) for v in params)
        self._hold(places, listed)
        which = self.cover.lists[kernel] if listed else -1
        launch = Launch(number, places, self.core_ns(kernel), stores=len(kernel.outputs), list=which)
        last = self.steps[-1] if self.steps else None
        if isinstance(last, Launches):
            self.steps[-1] = Launches((*last.launches, launch))
        else:
            self.steps.append(Launches((launch,)))

    def _hold(self, buffers: Sequence[int], times: range) -> None:
        """Keep what the kernels of a list read and make apart for all of the list."""
        for b in buffers:
            while times and b >= 0:
                held = self.buffers[b]
                start = min(held.start, times.start) if held.start in times else held.start
                self.buffers[b] = replace(held, start=start, end=max(held.end, times.stop))
                b = held.source

    # --- changes of inputs where they lie ---

    def _change(self, v: Value, k: int, starts: Sequence[Expr]) -> int:
        """A buffer in the memory of input `k`, some places behind its start, that the next step fills with `v`."""
        target = self._argument(k)
        strides = self.buffers[target].spec.strides
        offset = dims.add(dims.ZERO, *(dims.mul(s, n) for s, n in zip(starts, strides, strict=True)))
        self.changes[target] = self.changes.get(target, 0) + 1
        self._extend(target)
        return self._changed(self._add(v, Home.VIEW, strides=strides, source=target, offset=offset), target)

    def _changed(self, b: int, target: int) -> int:
        """Buffer `b` is what lies in the memory of buffer `target` now."""
        self.buffers[b] = replace(self.buffers[b], version=self.changes[target])
        return b

    def _succeed(self, v: Value, old: Value) -> None:
        """A buffer where `old` lies, which the next step fills with `v`."""
        source = self._of(old)
        root = self._root(source)
        self.changes[root] = self.changes.get(root, 0) + 1
        self._changed(self._add(v, Home.VIEW, source=source), root)

    def _part(self, op: Op, part: tuple[Expr, ...], k: int) -> None:
        """The lines of a part get into input `k`, if the kernel that made them did not put them there; the whole is
        then what lies there."""
        lines = op.inputs[1]
        if lines not in self.in_place.stored:
            source = self._tensor(self._of(lines))
            box = Value(-1, lines.shape, lines.dtype)
            self.steps.append(Copy(self._tensor(self._change(box, k, part)), source))
        self._shown_whole(op, k)

    def _shown_whole(self, op: Op, k: int) -> None:
        """The result of an op is what lies in input `k` now."""
        target = self._argument(k)
        strides = self.buffers[target].spec.strides
        self._changed(self._add(op.output, Home.VIEW, strides=strides, source=target), target)

    def _library(self, step: LibraryStep, known: set[str]) -> None:
        op, call = step.op, step.op.call
        if call is None:
            raise VerifyError("a library step without a call", phase="plan", op=op.name)
        changed = self.in_place.calls.get(op)
        if changed is not None and call.part is not None:
            self._part(op, call.part, changed)
            return
        if (
            changed is not None
            and call.line is not None
            and op.inputs[call.line.source] in self.in_place.stored
        ):
            self._shown_whole(op, changed)  # a kernel has put the line there
            return
        if changed is not None:
            assert call.over is not None
            lies = (None, *call.lies[1:]) if call.lies else ()
            call = replace(call, function=call.over, reuses=0, strides=(), lies=lies, spare=None)
        inputs = tuple(
            self._lying(self._of(v), strides, call.apart)
            for v, strides in zip_longest(op.inputs, call.lies[: len(op.inputs)])
        )
        alias = reused_operand(call)
        source = inputs[alias] if alias is not None and 0 <= alias < len(inputs) else -1
        outputs = [
            self._add(
                v, Home.LIBRARY, strides=call.strides[k] if k < len(call.strides) else None, source=source
            )
            for k, v in enumerate(op.outputs)
        ]
        if changed is not None:
            target = self._argument(changed)
            self.changes[target] = self.changes.get(target, 0) + 1
            self._changed(outputs[0], target)
        if call.is_collective:
            self._wait(inputs)
        if call.starts:
            self.started |= dict.fromkeys(outputs, inputs)
        fresh = [
            Measure(symbol_name(size), b, d)
            for v, b in zip(op.outputs, outputs, strict=True)
            for d, size in enumerate(v.shape)
            if size.op == "symbol" and symbol_name(size) not in known
        ]
        for e in op.binds:
            outputs.append(self._number(e.dtype))
            if e.op == "symbol" and symbol_name(e) not in known:
                fresh.append(Measure(symbol_name(e), outputs[-1], -1))
        self.steps.append(
            CallStep(call, inputs, tuple(outputs), alias is None, self.core_ns(step), self._place(op.origin))
        )
        if fresh:
            known |= {m.symbol for m in fresh}
            self.segments.append(
                PlanSegment(tuple(self.steps), tuple({m.symbol: m for m in reversed(fresh)}.values()))
            )
            self.steps = []

    def _check_known(self, step: Kernel | LibraryStep | ViewStep, unknown: set[str]) -> None:
        """Raise VerifyError if a step reads sizes or numbers that a later call tells: a kernel would take them as 0."""
        if not unknown:
            return
        told = symbols_in((step.op.outputs, step.op.binds)) if isinstance(step, LibraryStep) else set[str]()
        early = (symbols_in(step) - told) & unknown
        if early:
            raise VerifyError(
                f"a step reads {', '.join(sorted(early))} before the call that tells it", phase="plan"
            )

    def _place(self, origin: int) -> str:
        return self.graph.origins[origin].place if origin >= 0 else ""

    def _number(self, dtype: DType) -> int:
        place = len(self.segments)
        self.buffers.append(
            Buffer(Spec(dtype, (), ()), Home.NUMBER, start=self.clock, end=self.clock + 1, segment=place)
        )
        return len(self.buffers) - 1

    # --- what leaves ---

    def _outputs(self) -> tuple[int | Expr | None, ...]:
        taken: dict[int, int] = {}  # root buffer -> the storage of the outputs that it is
        out: list[int | Expr | None] = []
        for k, v in enumerate(self.graph.outputs):
            if not isinstance(v, Value):
                out.append(v)
                continue
            b = self._of(v)
            layout = self.graph.returned[k] if k < len(self.graph.returned) else None
            out.append(self._leave(layout or self.graph.layouts.get(v), b, taken, self.shares[k]))
        return tuple(out)

    def _leave(self, layout: Layout | None, b: int, taken: dict[int, int], share: Share) -> int:
        wanted = layout.strides if layout else self.buffers[b].spec.strides
        root = self._root(b)
        home = self.buffers[root].home
        foreign = home is Home.CONSTANT or (home is Home.INPUT and Shares.INPUT not in share.kind)
        second = root in taken and (not share.kind or taken[root] != share.storage)
        if _same_strides(wanted, self.buffers[b].spec) and not foreign and not second:
            taken.setdefault(root, share.storage)
            if home is Home.ARENA:
                self.buffers[root] = replace(self.buffers[root], home=Home.OUTPUT)
            if wanted != self.buffers[b].spec.strides:  # in dims of size 1, at which programs look too
                self.buffers[b] = replace(self.buffers[b], spec=replace(self.buffers[b].spec, strides=wanted))
            return self._tensor(b)
        return self._copied(b, wanted)

    def _copied(self, b: int, strides: tuple[Expr, ...]) -> int:
        """A copy of buffer `b` in memory of its own."""
        self._tensor(b)
        spec = replace(self.buffers[b].spec, strides=strides)
        place = len(self.segments)
        self.buffers.append(Buffer(spec, Home.OUTPUT, start=self.clock, end=self.clock + 1, segment=place))
        self.steps.append(Copy(len(self.buffers) - 1, b))
        return len(self.buffers) - 1

    def _lying(self, b: int, strides: tuple[Expr, ...] | None, apart: bool = False) -> int:
        """The tensor of buffer `b`, or of a copy if it must have other strides or a storage of its own."""
        spec = self.buffers[b].spec
        if apart:
            return self._copied(b, spec.strides if strides is None else strides)
        return (
            self._tensor(b) if strides is None or _same_strides(strides, spec) else self._copied(b, strides)
        )

    def _writes(self) -> None:
        """Writes into inputs come last; a value that lives in an input which another write changes is saved before."""
        pending: list[tuple[int, int]] = []
        copied = [w for w in self.graph.writes if w.input not in self._done()]
        targets = {self._argument(w.input) for w in copied}
        for w in copied:
            source, target = self._of(w.value), self._argument(w.input)
            root = self._root(source)
            if source == target:
                continue
            if root in targets:
                source = self._copied(source, dims.dense_strides(w.value.shape))
            pending.append((target, self._tensor(source)))
        self.steps += [Copy(target, source) for target, source in pending]

    def _done(self) -> set[int]:
        """The numbers of the inputs in which their new values lie already."""
        return {v.input for v in self.in_place.verdicts if v.reason is None}

    def _argument(self, k: int) -> int:
        v = self.graph.inputs[k]
        if not isinstance(v, Value):
            raise VerifyError(f"input {k} is written to and is no tensor", phase="plan")
        return self.number[v]


def _same_strides(wanted: tuple[Expr, ...], spec: Spec) -> bool:
    """Whether two layouts are proved to address the same elements; strides of dims of size 1 do not matter."""
    return all(
        size is dims.ONE or dims.equal(a, b)
        for size, a, b in zip(spec.shape, wanted, spec.strides, strict=True)
    )


def _with_frees(
    segments: Sequence[PlanSegment], buffers: Sequence[Buffer], returned: set[int]
) -> tuple[PlanSegment, ...]:
    """Segments with the buffers that each step uses last (results of library calls, views, inputs)."""

    def chain(b: int) -> set[int]:
        found: set[int] = set()
        while b >= 0:
            found.add(b)
            b = buffers[b].source
        return found

    seen = {x for b in returned for x in chain(b)}
    seen |= {m.buffer for s in segments for m in s.measures}
    releasable = (Home.LIBRARY, Home.VIEW, Home.INPUT, Home.OUTPUT)
    out: list[PlanSegment] = []
    for segment in reversed(segments):
        frees: list[tuple[int, ...]] = []
        for step in reversed(segment.steps):
            last = {x for b in touched(step) for x in chain(b)} - seen
            seen |= last
            frees.append(tuple(sorted(b for b in last if buffers[b].home in releasable)))
        out.append(replace(segment, frees=tuple(reversed(frees))))
    return tuple(reversed(out))
