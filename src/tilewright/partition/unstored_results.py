"""Results that no kernel stores after all, once it is known which kernels there are.

A result of B bytes that n other kernels read costs (n + 1) B. Made again by each reader from S bytes, of which F were
not in memory, it costs n S + F. Where that is less, every reader makes it again: nobody stores a half and the same
number as a single. Merging cannot know this, since it asks before it is known what is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import IllegalSchedule
from tilewright.ir.expr import cost
from tilewright.ir.graph import Op, Value
from tilewright.ir.kernel import Kernel, Price
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import PARTITION

from .greedy import Group
from .kernel_ops import GraphParts
from .recompute import is_cheap, size_bytes


def without_recomputed(parts: GraphParts, groups: Sequence[Group], price: Price) -> list[Group]:
    """The groups without the ops whose results each reader makes again, which `parts` has as inlined from here on.
    Kernels that would have no legal form so (`price` raises IllegalSchedule), or a much slower one, stay as they are:
    without its last ops, a kernel of several products may store results whose dims have no part in common."""
    ops = parts.graph.ops
    before = [parts.kernel(g.places) for g in groups]
    search = _Search(parts, groups, before)
    for op in ops:
        search.visit(op)
    gone, inlined = search.gone, set(parts.inlined)
    while True:
        parts.inlined = inlined | gone
        left = [tuple(n for n in g.places if ops[n] not in gone) for g in groups]
        refused = set[Op]()
        for group, kernel, places in zip(groups, before, left, strict=True):
            made = parts.kernel(places) if gone and places else kernel
            if not _keeps_pace(parts, kernel, made, price):
                refused |= gone.intersection((*made.ops, *(ops[n] for n in group.places))) or gone
        if not refused:
            return [
                g if p == g.places else replace(g, places=p) for g, p in zip(groups, left, strict=True) if p
            ]
        gone -= refused


def _keeps_pace(parts: GraphParts, before: Kernel, after: Kernel, price: Price) -> bool:
    if before.ops == after.ops and before.outputs == after.outputs:
        return True
    try:
        seconds = price(after, parts.layouts)
        return seconds <= PARTITION.max_unstored_growth_ratio * price(before, parts.layouts)
    except IllegalSchedule:
        return False


class _Search:
    """What is stored, and the ops that are `gone` from their groups, so far."""

    def __init__(self, parts: GraphParts, groups: Sequence[Group], kernels: Sequence[Kernel]) -> None:
        self.parts = parts
        self.group = {parts.graph.ops[n]: k for k, g in enumerate(groups) for n in g.places}
        self.stored = {v for kernel in kernels for v in kernel.outputs}
        self.must_store = parts.read_from_memory()
        self.gone: set[Op] = set()

    def bytes_of(self, values: Iterable[Value]) -> int:
        """Of all of them together."""
        return sum(size_bytes(v, self.parts.hints) for v in values)

    def visit(self, op: Op) -> None:
        """Take `op` out of its group if that moves fewer bytes."""
        if op not in self.group or not is_cheap(op, self.parts.views):
            return
        if op.output not in self.stored or op.output in self.must_store:
            return
        readers = self.readers(op)
        if any(r.kernel >= 0 or reads_again(r, op.output, self.parts.hints) for r in readers):
            return
        count = len({self.group.get(r) for r in readers} - {self.group[op]})
        for deep in (True, False):
            found = self.made_from(op, deep=deep)
            if found is None:
                continue
            path, sources = found
            fresh = [v for v in sources if self.is_newly_stored(v)]
            moved = count * self.bytes_of(sources) + self.bytes_of(fresh)
            # two new results instead of one could leave a kernel in two pieces
            if len(fresh) < 2 and moved < (count + 1) * self.bytes_of([op.output]):
                self.gone |= path
                self.stored.discard(op.output)
                self.stored.update(fresh)
                return

    def made_from(self, op: Op, *, deep: bool) -> tuple[set[Op], set[Value]] | None:
        """The cheap ops that make the result of `op` from values that are in memory or can be, `deep`: also through ops
        of its own kernel, and these values; None if that is too much to do again."""
        path, sources = {op}, set[Value]()
        todo, instructions = [op], 0
        while todo:
            now = todo.pop()
            assert now.expr is not None
            instructions += cost(now.expr.body[0])
            if instructions >= PARTITION.min_stored_instructions or len(path) > PARTITION.max_recomputed_ops:
                return None
            for v in now.inputs:
                maker = self.parts.producer.get(v)
                if maker in path:
                    continue
                if maker is None or v in self.stored or not self.is_made_again(maker, op, deep=deep):
                    sources.add(v)
                    continue
                path.add(maker)
                todo.append(maker)
        return {p for p in path if p in self.group}, sources

    def is_made_again(self, maker: Op, op: Op, *, deep: bool) -> bool:
        """Whether readers of `op` compute `maker`, or can do so."""
        if maker in self.parts.inlined or maker in self.gone:
            return True
        together = deep and maker in self.group and self.group[maker] == self.group[op]
        return together and is_cheap(maker, self.parts.views)

    def is_newly_stored(self, v: Value) -> bool:
        """Whether a value is made by a kernel that does not store it yet."""
        return self.parts.producer.get(v) in self.group and v not in self.stored

    def readers(self, op: Op) -> set[Op]:
        """The ops of kernels that read the result of `op`, also through inlined ones."""
        found: set[Op] = set()
        todo = [op.output]
        while todo:
            for r in self.parts.consumers.get(todo.pop(), ()):
                if r in self.parts.inlined or r in self.gone:
                    todo.append(r.output)
                else:
                    found.add(r)
        return found


def reads_again(op: Op, v: Value, hints: SizeHints) -> bool:
    """Whether `op` does more steps than `v` has elements, as products and windows do, so that it may read some of them
    more than once."""
    if op.expr is None:
        return True
    axes = (*op.expr.axes, *op.expr.reduce)
    return hints.estimate(dims.mul(dims.ONE, *(a.extent for a in axes))) > hints.estimate(v.numel)
