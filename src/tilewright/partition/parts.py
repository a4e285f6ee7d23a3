"""What of a graph needs kernels, and what does not: views that strides can say, ops that each reader computes for
itself."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.graph import Graph, Op, Value
from ..ir.kernel import Kernel, ViewStep
from .layout import settled_layouts, shown
from .recompute import recomputed


class Parts:
    """The parts of a graph from which kernels are made. `layouts` says how values lie in memory, `views` are no work,
    `inlined` ops belong to each kernel that reads them. `shown` are outputs that the program returns as memory of
    something else. Unless ops are to `fuse`, none is inlined."""

    def __init__(self, graph: Graph, shown: frozenset[Value] = frozenset(), *, fuse: bool = True) -> None:
        self.graph, self.shown = graph, shown
        self.position = {op: n for n, op in enumerate(graph.ops)}
        self.producer = graph.producer()
        self.consumers = graph.consumers()
        self.layouts = settled_layouts(graph)
        self.kept_values = graph.kept()
        self.views = self.strided_views()
        self.inlined = recomputed(graph, self.views, self.consumers) if fuse else set[Op]()

    def strided_views(self) -> dict[Value, ViewStep]:
        """Views that a library call or the caller reads, where strides can say them."""
        found: dict[Value, ViewStep] = {}
        kept = self.graph.kept()
        held = kept.union(v for v in self.graph.inputs if isinstance(v, Value))
        for op in self.graph.ops:
            if op.expr is None or op.kernel >= 0 or not op.expr.is_view() or len(op.inputs) != 1:
                continue
            readers = self.consumers.get(op.output, [])
            returned = op.output in self.shown and op.inputs[0] in held
            if not returned and (op.output in kept or not readers):
                continue
            if not all(r.call is not None for r in readers):
                continue
            memory = shown(op, self.layouts)
            if memory is not None:
                layout, offset = memory
                found[op.output] = ViewStep(op.output, op.inputs[0], layout, offset)
                self.layouts[op.output] = layout
        return found

    def generated(self) -> list[Op]:
        """Ops that need a kernel."""
        return [
            op
            for op in self.graph.ops
            if op.expr is not None and op not in self.inlined and op.outputs[0] not in self.views
        ]

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
