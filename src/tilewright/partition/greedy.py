"""What shares a kernel: start with one op each, merge along edges while the modelled time does not grow.

One rule serves T+T, T+R, R+R and R+T: a merge saves a launch and the bytes of the edge, and costs what it recomputes
and the parallelism it loses; the price of the merged form says which is more. What has no legal form is not merged, and
the reason is kept for the report.

Work grows with the number of ops: paths are searched between two places of a topological order, groups that are alike
have one price, and beyond a number of searches and prices what is left stays apart.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from tilewright.errors import IllegalSchedule
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Op, Value
from tilewright.ir.kernel import Price
from tilewright.ir.sizes import dims
from tilewright.tuning.search_limits import GROUPS
from tilewright.tuning.thresholds import PARTITION

from .equal_groups import Likeness
from .kernel_ops import GraphParts
from .topological_order import Order, Standing, followers, passing_through


@dataclass(frozen=True, slots=True)
class Afar:
    """What kernels cost where nothing that they read is in a cache. One alone finds there what it reads if that is
    little, but two that touch more than `near_bytes` together do not, one after the other."""

    near_bytes: float
    price: Price


@dataclass(eq=False)
class Group:
    """Ops that will share a kernel, by their places in rising order; `why` says what stopped it from growing. A
    `chosen_kernels` one does not grow."""

    places: tuple[int, ...]
    price: float
    why: str = ""
    chosen: bool = False
    tried: set[Group] = field(default_factory=set["Group"])


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a kernel has no legal form, and how far behind its first op the op stands that is named (None: none is)."""

    error: IllegalSchedule
    named: int | None

    def about(self, first: int) -> str:
        """The reason for the group whose first op has this place, with a reference to the op."""
        return str(self.error) if self.named is None else self.error.about(f"@{first + self.named}")


def chosen_kernels(parts: GraphParts) -> list[Group]:
    """The kernels that were chosen before."""
    members: dict[int, list[int]] = {}
    for n, op in enumerate(parts.graph.ops):
        if op.kernel >= 0:
            members.setdefault(op.kernel, []).append(n)
    return [Group(tuple(p), 0.0, "chosen with its region", chosen=True) for p in members.values()]


