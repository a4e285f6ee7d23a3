"""Results that no kernel stores after all, once it is known which kernels there are.

A result of B bytes that n other kernels read costs (n + 1) B. Made again by each reader from S bytes, of which F were
not in memory, it costs n S + F. Where that is less, every reader makes it again: nobody stores a half and the same
number as a single. Merging cannot know this, since it asks before it is known what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.expr import cost
from ..ir.graph import Op, Value
from .merging import Group
from .parts import Parts
from .recompute import MOST_INSTRUCTIONS, is_cheap, size_bytes


def narrowed(parts: Parts, groups: Sequence[Group]) -> list[Group]:
    """The groups without the ops that each reader computes for itself; `parts` has these as inlined from here on."""
    search = _Search(parts, groups)
    for op in parts.graph.ops:
        search.visit(op)
    parts.inlined |= search.gone
    left = [(g, tuple(n for n in g.places if parts.graph.ops[n] not in search.gone)) for g in groups]
    return [g if p == g.places else replace(g, places=p) for g, p in left if p]


class _Search:
    """What is stored, and the ops that are `gone` from their groups, so far."""

    def __init__(self, parts: Parts, groups: Sequence[Group]) -> None:
        self.parts = parts
        self.group = {parts.graph.ops[n]: k for k, g in enumerate(groups) for n in g.places}
        self.stored = {v for g in groups for v in parts.kernel(g.places).outputs}
        self.given = parts.kept_values.union(
            *(op.inputs for op in parts.graph.ops if op.call is not None),
            (step.source for step in parts.views.values()),
        )
        """What must be in memory, whoever else reads it."""
        self.gone: set[Op] = set()

    def visit(self, op: Op) -> None:
        """Take `op` out of its group if that moves fewer bytes."""
        if op not in self.group or not is_cheap(op, self.parts.views):
            return
        if op.output not in self.stored or op.output in self.given:
            return
        readers = self.readers(op)
        count = len({self.group.get(r) for r in readers} - {self.group[op]})
        if any(r.kernel >= 0 for r in readers):
            return
        for deep in (True, False):
            found = self.behind(op, deep=deep)
            if found is None:
                continue
            path, sources = found
            fresh = [v for v in sources if self.is_fresh(v)]
            moved = count * sum(map(size_bytes, sources)) + sum(map(size_bytes, fresh))
            if len(fresh) < 2 and moved < (count + 1) * size_bytes(op.output):
                self.gone |= path
                self.stored = (self.stored - {op.output}).union(fresh)
                return

    def behind(self, op: Op, *, deep: bool) -> tuple[set[Op], set[Value]] | None:
        """The cheap ops that make the result of `op` from values that are in memory or can be, and these values; None
        if that is too much to do again. Unless it goes `deep`, what the kernel of `op` makes is such a value."""
        path, sources = {op}, set[Value]()
        todo, instructions = [op], 0
        while todo:
            now = todo.pop()
            assert now.expr is not None
            instructions += cost(now.expr.body[0])
            if instructions >= MOST_INSTRUCTIONS:
                return None
            for v in now.inputs:
                maker = self.parts.producer.get(v)
                if maker in path:
                    continue
                if maker is None or v in self.stored or not self.is_computed(maker, op, deep=deep):
                    sources.add(v)
                    continue
                path.add(maker)
                todo.append(maker)
        return {p for p in path if p in self.group}, sources

    def is_computed(self, maker: Op, op: Op, *, deep: bool) -> bool:
        """Whether `maker` is, or can be, computed again by readers of `op`."""
        if maker in self.parts.inlined or maker in self.gone:
            return True
        together = deep and maker in self.group and self.group[maker] == self.group[op]
        return together and is_cheap(maker, self.parts.views)

    def is_fresh(self, v: Value) -> bool:
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
