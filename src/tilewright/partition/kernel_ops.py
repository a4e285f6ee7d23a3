"""What of a graph needs kernels, and what does not: views that strides can say, ops that each reader computes for
itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from tilewright.analysis.size_hints import SizeHints
from tilewright.analysis.writes.law import reused_operand
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph, Layout, Op, Value
from tilewright.ir.kernel import Kernel, ViewStep
from tilewright.ir.sizes import dims
from tilewright.tuning.search_limits import GROUPS

from .layout import choose_layouts, returned_layouts, view_layout
from .recompute import find_recomputed


class GraphParts:
    """The parts of a graph from which kernels are made.

    `layouts` says how values lie in memory. `inlined` ops belong to each kernel that reads them; unless ops are to
    `fuse`, there are none. A value in `views` is memory of another, which kernels read in its place: its op is inlined,
    too. `shown` are outputs that the program returns as memory of something else, and `storages` numbers the storages
    of outputs in the program, where they are known."""

    def __init__(
        self, graph: Graph, hints: SizeHints, shown: frozenset[Value] = frozenset(),
        storages: Mapping[Value, int] | None = None, *, fuse: bool = True,
    ) -> None:  # fmt: skip
        self.graph, self.hints, self.shown = graph, hints, shown
        self.position = {op: n for n, op in enumerate(graph.ops)}
        self.producer = graph.producer()
        self.consumers = graph.consumers()
        self.layouts = choose_layouts(graph)
        self.layouts |= returned_layouts(graph, self.layouts, storages or {})
        self.kept_values = graph.kept()
        self.views = self.strided_views()
        parts = self.returned_parts(storages or {}, fuse=fuse)
        self.layouts |= {v: s.layout for v, s in parts.items()}
        self.views |= parts
        self.inlined = find_recomputed(graph, self.views, self.consumers, self.hints) if fuse else set[Op]()
        self.inlined |= {self.producer[v] for v in self.views if self._is_read_by_kernels(v)}

    def strided_views(self) -> dict[Value, ViewStep]:
        """Views that a library call or the caller reads, where strides can say them. Lines that replace others are
        none: a kernel puts them there."""
        found: dict[Value, ViewStep] = {}
        held = self._held()
        for op in filter(_is_view, self.graph.ops):
            readers = self.consumers.get(op.output, [])
            returned = op.output in self.shown and op.inputs[0] in held
            if not returned and (op.output in self.kept_values or not readers):
                continue
            if not returned and not all(_reads_strided(r, op.output) for r in readers):
                continue
            memory = view_layout(op, self.layouts)
            if memory is not None:
                layout, offset = memory
                found[op.output] = ViewStep(op.output, op.inputs[0], layout, offset)
                self.layouts[op.output] = layout
        return found

    def returned_parts(self, storages: Mapping[Value, int], *, fuse: bool) -> dict[Value, ViewStep]:
        """Outputs in one of the program's `storages` that stay parts of a value that is neither given nor returned
        itself: where memory of their own, at the strides that the program promises, would take more than that value,
        or as much and it is in memory anyway. Queries, keys and values of one product that the backward pass reads are
        such. So do outputs that are not proved to have no element in common: who writes into one sees it in the other.
        Of outputs in several storages that are made of one value (clones), those of one storage stay so."""
        held = self._held()
        found: dict[Value, dict[int, list[ViewStep]]] = {}
        for op in filter(_is_view, self.graph.ops):
            source, v = op.inputs[0], op.output
            root = self._root(source)
            if v not in storages or held & {source, root} or root not in self.producer:
                continue
            memory = view_layout(op, self.layouts)
            promised = self.layouts.get(v, Layout(dims.dense_strides(v.shape)))
            if memory is not None and _lie_alike(v.shape, memory[0], promised):
                same = found.setdefault(root, {}).setdefault(storages[v], [])
                same.append(ViewStep(v, source, promised, memory[1]))
        views: dict[Value, ViewStep] = {}
        for root, groups in found.items():
            steps = max(groups.values(), key=lambda group: _stored(group, self.hints))
            free = [s for s in steps if self._costs_no_kernel(s, fuse=fuse)]
            chosen = free if self._is_no_larger(root, free) else []
            views |= {s.value: s for s in (*chosen, *meeting(steps))}
        return views

    def _costs_no_kernel(self, step: ViewStep, *, fuse: bool) -> bool:
        """Whether a library call makes what `step` shows, or kernels do not read it."""
        made = fuse and self.producer[step.source].call is not None
        return made or not self._is_read_by_kernels(step.value)

    def _root(self, v: Value) -> Value:
        """The value whose memory `v` is."""
        while v in self.views:
            v = self.views[v].source
        return v

    def _is_no_larger(self, root: Value, steps: Sequence[ViewStep]) -> bool:
        """Whether the value `root` takes no more memory than these parts of it would by themselves."""
        layout = self.layouts.get(root, Layout(dims.dense_strides(root.shape)))
        elements, stored = self.hints.estimate(_elements(root, layout)), _stored(steps, self.hints)
        around = (self.producer[root], *self.consumers.get(root, ()))
        return stored > elements or (stored == elements and any(op.call is not None for op in around))

    def _held(self) -> set[Value]:
        """What is given or returned, and what calls show of its memory, as other bits or as parts of complex values."""
        held = self.kept_values.union(v for v in self.graph.inputs if isinstance(v, Value))
        shown = {op.output: of for op in self.graph.ops if (of := _shown_by_call(op)) is not None}
        for v in self.kept_values & shown.keys():
            while v in shown:
                v = shown[v]
                held.add(v)
        for v, of in shown.items():
            if of in held:
                held.add(v)
        return held

    def _is_read_by_kernels(self, v: Value) -> bool:
        return any(r.call is None for r in self.consumers.get(v, ()))

    def generated(self) -> list[Op]:
        """Ops that need a kernel."""
        return [
            op
            for op in self.graph.ops
            if op.expr is not None and op not in self.inlined and op.outputs[0] not in self.views
        ]

    def read_from_memory(self) -> set[Value]:
        """The values that library calls, views and the caller read."""
        called = (v for op in self.graph.ops if op.call is not None for v in op.inputs)
        return self.kept_values.union(called, (step.source for step in self.views.values()))

    def kernel(self, places: Iterable[int], why: str = "") -> Kernel:
        """The kernel of the ops at these places, with the cheap ops that it computes for itself."""
        ops = [self.graph.ops[n] for n in sorted(places)]
        inside = set(ops)
        todo = list(ops)
        while todo:
            for v in todo.pop().inputs:
                p = self.producer.get(v)
                if p in self.inlined and p not in inside:
                    assert p is not None
                    inside.add(p)
                    todo.append(p)
        outputs = [v for op in ops for v in op.outputs if self.leaves(v, inside)]
        return Kernel(tuple(sorted(inside, key=self.position.__getitem__)), tuple(outputs), why)

    def leaves(self, v: Value, inside: set[Op]) -> bool:
        """Whether a value made by the ops `inside` is read elsewhere, also by ops that readers elsewhere compute for
        themselves."""
        todo, seen = [v], {v}
        while todo:
            v = todo.pop()
            if v in self.kept_values:
                return True
            for r in self.consumers.get(v, ()):
                if r not in self.inlined:
                    if r not in inside:
                        return True
                elif r.output not in seen:
                    seen.add(r.output)
                    todo.append(r.output)
        return False


def _reads_strided(reader: Op, v: Value) -> bool:
    """Whether a reader is a call that takes `v` as it lies: not as what it puts somewhere."""
    call = reader.call
    if call is None or call.part is not None:
        return False
    return call.line is None or reader.inputs[call.line.source] is not v


def _shown_by_call(op: Op) -> Value | None:
    """The operand whose memory the one result of a call is."""
    at = reused_operand(op.call) if op.call is not None and len(op.outputs) == 1 else None
    return op.inputs[at] if at is not None and 0 <= at < len(op.inputs) else None


def _is_view(op: Op) -> bool:
    return op.expr is not None and op.kernel < 0 and op.expr.is_view() and len(op.inputs) == 1


def _lie_alike(shape: Sequence[Expr], a: Layout, b: Layout) -> bool:
    """Whether two layouts are proved to address the same elements; strides of dims of size 1 do not matter."""
    triples = zip(shape, a.strides, b.strides, strict=True)
    return all(n is dims.ONE or dims.equal(x, y) for n, x, y in triples)


def meeting(steps: Sequence[ViewStep]) -> list[ViewStep]:
    """Those of some views of one value that are not proved to have no element in common with another one. Parts side by
    side (chunks, rows, columns) are told in one walk along them. Of many others all count."""
    if _are_in_a_row(steps):
        return []
    if len(steps) > GROUPS.max_compared_views:
        return list(steps)
    return [s for s in steps if any(t is not s and not are_apart(s, t) for t in steps)]


def _are_in_a_row(steps: Sequence[ViewStep]) -> bool:
    """Whether along one stride each view ends before the next one begins."""
    if len({s.source for s in steps}) > 1:
        return False
    strides = _falling({dims.ONE}.union(*(_extents(s) for s in steps)))
    boxes = [_box(s, strides) for s in steps]
    for intervals in zip(*boxes, strict=False):
        known = [n for low, _ in intervals if (n := dims.static(low)) is not None]
        if len(known) == len(intervals):
            intervals = tuple(
                i for _, i in sorted(zip(known, intervals, strict=True), key=lambda pair: pair[0])
            )
        if all(_ends_before(one, other) for one, other in pairwise(intervals)):
            return True
    return False


def _ends_before(one: tuple[Expr, Expr], other: tuple[Expr, Expr]) -> bool:
    low, size = one
    return dims.at_least(dims.sub(other[0], dims.add(low, size)), 0)


def are_apart(a: ViewStep, b: ViewStep) -> bool:
    """Whether two views are proved to have no element in common: places are taken apart by the strides of both, the
    largest first, and along one of these the two lie side by side."""
    if a.source is not b.source:
        return False
    strides = _falling({dims.ONE, *_extents(a), *_extents(b)})
    boxes = [_box(v, strides) for v in (a, b)]
    return any(
        _ends_before(p, q) for one, other in (boxes, boxes[::-1]) for p, q in zip(one, other, strict=False)
    )


def _extents(view: ViewStep) -> dict[Expr, Expr]:
    """Stride -> size, of the dims that move."""
    pairs = zip(view.layout.strides, view.value.shape, strict=True)
    return {s: n for s, n in pairs if n is not dims.ONE and s is not dims.ZERO}


def _falling(strides: set[Expr]) -> list[Expr]:
    """Strides from the largest to the smallest, as far as that is proved."""
    return sorted(strides, key=lambda s: sum(dims.at_least(dims.sub(t, s), 1) for t in strides))


def _box(view: ViewStep, strides: Sequence[Expr]) -> list[tuple[Expr, Expr]]:
    """First index and size along each stride, as of an array with these strides; nothing where that is not proved."""
    sizes, rest = _extents(view), view.offset
    box: list[tuple[Expr, Expr]] = []
    for s in strides:
        box.append((dims.floordiv(rest, s), sizes.get(s, dims.ONE)))
        rest = dims.mod(rest, s)
    reach = dims.ZERO
    for (low, size), s, above in reversed(list(zip(box[1:], strides[1:], strides, strict=False))):
        reach = dims.add(reach, dims.mul(dims.sub(dims.add(low, size), dims.ONE), s))
        if not dims.at_least(dims.sub(above, reach), 1):
            return []
    moving = [n for n in view.value.shape if n is not dims.ONE]
    return box if len(sizes) == len(moving) else []


def _elements(v: Value, layout: Layout) -> Expr:
    """How many elements lie from the first of `v` to its last."""
    last = (dims.mul(dims.sub(n, dims.ONE), s) for n, s in zip(v.shape, layout.strides, strict=True))
    return dims.add(dims.ONE, *last)


def _stored(steps: Sequence[ViewStep], hints: SizeHints) -> int:
    """How many elements the values of these steps take by themselves."""
    return sum(hints.estimate(_elements(s.value, s.layout)) for s in steps)
