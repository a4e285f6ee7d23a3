"""Regions of a graph that may become kernels of their own around contractions: where a product of small operands is
much larger than what the region reads and leaves behind (scores of attention, distances of all pairs)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import axes_of, axis
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.sizes import dims
from tilewright.library.select import is_contraction, is_vector_product
from tilewright.tuning.search_limits import CANDIDATES
from tilewright.tuning.thresholds import FORMS, REGIONS, SIZES

from .topological_order import in_some_order


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """`ops` in order, the values they read from outside and those that are used outside. `own` are what the region
    replaces; other ops are cheap producers that it computes for itself, whoever else does."""

    ops: tuple[Op, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    own: frozenset[Op]

    def graph(self, program: Graph) -> Graph:
        """The region as a graph of its own."""
        layouts = {v: program.layouts[v] for v in (*self.inputs, *self.outputs) if v in program.layouts}
        return Graph(self.inputs, self.ops, self.outputs, program.origins, layouts)

    def as_captured(self, program: Graph) -> Graph:
        """The same with the views that only library calls of its origins read."""
        inside = {*self.ops, *self.own}
        return self.graph(program).with_ops([op for op in program.ops if op in inside])


def find_regions(
    graph: Graph,
    hints: SizeHints,
    *,
    anywhere: bool = False,
    skinny: bool = False,
    attention: bool = False,
    behind: bool = False,
) -> list[Region]:
    """The regions of a graph whose views are composed, disjoint but for recomputed ops, which no region replaces; they
    can run one after the other. `anywhere` takes small products too, `skinny` those of few rows and a long operand;
    `attention` only those that a library computes in one call. Of each only what stands `behind` the products before
    its last, if that is asked."""
    finder = _Finder(graph, anywhere, skinny, hints, attention)
    found: list[Region] = []
    taken: set[Op] = set()
    for op in graph.ops:
        if op not in taken and finder.expands(op):
            region = finder.grow(op)
            region = finder.behind_products(region) if behind and region is not None else region
            if region is not None and not taken & region.own:
                found.append(region)
                taken |= region.own
    found = [found[k] for k in in_some_order(graph, [region.own for region in found])]
    # What another region replaces is not computed again: some of what it is made of does not leave that region.
    taken = {op for region in found for op in region.own}
    return [
        finder.region(set(r.own), set(r.ops) - taken) if taken & (set(r.ops) - r.own) else r for r in found
    ]


def may_have_regions(
    graph: Graph, hints: SizeHints, *, anywhere: bool = False, skinny: bool = False, attention: bool = False
) -> bool:
    """Whether a graph, normalised or not, has a contraction that could start a region."""
    finder = _Finder(graph, anywhere or attention, skinny, hints, attention)
    return any(map(finder.expands, graph.ops))


class Regions:
    """What sets of ops of a graph depend on, and what they are as a region."""

    def __init__(self, graph: Graph) -> None:
        self.producer, self.consumers = graph.producer(), graph.consumers()
        self.kept = graph.kept()
        self.position = {op: n for n, op in enumerate(graph.ops)}

    def inside(self, op: Op, own: set[Op]) -> bool:
        """Whether `op` depends on the region."""
        return bool(self.ancestors([op], min(self.position[o] for o in own)) & own)

    def region(self, own: set[Op], recomputed: set[Op]) -> Region:
        """Ops that a region replaces, and those that it computes again, as one."""
        inside = own | recomputed
        outputs = [
            v
            for op in sorted(own, key=self.position.__getitem__)
            for v in op.outputs
            if v in self.kept or any(r not in inside for r in self.consumers.get(v, []))
        ]
        ops = self.from_outputs(outputs, inside)
        made = {v for op in ops for v in op.outputs}
        inputs = dict.fromkeys(v for op in ops for v in op.inputs if v not in made)
        return Region(tuple(ops), tuple(inputs), tuple(outputs), frozenset(own))

    def from_outputs(self, outputs: Sequence[Value], inside: set[Op]) -> list[Op]:
        """Producers first, in an order that follows from the structure alone, so that equal regions look equal."""
        order: dict[Op, None] = {}
        todo = [(self.producer[v], False) for v in reversed(outputs)]
        while todo:
            op, ready = todo.pop()
            if ready:
                order[op] = None
            elif op not in order:
                above = [self.producer[v] for v in op.inputs if v in self.producer]
                todo += [(op, True), *((p, False) for p in reversed(above) if p in inside)]
        return list(order)

    def ancestors(self, ops: Collection[Op], first: int) -> set[Op]:
        """What `ops` depend on, as far as it stands at place `first` or later."""
        found: set[Op] = set()
        todo = list(ops)
        while todo:
            for v in todo.pop().inputs:
                p = self.producer.get(v)
                if p is not None and p not in found and self.position[p] >= first:
                    found.add(p)
                    todo.append(p)
        return found

    def descendants(self, ops: Collection[Op], last: int) -> set[Op]:
        """What depends on `ops`, as far as it stands at place `last` or earlier."""
        found: set[Op] = set()
        todo = list(ops)
        while todo:
            for v in todo.pop().outputs:
                for r in self.consumers.get(v, []):
                    if r not in found and self.position[r] <= last:
                        found.add(r)
                        todo.append(r)
        return found


class _Finder(Regions):
    def __init__(
        self, graph: Graph, anywhere: bool, skinny: bool, hints: SizeHints, attention: bool = False
    ) -> None:
        super().__init__(graph)
        self.attention = attention
        self.graph, self.anywhere, self.skinny, self.hints = graph, anywhere, skinny, hints
        self.scores: dict[Op, bool] = {}
        self.multiplied = {op.origin for op in graph.ops if op.origin >= 0 and is_product(op)}

    def expands(self, op: Op) -> bool:
        """Whether `op` is a contraction that starts a region."""
        if not is_product(op) or op.origin < 0 or op.expr is None or _is_fixed(op):
            return False
        call = self.graph.origins[op.origin].call
        if call is None or call.reason == "convolution" or (call.reason == "attention" and not self.anywhere):
            return False  # a library that fuses the whole region needs no other offer
        if self.attention and call.reason != "attention":
            return False
        if self.hints.estimate(dims.prod(a.extent for a in op.expr.reduce)) > REGIONS.max_sum_length:
            return False
        larger = max(_numel(v, self.hints) for v in op.inputs)
        return (
            self.anywhere
            or self.is_skinny(op, larger)
            or _numel(op.output, self.hints) >= SIZES.min_growth_ratio * larger
        )

    def is_skinny(self, op: Op, larger: int) -> bool:
        """Whether an op multiplies few rows by a long operand, where that is worth a region."""
        assert op.expr is not None
        reduced = self.hints.estimate(dims.prod(a.extent for a in op.expr.reduce))
        return (
            self.skinny
            and larger >= REGIONS.min_skinny_operand_elements
            and _numel(op.output, self.hints) * reduced <= REGIONS.max_skinny_rows * larger
        )

    def grow(self, seed: Op) -> Region | None:
        """The region of a contraction; None if its product leaves it, if nothing folds it, or if it has too many
        results."""
        least = max(1, _numel(seed.output, self.hints) // REGIONS.max_times_smaller)
        own: set[Op] = {seed}
        recomputed: set[Op] = set()
        todo = [seed]
        while todo:
            op = todo.pop()
            for p in (self.producer.get(v) for v in op.inputs):
                if p is None or p in own or p in recomputed or _is_fixed(p):
                    continue
                if self.is_score(p) and _numel(p.output, self.hints) >= least:
                    own.add(p)
                    todo.append(p)
                elif (
                    _cheap(p)
                    and p.origin not in self.multiplied  # a library adds a bias to its product for nothing
                    and (_numel(p.output, self.hints) >= least or self.expanding(p))
                    and not self.inside(p, own)
                ):
                    recomputed.add(p)
                    todo.append(p)
            if op in recomputed or (op is not seed and not makes_as_much(op) and not self.mixes(op, least)):
                continue
            for v in op.outputs:
                readers = self.consumers.get(v, [])
                if v in self.kept or any(map(_is_fixed, readers)):
                    return None
                fresh = [r for r in readers if r not in own]
                own.update(fresh)
                recomputed.difference_update(fresh)
                todo += fresh
        if not any(op.expr is not None and op.expr.reduction is not None for op in own - {seed}):
            return None
        if not self.close(own, recomputed):
            return None
        found = self.region(own, self.without_chains(own, recomputed))
        return found if len(found.outputs) <= CANDIDATES.max_region_results else None

    def without_chains(self, own: set[Op], recomputed: set[Op]) -> set[Op]:
        """The ops that a region still computes again, without those whose results are read instead. A value that others
        read too may be made of few; one that is made of such a value, and so on, would be made of ever more: each layer
        of a network would add up the results of all layers before it."""
        behind: dict[Value, frozenset[Value]] = {}
        stored = set[Op]()
        for op in sorted(recomputed, key=self.position.__getitem__):
            shared = [p for v in op.inputs if (p := self.producer.get(v)) in recomputed]
            shared = [p for p in shared if self.is_read_outside(p, own | recomputed)]
            sources = _sources(op, behind)
            most = REGIONS.max_recomputed_sources * _bytes(op.output, self.hints)
            if shared and sum(_bytes(v, self.hints) for v in sources) > most:
                stored.update(shared)
                behind.update({v: frozenset((v,)) for p in shared for v in p.outputs})
                sources = _sources(op, behind)
            behind.update(dict.fromkeys(op.outputs, sources))
        return recomputed - stored

    def is_read_outside(self, op: Op, inside: set[Op]) -> bool:
        """Whether others than some ops read a result, or the graph returns it."""
        return any(
            v in self.kept or any(r not in inside for r in self.consumers.get(v, [])) for v in op.outputs
        )

    def behind_products(self, whole: Region) -> Region | None:
        """What of a region stands behind the products that others wait for: it reads their results, as a library makes
        them. None if there is no such product, or nothing is folded between them and the last. What else reads those
        results (views for a library's calls) stays where it is."""
        places = [self.position[op] for op in whole.own]
        products = {op for op in whole.own if is_product(op)}
        early = {p for op in products for p in self.ancestors([op], min(places))} & products
        nodes = {op for op in whole.own if op.origin in {p.origin for p in early}}
        left = set(whole.own) - nodes - self.ancestors(nodes, min(places))
        ends = {op for op in left if set(op.outputs) & set(whole.outputs)}
        needed = (ends | self.ancestors(ends, min(places))) & left
        own = needed | (self.descendants(needed, max(places)) & left)
        folds = [op for op in own if op.expr is not None and op.expr.reduction is not None]
        if not early or not any(map(is_product, own)) or all(map(is_product, folds)):
            return None
        return self.region(own, set(whole.ops) - whole.own)

    def mixes(self, op: Op, least: int) -> bool:
        """Whether an op makes at least so many elements as sums over few values, as of heads, with weights that have
        nothing but these in common with what they weigh."""
        if op.expr is None or not is_product(op) or _numel(op.output, self.hints) < least:
            return False
        summed = dims.static(dims.prod(a.extent for a in op.expr.reduce))
        if summed is None or summed > FORMS.max_mixed_heads or len(op.inputs) != 2:
            return False
        used = [axes_of(x) for x in op.expr.reads()]
        apart = len(used) == 2 and used[0] & used[1] <= {axis(a) for a in op.expr.reduce}
        few = min(_numel(v, self.hints) for v in op.inputs) <= FORMS.max_mixed_heads**2
        ends = op.output in self.kept or any(map(_is_fixed, self.consumers.get(op.output, [])))
        return apart and few and not ends

    def is_score(self, op: Op) -> bool:
        """Whether an op is a contraction that starts a region, or finishes one for the call that it stems from."""
        if op not in self.scores:
            makers = [self.producer.get(v) for v in op.inputs] if _cheap(op) and op.origin >= 0 else []
            self.scores[op] = self.expands(op) or any(
                p is not None and p.origin == op.origin and self.is_score(p) and self.is_much(p)
                for p in makers
            )
        return self.scores[op]

    def is_much(self, op: Op) -> bool:
        """Whether an op makes much of little, or finishes one that does."""
        larger = max((_numel(v, self.hints) for v in op.inputs), default=0)
        return _cheap(op) or _numel(op.output, self.hints) >= SIZES.min_growth_ratio * larger

    def expanding(self, op: Op) -> bool:
        """Whether computing a pointwise op again, with those before it, reads less than its result holds."""
        seen: set[Value] = set()
        todo, read = list(op.inputs), 0
        while todo:
            v = todo.pop()
            if v not in seen:
                seen.add(v)
                p = self.producer.get(v)
                if p is not None and _cheap(p):
                    todo += p.inputs
                else:
                    read += _bytes(v, self.hints)
        return read < _bytes(op.output, self.hints)

    def close(self, own: set[Op], recomputed: set[Op]) -> bool:
        """Add what lies on paths between the region's ops, and pointwise ops that read only its results; False if a
        library call, or another kernel, lies on such a path."""
        while True:
            places = [self.position[op] for op in own]
            between = (self.ancestors(own, min(places)) & self.descendants(own, max(places))) - own
            if any(map(_is_fixed, between)):
                return False
            made = {v for op in own for v in op.outputs}
            ends = {
                r
                for v in made
                for r in self.consumers.get(v, [])
                if r not in own and not _is_fixed(r) and _cheap(r) and set(r.inputs) <= made
                if r.output in self.kept
                or r.output in self.consumers  # else a call of the library may read it
            }
            if not between and not ends:
                return True
            own |= between | ends
            recomputed -= own


def is_product(op: Op) -> bool:
    """Whether an op is a contraction, or a product of a matrix and a vector (of which there may be many)."""
    return is_contraction(op) or is_vector_product(op)


def makes_as_much(op: Op) -> bool:
    """Whether an op makes as much as it reads: all but reductions."""
    return op.expr is not None and (op.expr.is_pointwise or op.expr.scan is not None)


def _is_fixed(op: Op) -> bool:
    """Whether what runs an op is decided: a library's call, or a kernel that was chosen before."""
    return op.expr is None or op.kernel >= 0


def _cheap(op: Op) -> bool:
    return op.expr is not None and op.expr.is_pointwise


def _sources(op: Op, behind: Mapping[Value, frozenset[Value]]) -> frozenset[Value]:
    """The stored values that an op is made of."""
    return frozenset[Value]().union(*(behind.get(v, {v}) for v in op.inputs))


def _numel(v: Value, hints: SizeHints) -> int:
    return hints.estimate(v.numel)


def _bytes(v: Value, hints: SizeHints) -> int:
    return _numel(v, hints) * v.dtype.bytes
