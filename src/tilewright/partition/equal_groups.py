"""Which groups of ops are alike: the same ops, connected in the same way, at the same distances in the graph.

The layers of a network are alike, and so are the groups that merging tries in each of them. What a group is like is
told from its ops' own likeness and their distances, so that a price that is known needs no kernel to be made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.graph import Graph, Layout, Op, Value
from tilewright.tuning.search_limits import GROUPS


class Likeness:
    """Groups of a graph's ops by what a price sees of the kernels that they make. `layouts` are fixed, and which ops
    are `inlined`: each kernel that reads them computes them for itself."""

    def __init__(
        self,
        graph: Graph,
        layouts: Mapping[Value, Layout],
        inlined: set[Op],
    ) -> None:
        self.graph, self.layouts, self.inlined = graph, layouts, inlined
        self.position = {op: n for n, op in enumerate(graph.ops)}
        self.producer = graph.producer()
        self.consumers = graph.consumers()
        self.kept = graph.kept()
        self.numbers: dict[object, int] = {}
        self.origins: dict[Value, tuple[int, int]] = {}
        """The place of the op that makes a value or reads it first, with its place among results or operands."""
        for n, op in enumerate(graph.ops):
            for k, v in enumerate(op.inputs):
                self.origins.setdefault(v, (n, ~k))
            self.origins |= {v: (n, k) for k, v in enumerate(op.outputs)}
        self.labels: dict[Op, int] = {}
        self.works: dict[Op, int] = {}
        self.uses: dict[Value, int] = {}

    def key(self, places: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Equal for groups that are alike, given by the places of their ops in rising order."""
        return tuple((n - places[0], self.label(self.graph.ops[n])) for n in places)

    def label(self, op: Op) -> int:
        """A number for all ops that are alike, with those that they are connected with seen as far as a kernel goes."""
        known = self.labels.get(op)
        if known is None:
            results = tuple((self._name(op, v), self._place(v), self._uses(v)) for v in op.outputs)
            known = self.labels[op] = self._number((self._work(op), results))
        return known

    def _number(self, thing: object) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))

    def _work(self, op: Op) -> int:
        """What an op computes from what, with the ops that it computes for itself."""
        known = self.works.get(op)
        if known is None:
            inputs = tuple(self._operand(op, v) for v in op.inputs)
            known = self.works[op] = self._number((op.expr, inputs))
        return known

    def _operand(self, op: Op, v: Value) -> object:
        p = self.producer.get(v)
        return self._name(op, v), self._place(v), self._work(p) if p is not None and p in self.inlined else -1

    def _place(self, v: Value) -> int:
        layout = self.layouts.get(v)
        return self._number((v.dtype, v.shape, layout and layout.strides))

    def _name(self, op: Op, v: Value) -> object:
        """Which value this is, as seen from `op`."""
        if self._far(v):
            return v
        place, slot = self.origins[v]
        return place - self.position[op], slot

    def _far(self, v: Value) -> bool:
        readers = self.consumers.get(v, [])
        if len(readers) <= GROUPS.max_far_readers:
            return False
        return self.position[readers[-1]] - self.origins[v][0] > GROUPS.max_value_span

    def _uses(self, v: Value) -> int:
        """Who reads a result, also through ops that its readers compute for themselves, as seen from its own op."""
        known = self.uses.get(v)
        if known is None:
            here = self.origins[v][0]
            uses: list[object] = [v in self.kept, v if self._far(v) else None]
            for r in () if self._far(v) else self.consumers.get(v, ()):
                through = tuple(map(self._uses, r.outputs)) if r in self.inlined else None
                uses.append((self.position[r] - here, through))
            known = self.uses[v] = self._number(tuple(uses))
        return known
