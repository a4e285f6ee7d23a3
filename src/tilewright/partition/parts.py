"""What of a graph needs kernels, and what does not: views that strides can say, ops that each reader computes for
itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..ir import dims
from ..ir.expr import Expr
from ..ir.graph import Graph, Layout, Op, Value
from ..ir.kernel import Kernel, ViewStep
from ..tile.sizes import estimate
from .layout import settled_layouts, shown
from .recompute import recomputed


class Parts:
    """The parts of a graph from which kernels are made.

    `layouts` says how values lie in memory. `inlined` ops belong to each kernel that reads them; unless ops are to
    `fuse`, there are none. A value in `views` is memory of another, which kernels read in its place: its op is inlined,
    too. `shown` are outputs that the program returns as memory of something else, and `storages` numbers the storages
    of outputs in the program, where they are known."""

    def __init__(
        self, graph: Graph, shown: frozenset[Value] = frozenset(), storages: Mapping[Value, int] | None = None, *,
        fuse: bool = True,
    ) -> None:  # fmt: skip
        self.graph, self.shown = graph, shown
        self.position = {op: n for n, op in enumerate(graph.ops)}
        self.producer = graph.producer()
        self.consumers = graph.consumers()
        self.layouts = settled_layouts(graph)
        self.kept_values = graph.kept()
        self.views = self.strided_views()
        parts = self.returned_parts(storages or {}, fuse=fuse)
        self.layouts |= {v: s.layout for v, s in parts.items()}
        self.views |= parts
        self.inlined = recomputed(graph, self.views, self.consumers) if fuse else set[Op]()
        self.inlined |= {self.producer[v] for v in parts if self._is_read_by_kernels(v)}

    def strided_views(self) -> dict[Value, ViewStep]:
        """Views that a library call or the caller reads, where strides can say them."""
        found: dict[Value, ViewStep] = {}
        held = self._held()
        for op in filter(_is_view, self.graph.ops):
            readers = self.consumers.get(op.output, [])
            returned = op.output in self.shown and op.inputs[0] in held
            if not returned and (op.output in self.kept_values or not readers):
                continue
            if not all(r.call is not None for r in readers):
                continue
            memory = shown(op, self.layouts)
            if memory is not None:
                layout, offset = memory
                found[op.output] = ViewStep(op.output, op.inputs[0], layout, offset)
                self.layouts[op.output] = layout
        return found

    def returned_parts(self, storages: Mapping[Value, int], *, fuse: bool) -> dict[Value, ViewStep]:
        """Outputs in one of the program's `storages` that stay parts of a value that is neither given nor returned
        itself: where memory of their own, at the strides that the program promises, would take more than that value,
        or as much and it is in memory anyway. Queries, keys and values of one product that the backward pass reads are
        such. Of outputs in several storages that are made of one value (clones), those of one storage stay so."""
        held = self._held()
        found: dict[Value, dict[int, list[ViewStep]]] = {}
        for op in filter(_is_view, self.graph.ops):
            source, v = op.inputs[0], op.output
            root = self._root(source)
            if v not in storages or held & {source, root} or root not in self.producer:
                continue
            readers = self.consumers.get(v, [])
            memory = shown(op, self.layouts)
            made = fuse and self.producer[source].call is not None
            if memory is None or not (made or all(r.call is not None for r in readers)):
                continue
            if memory[0] == self.layouts.get(v, Layout(dims.dense_strides(v.shape))):
                same = found.setdefault(root, {}).setdefault(storages[v], [])
                same.append(ViewStep(v, source, *memory))
        kept = {v: max(groups.values(), key=_stored) for v, groups in found.items()}
        return {s.value: s for root, steps in kept.items() if self._is_no_larger(root, steps) for s in steps}

    def _root(self, v: Value) -> Value:
        """The value whose memory `v` is."""
        while v in self.views:
            v = self.views[v].source
        return v

    def _is_no_larger(self, root: Value, steps: Sequence[ViewStep]) -> bool:
        """Whether the value `root` takes no more memory than these parts of it would by themselves."""
        layout = self.layouts.get(root, Layout(dims.dense_strides(root.shape)))
        whole, stored = estimate(_elements(root, layout)), _stored(steps)
        around = (self.producer[root], *self.consumers.get(root, ()))
        return stored > whole or (stored == whole and any(op.call is not None for op in around))

    def _held(self) -> set[Value]:
        return self.kept_values.union(v for v in self.graph.inputs if isinstance(v, Value))

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


def _is_view(op: Op) -> bool:
    return op.expr is not None and op.kernel < 0 and op.expr.is_view() and len(op.inputs) == 1


def _elements(v: Value, layout: Layout) -> Expr:
    """How many elements lie from the first of `v` to its last."""
    last = (dims.mul(dims.sub(n, dims.ONE), s) for n, s in zip(v.shape, layout.strides, strict=True))
    return dims.add(dims.ONE, *last)


def _stored(steps: Sequence[ViewStep]) -> int:
    """How many elements the values of these steps take by themselves."""
    return sum(estimate(_elements(s.value, s.layout)) for s in steps)
