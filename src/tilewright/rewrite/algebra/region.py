"""A part of a graph as the algebraic rules see it: tensor expressions that read values by their ids.

Rules make new steps and redefine old ones; a value keeps its id, and its meaning, as long as somebody outside reads
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from tilewright.ir.expr import Axis, Expr, Symbol, axis, read
from tilewright.ir.graph import Op, Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.rewrite.normal.normalise import map_reads
from tilewright.tuning.thresholds import SIZES


@dataclass(frozen=True, eq=False)
class Step:
    """`value` is computed by `expr`, whose reads name values by id. `source` is the number of the op of the region
    from which the step stems, `name` its name if that is not the op's."""

    value: Value
    expr: TensorExpr
    source: int
    name: str = ""

    @property
    def id(self) -> int:
        """The id of the value."""
        return self.value.id

    @property
    def body(self) -> Expr:
        """The only body."""
        return self.expr.body[0]

    @property
    def has_terms(self) -> bool:
        """Whether the reduction is known to run over something: a sum is NaN then if a factor of its terms is."""
        return all(dims.at_least(a.extent, 1) for a in self.expr.reduce)

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """Ids that it reads."""
        return tuple(dict.fromkeys(operand(r) for r in self.expr.reads()))

    @cached_property
    def simple(self) -> str | None:
        """The combiner of a reduction whose state and result are the element itself ("add", "maximum", ...), else
        None."""
        r = self.expr.reduction
        if r is None or self.expr.scan is not None or r.lift[0].op != "slot" or r.finish[0].op != "slot":
            return None
        return r.combiner


@dataclass(frozen=True, eq=False)
class Program:
    """`steps` by the id of their value; `leaves` are read and not computed here; `outputs` are read outside.

    `constants` says of frozen leaves what is known of their elements. `sizes` are
    the sizes that costs are computed for; from `fresh` on there are free ids. `fixed` are steps that no rule
    redefines."""

    steps: Mapping[int, Step]
    leaves: Mapping[int, Value]
    outputs: tuple[int, ...]
    fresh: int
    constants: Mapping[int, object] = field(default_factory=dict[int, object])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    fixed: frozenset[int] = frozenset()

    def value(self, id: int) -> Value:
        """The value with this id."""
        return self.steps[id].value if id in self.steps else self.leaves[id]

    def bytes(self, v: Value) -> int:
        """Bytes of a value, for the sizes that costs are computed for."""
        return v.dtype.bytes * _count(v.shape, tuple(self.sizes.items()))

    def changed(self, new: Sequence[Step]) -> Program:
        """The program with steps added or redefined (producers first); one step for equal ones, none for nothing."""
        steps = dict(self.steps)
        known = {s.expr: s.id for s in self.steps.values()}
        same: dict[int, int] = {}
        for step in new:
            expr = renumber_reads(step.expr, lambda i: same.get(i, i)) if same else step.expr
            first = known.get(expr)
            if first is not None and step.id not in self.steps:
                same[step.id] = first
                continue
            steps[step.id] = step if expr is step.expr else replace(step, expr=expr)
            known.setdefault(expr, step.id)
        return replace(self, steps=_reachable(steps, self.outputs))

    def producers(self, id: int) -> tuple[int, ...]:
        """Ids that the step of a value reads, if it is one."""
        return self.steps[id].reads if id in self.steps else ()

    @cached_property
    def cost(self) -> int:
        """Bytes of intermediates: the result of every reduction once, and for every reduction and every output the
        pointwise results that it is computed from. Each counts its own, as kernels that recompute what is cheap do."""
        anchors = [s for s in self.steps.values() if s.expr.reduction is not None or s.id in self.outputs]
        made = sum(self.bytes(s.value) for s in anchors if s.expr.reduction is not None)
        return made + sum(self.bytes_behind([a.id]) for a in anchors)

    def bytes_behind(self, anchors: Sequence[int]) -> int:
        """Bytes of the distinct pointwise results, views apart, from which these values are computed, up to the
        reductions before them. This is what a kernel that makes them all reads and writes if nothing is fused."""
        seen: set[int] = set()
        stack = [i for a in anchors for i in (self.producers(a) if self._is_reduction(a) else [a])]
        total = 0
        while stack:
            id = stack.pop()
            if id in seen or id not in self.steps or self._is_reduction(id):
                continue
            seen.add(id)
            stack += self.producers(id)
            if not self.steps[id].expr.is_view():
                total += self.bytes(self.steps[id].value)
        return total

    def _is_reduction(self, id: int) -> bool:
        return id in self.steps and self.steps[id].expr.reduction is not None


@lru_cache(1 << 12)
def _count(extents: tuple[Expr, ...], sizes: tuple[tuple[str, int], ...]) -> int:
    """The product of extents; a size that is not given counts as `SIZES.assumed_size`, or as near as it gets."""
    symbols = [s.value for e in extents for s in dims.symbols_of(e) if isinstance(s.value, Symbol)]
    guesses = {s.name: max(s.low, min(SIZES.assumed_size, s.high or SIZES.assumed_size)) for s in symbols}
    return dims.evaluate(dims.prod(extents), {**guesses, **dict(sizes)})


def operand(r: Expr) -> int:
    """What a read reads: an id, or the number of an operand."""
    assert isinstance(r.value, int)
    return r.value


def renumber_reads(expr: TensorExpr, number: Callable[[int], int]) -> TensorExpr:
    """The expression with its reads, also those inside indices, reading other ids or operands."""

    def change(r: Expr) -> Expr:
        return read(number(operand(r)), [map_reads(a, change) for a in r.args], r.dtype)

    return expr.map_reads(change)


def _reachable(steps: Mapping[int, Step], outputs: Iterable[int]) -> dict[int, Step]:
    live: set[int] = set()
    stack = list(outputs)
    while stack:
        id = stack.pop()
        if id in live or id not in steps:
            continue
        live.add(id)
        stack += steps[id].reads
    return {id: s for id, s in steps.items() if id in live}


def canonical(ops: Sequence[Op], outputs: Iterable[Value]) -> tuple[Program, list[Value]]:
    """The program of some ops, each with one result, and the values that its ids stand for: equal programs for equal
    parts of a graph. Sizes are symbols by the order in which they occur."""
    numbers: dict[Value, int] = {}
    for op in ops:
        for v in (*op.inputs, *op.outputs):
            numbers.setdefault(v, len(numbers))
    made = {op.output for op in ops}
    steps: dict[int, Step] = {}
    for k, op in enumerate(ops):
        assert op.expr is not None
        expr = renumber_reads(op.expr, lambda i, op=op: numbers[op.inputs[i]])
        steps[numbers[op.output]] = Step(replace(op.output, id=numbers[op.output]), expr, k)
    leaves = {n: replace(v, id=n) for v, n in numbers.items() if v not in made}
    required = tuple(sorted(numbers[v] for v in outputs))
    return Program(steps, leaves, required, len(numbers)), list(numbers)


def position(a: Axis) -> Expr:
    """The index expression of an axis; an axis of extent 1 only takes the value 0."""
    return dims.ZERO if a.extent is dims.ONE else axis(a)