class Merging:
    """Merges the ops of a graph into groups. `price` gives the modelled seconds of a kernel, or raises
    IllegalSchedule; `priced` counts how often it was asked. With `afar`, kernels that do not fit into a cache together
    are not taken to be in it apart. Raises IllegalSchedule if an op by itself has no legal form."""

    def __init__(self, parts: GraphParts, price: Price, afar: Afar | None = None) -> None:
        self.parts, self.price, self.afar = parts, price, afar
        self.distant: dict[object, float] = {}
        self.alike = Likeness(parts.graph, parts.layouts, parts.inlined)
        self.prices: dict[object, float | _Refusal] = {}
        self.priced = 0
        groups = chosen_kernels(parts)
        inlined = [parts.position[op] for op in parts.inlined if op.kernel < 0]
        later = passing_through(followers(parts.graph, parts.consumers), inlined)
        self.order = Order(later, [g.places for g in groups])
        self.group: dict[Op, Group] = {}
        for g in groups:
            g.price = self.cost_of(g.places)
            self._take(g)

    def groups(self) -> list[Group]:
        """All groups: those that were chosen before, and what merging makes of the others."""
        for op in self.parts.generated():
            if op not in self.group:
                place = (self.parts.position[op],)
                self._take(Group(place, self.cost_of(place)))
        for op in list(self.group):
            for producer in self.producers(op):
                self.try_merge(self.group[producer], self.group[op])
        self.merge_siblings()
        self.merge_strangers()
        return distinct(self.group.values())

    def _take(self, group: Group) -> None:
        for n in group.places:
            self.group[self.parts.graph.ops[n]] = group

    def _place_of(self, group: Group) -> int:
        """Its number in the topological order."""
        return self.order.group_of[group.places[0]]

    def _first(self, group: Group) -> Op:
        return self.parts.graph.ops[group.places[0]]

    def producers(self, op: Op) -> list[Op]:
        """Ops in kernels that `op` reads, also through inlined ones; nearest first."""
        found: dict[Op, None] = {}
        seen: set[Value] = set()
        todo = list(op.inputs)
        while todo:
            v = todo.pop()
            p = None if v in seen else self.parts.producer.get(v)
            seen.add(v)
            if p is None:
                continue
            if p in self.parts.inlined:
                todo += p.inputs
            elif p in self.group:
                found[p] = None
        return sorted(found, key=lambda p: -self.parts.position[p])

    def try_merge(self, a: Group, b: Group, saved: float = 0.0) -> bool:
        """Merge two groups if that saves at least a share `saved` of their time."""
        if (
            a is b
            or a.chosen
            or b.chosen
            or a in b.tried
            or len(a.places) + len(b.places) > PARTITION.max_kernel_ops
        ):
            return False
        if self.is_empty(a) != self.is_empty(b):
            return False  # the loops of one would run no step of the other
        if self.operands(a) + self.operands(b) > GROUPS.max_kernel_operands:
            b.why = b.why or f"together they have more than {GROUPS.max_kernel_operands} operands"
            return False
        clear = self.order.between(self._place_of(a), self._place_of(b))
        if isinstance(clear, Standing):
            b.why = b.why or clear.value
            return False
        places = tuple(heapq.merge(a.places, b.places))
        together = self._price(places)
        if isinstance(together, _Refusal):
            b.why = together.about(places[0])
        if isinstance(together, _Refusal) or (
            together > (1 - saved) * (a.price + b.price) and not self.pays_afar(a, b, places, saved)
        ):
            b.tried.add(a)
            b.why = b.why or "separate kernels are faster"
            return False
        self.order.merge(clear)
        self._take(Group(places, together, b.why or a.why))
        return True

    def pays_afar(self, a: Group, b: Group, places: tuple[int, ...], saved: float) -> bool:
        """Whether two groups touch more together than is found in a cache, and one kernel pays then."""
        if self.afar is None:
            return False
        kernels = [self.parts.kernel(p) for p in (a.places, b.places)]
        touched = {v for k in kernels for v in (*k.inputs, *k.outputs)}
        if sum(self.parts.hints.estimate(v.numel) * v.dtype.bytes for v in touched) < self.afar.near_bytes:
            return False
        first, second, together = (self._afar(self.afar, p) for p in (a.places, b.places, places))
        return together <= (1 - saved) * (first + second)

    def _afar(self, afar: Afar, places: tuple[int, ...]) -> float:
        key = self.alike.key(places)
        if key not in self.distant:
            self.distant[key] = afar.price(self.parts.kernel(places), self.parts.layouts)
        return self.distant[key]

    def is_empty(self, group: Group) -> bool:
        """Whether no op of a group makes an element."""
        return any(dims.ZERO in v.shape for v in self._first(group).outputs)

    def operands(self, group: Group) -> int:
        """How many operands the ops of a group have together."""
        return sum(len(self.parts.graph.ops[n].inputs) for n in group.places)

    def merge_siblings(self) -> None:
        """Small independent kernels that read a value in common share a launch."""
        for readers in list(self.parts.consumers.values()):
            groups = distinct(self.group[r] for r in readers if r in self.group)
            for other in groups[1:]:
                self.try_merge(self.group[self._first(groups[0])], self.group[self._first(other)])

    def merge_strangers(self) -> None:
        """Tiny kernels that share nothing but the shape of what they make share a launch, where it is a good part of
        their time."""
        alike: dict[tuple[Expr, ...], Group] = {}
        for op in self.parts.graph.ops:
            group = self.group.get(op)
            if group is None or group.price > PARTITION.max_brief_seconds:
                continue
            shape = self.parts.graph.ops[group.places[-1]].outputs[0].shape
            other = alike.get(shape)
            if other is not None and other is not group:
                why = group.why
                if not self.try_merge(other, group, PARTITION.min_launch_saving_ratio):
                    group.why = why  # nobody expects these two together
            alike[shape] = self.group[op]

    def cost_of(self, places: tuple[int, ...]) -> float:
        """Modelled seconds of the ops at these places in one kernel. Raises IllegalSchedule."""
        found = self._price(places)
        if isinstance(found, _Refusal):
            raise found.error
        return found

    def _price(self, places: tuple[int, ...]) -> float | _Refusal:
        key = self.alike.key(places)
        known = self.prices.get(key)
        if known is None:
            known = self.prices[key] = self._asked(places)
        return known

    def _asked(self, places: tuple[int, ...]) -> float | _Refusal:
        first, *others = places
        if others and self.priced >= GROUPS.max_priced_kernels:
            return _Refusal(_UNPRICED, None)
        self.priced += 1
        kernel = self.parts.kernel(places)
        try:
            return self.price(kernel, self.parts.layouts)
        except IllegalSchedule as refused:
            named = None if refused.source < 0 else self.parts.position[kernel.ops[refused.source]] - first
            return _Refusal(refused, named)


_UNPRICED = IllegalSchedule(
    f"not priced: {GROUPS.max_priced_kernels} kernels that are not alike were",
    law="a search ends",
    phase="partition",
)


def distinct(groups: Iterable[Group]) -> list[Group]:
    """Each group once, in order of first use."""
    return list(dict.fromkeys(groups))
