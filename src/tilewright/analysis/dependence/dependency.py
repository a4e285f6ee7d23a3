"""Reduce dependency: which dims of which values are one loop, and may that loop be cut into parallel parts?

The lattice BATCH < REUSE < NONPARA of FlashTensor (PPoPP'25), with classes: dims and axes that follow each other
through access maps are one class, found by union-find over the digits of dims (a dim that one op splits and another
keeps whole consists of several digits, each with a class of its own). A class's dependency is the join of what every op
says of it.

Meeting is a preference: a join that would let one class stand for two axes of one op is refused, as lowering does it,
which makes a second instance of the producer. Inputs may be read in any way, so they collect what their readers say and
hand nothing on except through a join.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from tilewright.ir.expr import Axis, Expr, axes_of
from tilewright.ir.graph import Op, Value
from tilewright.ir.sizes import dims

from .axis_access import AxisDigits, DimAccess, access_of, strides_between


class Dependency(IntEnum):
    """What cutting a dim into parallel parts costs: nothing, loading shared operands again, or it is not possible."""

    BATCH = 1
    REUSE = 2
    NONPARA = 3


Node = tuple[Value, int] | tuple[int, Axis]
"""A dim of a value, or an axis of the op at a place in the sequence."""

Digit = int
"""The digits of all nodes, numbered."""

NO_CLASS = -1
"""The class of a dim of extent 1."""


@dataclass(frozen=True, slots=True)
class DimClasses:
    """Per value and dim its dependency, its class, and the classes of its digits, outermost first (none for a dim of
    extent 1, which counts as NONPARA: one unit has all of it); per op and axis the digits likewise. `kinds` and
    `extents` are by class. A dim of several digits has a class number of its own, beyond those of the digits."""

    dependency: Mapping[Value, tuple[Dependency, ...]]
    classes: Mapping[Value, tuple[int, ...]]
    digits: Mapping[Value, tuple[tuple[int, ...], ...]]
    axes: Mapping[Op, Mapping[Axis, tuple[int, ...]]]
    kinds: tuple[Dependency, ...]
    extents: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class _Link:
    """One dim of one read of the op at place `at`."""

    at: int
    read: Expr
    dim: tuple[Value, int]
    access: DimAccess


def classes_of(ops: Sequence[Op]) -> DimClasses:
    """Dependencies and classes of all values that tensor expressions among `ops` read or make."""
    return _Analysis([op for op in ops if op.expr is not None]).run()


@dataclass
class _Analysis:
    ops: Sequence[Op]
    made: set[Value] = field(default_factory=set[Value])
    free: set[Value] = field(default_factory=set[Value])
    links: list[_Link] = field(default_factory=list[_Link])
    cuts: dict[Node, set[Expr]] = field(default_factory=dict[Node, set[Expr]])
    strides: dict[Node, list[Expr]] = field(default_factory=dict[Node, list[Expr]])
    own: dict[Node, list[Digit]] = field(default_factory=dict[Node, list[Digit]])
    place: list[tuple[Node, int]] = field(default_factory=list[tuple[Node, int]])
    parent: list[Digit] = field(default_factory=list[Digit])
    members: list[dict[int, set[Digit]]] = field(default_factory=list[dict[int, set[Digit]]])
    kind: dict[Digit, Dependency] = field(default_factory=dict[Digit, Dependency])
    ties: list[tuple[list[Digit], list[Digit], bool]] = field(
        default_factory=list[tuple[list[Digit], list[Digit], bool]]
    )
    data: set[Node] = field(default_factory=set[Node])

    def run(self) -> DimClasses:
        self.made = {v for op in self.ops for v in op.outputs}
        for op in self.ops:
            if self.free.issuperset(op.inputs):
                self.free.update(op.outputs)
        self.collect()
        self.refine()
        for node in self.strides:
            self.number(node)
        self.join_outputs()
        for inside in (True, False):
            for link in self.links:
                if (link.dim[0] in self.made) == inside:
                    self.join(link)
        self.seed()
        self.propagate()
        return self.result()

    # --- what the access maps say

    def collect(self) -> None:
        for at, op in enumerate(self.ops):
            assert op.expr is not None
            reduced = frozenset(op.expr.reduce)
            for r in op.expr.reads():
                assert isinstance(r.value, int)
                v = op.inputs[r.value]
                for d, (index, extent) in enumerate(zip(r.args, v.shape, strict=True)):
                    if extent is not dims.ONE:
                        self.links.append(_Link(at, r, (v, d), access_of(index, extent, reduced)))

    def nodes(self) -> list[Node]:
        found: dict[Node, None] = {}
        for at, op in enumerate(self.ops):
            assert op.expr is not None
            found |= {(v, d): None for v in (*op.inputs, *op.outputs) for d in range(len(v.shape))}
            found |= {(at, a): None for a in (*op.expr.axes, *op.expr.reduce)}
        return [n for n in found if _extent(n) is not dims.ONE]

    def output_pieces(self) -> Iterable[tuple[Node, int, AxisDigits]]:
        """Output dims as pieces: all digits of an axis."""
        for at, op in enumerate(self.ops):
            assert op.expr is not None
            for v in op.outputs:
                for d, a in enumerate(op.expr.axes):
                    if a.extent is not dims.ONE:
                        yield (v, d), at, AxisDigits(a, dims.ONE, a.extent, dims.ONE)

    def pieces(self) -> list[tuple[Node, int, AxisDigits]]:
        return [*self.output_pieces(), *((x.dim, x.at, p) for x in self.links for p in x.access.pieces)]

    # --- digits

    def refine(self) -> None:
        """Cut every node where anything that it follows is cut, until nothing moves."""
        pieces = self.pieces()
        self.cuts = {n: set() for n in self.nodes()}
        moved = True
        while moved:
            moved = False
            for node, at, p in pieces:
                other: Node = (at, p.axis)
                if (
                    p.count is p.axis.extent
                    and p.count is _extent(node)
                    and self.cuts[node] == self.cuts[other]
                ):
                    continue
                moved |= self.cut(node, (p.stride, dims.mul(p.stride, p.count)))
                moved |= self.cut(other, (p.step, dims.mul(p.step, p.count)))
                there = list(strides_between(self.cuts[node], p.stride, p.count))
                here = list(strides_between(self.cuts[other], p.step, p.count))
                moved |= self.cut(other, [dims.mul(p.step, c) for c in there])
                moved |= self.cut(node, [dims.mul(p.stride, c) for c in here])
        self.strides = {n: _chain(cuts, _extent(n)) for n, cuts in self.cuts.items()}

    def cut(self, node: Node, strides: Iterable[Expr]) -> bool:
        extent, cuts = _extent(node), self.cuts[node]
        new = [s for s in strides if s is not dims.ONE and not dims.equal(s, extent) and s not in cuts]
        cuts.update(new)
        return bool(new)

    def number(self, node: Node) -> None:
        """Number the digits of a node, lowest first; each is a class of its own."""
        self.own[node] = []
        for k in range(len(self.strides[node])):
            digit = len(self.parent)
            self.own[node].append(digit)
            self.place.append((node, k))
            self.parent.append(digit)
            self.members.append({node[0]: {digit}} if isinstance(node[0], int) else {})

    def digits(self, node: Node) -> list[Digit]:
        return self.own.get(node, [])

    def between(self, node: Node, low: Expr, count: Expr) -> list[Digit] | None:
        """The digits from place value `low` on, `count` in all; None if the node is not cut there."""
        extent = _extent(node)
        if count is extent:
            return self.own[node]
        strides = [*self.strides[node], extent]
        top = dims.mul(low, count)
        first = next((k for k, s in enumerate(strides) if dims.equal(s, low)), None)
        last = next((k for k, s in enumerate(strides) if dims.equal(s, top)), None)
        return None if first is None or last is None else self.own[node][first:last]

    def count(self, digit: Digit) -> Expr:
        node, k = self.place[digit]
        strides = [*self.strides[node], _extent(node)]
        size = dims.exact_div(strides[k + 1], strides[k])
        assert size is not None
        return size

    # --- classes

    def find(self, digit: Digit) -> Digit:
        while self.parent[digit] != digit:
            self.parent[digit] = self.parent[self.parent[digit]]
            digit = self.parent[digit]
        return digit

    def union(self, a: Digit, b: Digit) -> bool:
        """Join two classes unless one op would then have two of its axes in one; whether they are one now."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return True
        if len(self.members[a]) < len(self.members[b]):
            a, b = b, a
        if any(self.members[a].get(at, own) != own for at, own in self.members[b].items()):
            return False
        self.parent[b] = a
        for at, own in self.members[b].items():
            self.members[a].setdefault(at, set()).update(own)
        return True

    def join_outputs(self) -> None:
        for node, at, p in self.output_pieces():
            for x, y in zip(self.digits((at, p.axis)), self.digits(node), strict=True):
                self.union(x, y)

    def join(self, link: _Link) -> None:
        access, made = link.access, link.dim[0] in self.made
        for p in access.pieces:
            there = self.between(link.dim, p.stride, p.count)
            here = self.between((link.at, p.axis), p.step, p.count)
            if there is None or here is None or len(there) != len(here):
                self.ties.append((self.digits(link.dim), self.digits((link.at, p.axis)), made))
                continue
            for x, y in zip(there, here, strict=True):
                if not self.union(x, y):
                    self.ties.append(([x], [y], False))
        if access.kind in ("window", "loose"):
            axes = [x for a in access.axes for x in self.digits((link.at, a))]
            self.ties.append((self.digits(link.dim), axes, made))
        if access.kind == "data":
            self.data.add(link.dim)

    # --- dependencies

    def raise_(self, digit: Digit, to: Dependency) -> bool:
        root = self.find(digit)
        if self.kind.get(root, Dependency.BATCH) >= to:
            return False
        self.kind[root] = to
        return True

    def seed(self) -> None:
        by_read: dict[tuple[int, Expr], list[_Link]] = {}
        for link in self.links:
            by_read.setdefault((link.at, link.read), []).append(link)
        for at, op in enumerate(self.ops):
            expr = op.expr
            assert expr is not None
            for a in (*expr.reduce, *([expr.scan] if expr.scan else [])):
                for x in self.digits((at, a)):
                    self.raise_(x, Dependency.NONPARA)
            for r in expr.reads():
                if self.reads_nothing(op, r):
                    continue
                used = self.used(at, r, by_read.get((at, r), []))
                for a in expr.axes:
                    for x in self.digits((at, a)):
                        if x not in used:
                            self.raise_(x, Dependency.REUSE)
        for node in self.data:
            if node[0] in self.made:
                for x in self.digits(node):
                    self.raise_(x, Dependency.NONPARA)

    def reads_nothing(self, op: Op, read: Expr) -> bool:
        """Whether a read is of a value computed from axes alone, of which nothing is loaded again."""
        assert isinstance(read.value, int)
        return op.inputs[read.value] in self.free

    def used(self, at: int, read: Expr, links: Iterable[_Link]) -> set[Digit]:
        """The digits of axes that a read uses."""
        found: set[Digit] = set()
        for link in links:
            for p in link.access.pieces:
                node: Node = (at, p.axis)
                found.update(self.between(node, p.step, p.count) or self.digits(node))
            loose = link.access.axes
            if link.access.kind != "pieces":
                inside = {a.value for a in axes_of(read.args[link.dim[1]])}
                loose = tuple(a for a in inside if isinstance(a, Axis))
            found.update(x for a in loose for x in self.digits((at, a)))
        return found

    def propagate(self) -> None:
        """Hand dependencies along ties between dims that follow each other loosely, until nothing moves."""
        both = [t for t in self.ties if t[2]]
        for dim, axes, _ in both:
            for x in (*dim, *axes):
                self.raise_(x, Dependency.REUSE)
        moved = True
        while moved:
            moved = False
            for dim, axes, _ in both:
                top = max(self.of(x) for x in (*dim, *axes))
                for x in (*dim, *axes):
                    moved |= self.raise_(x, top)

    def of(self, digit: Digit) -> Dependency:
        return self.kind.get(self.find(digit), Dependency.BATCH)

    # --- the result

    def result(self) -> DimClasses:
        number: dict[Digit, int] = {}
        for x in range(len(self.parent)):
            number.setdefault(self.find(x), len(number))
        outermost = lambda node: tuple(number[self.find(x)] for x in reversed(self.digits(node)))  # noqa: E731
        collected = self.collected()
        merged: dict[tuple[int, ...], int] = {}
        dependency: dict[Value, tuple[Dependency, ...]] = {}
        classes: dict[Value, tuple[int, ...]] = {}
        digits: dict[Value, tuple[tuple[int, ...], ...]] = {}
        for v in dict.fromkeys(v for op in self.ops for v in (*op.inputs, *op.outputs)):
            dependency[v] = tuple(self.of_dim((v, d), collected) for d in range(len(v.shape)))
            digits[v] = tuple(outermost((v, d)) for d in range(len(v.shape)))
            classes[v] = tuple(_class_of(own, merged, len(number)) for own in digits[v])
        axes = {
            op: {a: outermost((at, a)) for a in (*op.expr.axes, *op.expr.reduce)}
            for at, op in enumerate(self.ops)
            if op.expr is not None
        }
        kinds, extents = tuple(map(self.of, number)), tuple(map(self.count, number))
        return DimClasses(dependency, classes, digits, axes, kinds, extents)

    def collected(self) -> dict[Digit, Dependency]:
        """What inputs, and values whose reader needs an instance of its own, hear from readers."""
        found: dict[Digit, Dependency] = {}
        for dim, axes, both in self.ties:
            for x in [] if both else dim:
                found[x] = max([found.get(x, Dependency.REUSE), *map(self.of, axes)])
        return found

    def of_dim(self, node: tuple[Value, int], collected: Mapping[Digit, Dependency]) -> Dependency:
        digits = self.digits(node)
        if not digits or node in self.data:
            return Dependency.NONPARA
        return max(max(self.of(x), collected.get(x, Dependency.BATCH)) for x in digits)


def _class_of(digits: tuple[int, ...], merged: dict[tuple[int, ...], int], beyond: int) -> int:
    if len(digits) < 2:
        return digits[0] if digits else NO_CLASS
    return merged.setdefault(digits, beyond + len(merged))


def _extent(node: Node) -> Expr:
    where, which = node
    if isinstance(where, Value):
        assert isinstance(which, int)
        return where.shape[which]
    assert isinstance(which, Axis)
    return which.extent


def _chain(cuts: set[Expr], extent: Expr) -> list[Expr]:
    """1 and the cuts in ascending order, each dividing the next and the last the extent; cuts that do not fit are left
    out."""
    chain = [dims.ONE]
    rest = list(cuts)
    while rest:
        least = [c for c in rest if all(dims.exact_div(d, c) is not None for d in rest)]
        if not least:
            break
        rest.remove(least[0])
        if dims.exact_div(least[0], chain[-1]) is not None and dims.exact_div(extent, least[0]) is not None:
            chain.append(least[0])
    return chain
