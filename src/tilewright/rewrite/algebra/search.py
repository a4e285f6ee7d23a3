"""The search over algebraic rules: which of them, applied where, leave the fewest bytes of intermediates.

Only parts of a graph are searched in which a product or a broadcast makes something much larger than what it reads:
scores of attention, distances, outer sums. Equal parts are searched once. The search is a few descents, then simulated
annealing; it is seeded, and bounded in steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from torch import Tensor

from tilewright.ir.expr import Symbol, walk
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.pattern import Rewriter
from tilewright.ir.sizes import dims
from tilewright.rewrite.normal.identities import IEEE_RULES
from tilewright.rewrite.normal.normalise import normalise
from tilewright.tuning.rewrite_limits import ALGEBRA_SEARCH
from tilewright.tuning.thresholds import SIZES

from .bounds import of_tensor
from .factors import Draft
from .laws import RULES, AlgebraRule
from .region import Program, Step, canonical, operand, renumber_reads

INPUT = "an input"
"""What a factor is called that no op of a part makes."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A rule that was used: its name, and the op at which it was."""

    rule: str
    site: str

    def __str__(self) -> str:
        return f"{self.rule} at {self.site}"


@dataclass(frozen=True, slots=True)
class RefusedRule:
    """A rule that would apply at an op, to a factor or term that the ops `parts` make, but for a condition."""

    rule: str
    site: str
    parts: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        of = f" ({', '.join(self.parts)})" if self.parts else ""
        return f"{self.rule} at {self.site}: {self.why}{of}"


@dataclass(frozen=True, slots=True)
class Change:
    """What the search did to one part of a graph (or to `repeats` equal ones): rules in order, and the modelled
    bytes of intermediates before and after."""

    applied: tuple[Applied, ...]
    before: int
    after: int
    repeats: int = 1

    def __str__(self) -> str:
        rules = Counter(map(str, self.applied))
        listed = ", ".join(f"{rule} x{n}" if n > 1 else rule for rule, n in rules.items())
        times = f" (in {self.repeats} equal parts)" if self.repeats > 1 else ""
        return f"{self.before / 2**20:.1f} to {self.after / 2**20:.1f} MiB of intermediates{times}: {listed}"


@dataclass(frozen=True, slots=True, eq=False)
class Rearranged:
    """A graph after the search, what was changed in it, and which rules were refused where it ended."""

    graph: Graph
    changes: tuple[Change, ...] = ()
    refused: tuple[RefusedRule, ...] = ()


@dataclass(frozen=True, slots=True)
class Search:
    """Settings of the search. `limit` is a magnitude within which float inputs are trusted to stay (None: they may be
    anything), `round_intermediates` the option of that name, `steps` those of annealing. `least_bytes` are what the
    result of an op has that starts a part to be searched."""

    seed: int = 0
    steps: int = ALGEBRA_SEARCH.annealing_steps
    limit: float | None = None
    round_intermediates: bool = False
    least_bytes: int = 1 << 16
    rules: tuple[AlgebraRule, ...] = RULES


def rearrange(
    graph: Graph, sizes: Mapping[str, int] | None = None, search: Search | None = None,
    name: Callable[[Op], str] = lambda op: op.name,
) -> Rearranged:  # fmt: skip
    """The graph with factors and terms where they leave the fewest bytes of intermediates.

    It comes after `normalise` and before partitioning: every reduction stays an op of its own, followed or preceded by
    new pointwise ops, so that a kernel may end in between. `sizes` are typical values of symbols. Values that are read
    elsewhere keep their identity. A captured node whose ops change loses its library call, which would read or make
    what is not there any more; other nodes keep theirs. `name` says how ops are called in what is reported."""
    settings = search or Search()
    found: dict[object, _Solution] = {}
    counts: Counter[object] = Counter()
    ops: dict[Op, tuple[Op, ...]] = {}
    first_id = graph.fresh_id()
    changed: set[int] = set()
    for part in regions(graph, sizes or {}, settings.least_bytes):
        closed = with_known(graph, part)
        program, values = program_of(graph, closed, part, sizes or {})
        key = _key(program)
        if key not in found:
            found[key] = _searched(program, closed, settings, name)
        solution = found[key]
        if not solution.change.applied:
            continue
        counts[key] += 1
        elsewhere = {v for op in closed if op not in part for v in op.outputs}
        new = [
            op
            for op in ops_of(solution.program, closed, values, first_id)
            if elsewhere.isdisjoint(op.outputs)
        ]
        first_id += len(solution.program.steps)
        new += _views(part, new)
        changed |= {op.origin for op in part if op not in new}
        ops |= dict.fromkeys(part, ())
        ops[part[-1]] = tuple(new)
    refused = tuple(dict.fromkeys(r for s in found.values() for r in s.refused))
    if not ops:
        return Rearranged(graph, refused=refused)
    changes = [replace(s.change, repeats=counts[key]) for key, s in found.items() if counts[key]]
    return Rearranged(_replaced(graph, ops, changed), tuple(changes), refused)


# --- parts of a graph ------------------------------------------------------------


def regions(graph: Graph, sizes: Mapping[str, int], least_bytes: int) -> list[tuple[Op, ...]]:
    """The parts worth searching, each in the order of the graph: ops that make or read what an op has made much larger
    than its operands, ops between them, and pointwise ops around."""
    large = _large(graph, sizes, least_bytes)
    parent: dict[Op, Op] = {}

    def root(op: Op) -> Op:
        while parent[op] is not op:
            op = parent[op]
        return op

    consumers = graph.consumers()
    for op in graph.ops:
        if not _plain(op) or not any(v in large for v in (*op.inputs, *op.outputs)):
            continue
        parent[op] = op
        for v in op.inputs:
            if v in large:
                for other in consumers[v]:
                    if other in parent:
                        parent[root(other)] = root(op)
                maker = large[v]
                if maker in parent:
                    parent[root(maker)] = root(op)
    groups: dict[Op, set[Op]] = {}
    for op in parent:
        groups.setdefault(root(op), set()).add(op)
    parts = [_closed(graph, g) for g in groups.values()]
    return [part for part in parts if any(op.expr and op.expr.reduction for op in part)]


def _large(graph: Graph, sizes: Mapping[str, int], least_bytes: int) -> dict[Value, Op]:
    """Intermediate values that are much larger than what they come from, with the ops that make them."""
    found: dict[Value, Op] = {}
    known = _known(graph)
    for op in graph.ops:
        if not _plain(op) or not op.inputs or op.output in known:
            continue
        size, wide = _numel(op.output, sizes), max(_numel(v, sizes) for v in op.inputs)
        follows = any(v in found and 2 * size >= _numel(v, sizes) for v in op.inputs)
        if follows or (size >= SIZES.min_growth_ratio * wide and size * op.output.dtype.bytes >= least_bytes):
            found[op.output] = op
    return found


def _plain(op: Op) -> bool:
    return op.expr is not None and len(op.outputs) == 1


def _numel(v: Value, sizes: Mapping[str, int]) -> int:
    known = {s.value.name: sizes.get(s.value.name, max(s.value.low, SIZES.assumed_size))
             for e in v.shape for s in dims.symbols_of(e) if isinstance(s.value, Symbol)}  # fmt: skip
    return dims.evaluate(v.numel, known)


def _closed(graph: Graph, group: set[Op]) -> tuple[Op, ...]:
    """The group with the ops on paths between its ops, as far as they are tensor expressions with one result."""
    after: set[Value] = set()
    below: dict[Op, bool] = {}
    for op in graph.ops:
        if op in group or any(v in after for v in op.inputs):
            below[op] = True
            after |= set(op.outputs)
    needed: set[Value] = set()
    part: list[Op] = []
    for op in reversed(graph.ops):
        if op in group or (op in below and any(v in needed for v in op.outputs)):
            needed |= set(op.inputs)
            if _plain(op):
                part.append(op)
    return tuple(reversed(part))


def _known(graph: Graph) -> dict[Value, Op]:
    """Pointwise ops that read no data: constants, positions, masks of these. By what they make."""
    found: dict[Value, Op] = {}
    for op in graph.ops:
        if _plain(op) and op.expr is not None and op.expr.is_pointwise and all(v in found for v in op.inputs):
            found[op.output] = op
    return found


def with_known(graph: Graph, part: Sequence[Op]) -> tuple[Op, ...]:
    """The part, behind the ops that it reads and that read no data themselves. Several parts may share those."""
    known, inside = _known(graph), set(part)
    needed: set[Op] = set()
    stack = [v for op in part for v in op.inputs]
    while stack:
        op = known.get(stack.pop())
        if op is not None and op not in needed and op not in inside:
            needed.add(op)
            stack += op.inputs
    return (*(op for op in graph.ops if op in needed), *part)


def program_of(
    graph: Graph, ops: Sequence[Op], part: Sequence[Op], sizes: Mapping[str, int]
) -> tuple[Program, list[Value]]:
    """Some ops as a program in which rules redefine those of `part`, and the values that its ids stand for. What only
    the library calls of its own ops read is not an output."""
    inside, free = set(ops), set(part)
    required, consumers = graph.kept(), graph.consumers()
    read = [
        op.output
        for op in part
        if op.output in required or any(c not in inside for c in consumers.get(op.output, []))
    ]
    program, values = canonical(ops, [v for v in read if not _for_a_call(graph, v, required, consumers)])
    tensors = {n: graph.constants.get(v) for n, v in enumerate(values)}
    held = {n: of_tensor(t) for n, t in tensors.items() if isinstance(t, Tensor)}
    fixed = frozenset(values.index(op.output) for op in ops if op not in free)
    return replace(program, constants=held, sizes=dict(sizes), fixed=fixed), values


def _for_a_call(graph: Graph, v: Value, required: set[Value], consumers: Mapping[Value, list[Op]]) -> bool:
    """Whether only views read the value that nothing in the graph reads: they are there for a library call."""
    if v in required:
        return False
    return all(
        c.expr is not None and c.expr.is_view() and _for_a_call(graph, c.output, required, consumers)
        for c in consumers.get(v, [])
    )


def _key(program: Program) -> object:
    """Equal for programs that compute the same from leaves of which the same is known."""
    steps = tuple((s.expr, s.value.dtype) for s in program.steps.values())
    leaves = tuple((v.shape, v.dtype) for v in program.leaves.values())
    held = tuple(program.constants.items())
    return steps, leaves, held, program.outputs, program.fixed


# --- the search ------------------------------------------------------------


Move = tuple[AlgebraRule, Step, tuple[Step, ...]]
"""A rule, the step at which it applies, and the steps that it makes."""


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """A program, and the rules that led to it."""

    program: Program
    applied: tuple[Applied, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Solution:
    program: Program
    change: Change
    refused: tuple[RefusedRule, ...]


class Walk:
    """Walks over the programs that rules lead to. `name` gives the name of the op from which a step stems."""

    def __init__(self, program: Program, search: Search, name: Callable[[Step], str]) -> None:
        self.search, self.name = search, name
        self.start = _State(program)
        self._draft = Draft(program, search.limit, search.round_intermediates)
        self._rewriter = Rewriter(IEEE_RULES)
        self._at: dict[frozenset[Step], tuple[Move, ...]] = {}
        self._after: dict[tuple[frozenset[Step], tuple[Step, ...]], Program] = {}

    def moves(self, program: Program) -> list[Move]:
        """Every way to apply a rule once. What it is at a step depends on that step and those behind it."""
        self._draft.program = program
        self._draft.refusals.clear()
        behind = _behind(program)
        found: list[Move] = []
        for step in program.steps.values():
            if step.id in program.fixed:
                continue
            key = behind[step.id]
            if key not in self._at:
                self._at[key] = tuple(
                    (rule, step, new) for rule in self.search.rules for new in rule.find(self._draft, step)
                )
            found += self._at[key]
        return found

    def after(self, s: _State, move: Move) -> _State:
        """The state after a move."""
        rule, step, new = move
        key = frozenset(s.program.steps.values()), new
        if key not in self._after:
            self._after[key] = s.program.changed([self._simplified(x) for x in new])
        return _State(self._after[key], (*s.applied, Applied(rule.name, self.name(step))))

    def refused(self, program: Program) -> tuple[RefusedRule, ...]:
        """The rules that would apply to the program but for a condition."""
        draft = self._draft
        draft.program = program
        found: dict[tuple[str, tuple[str, ...], str], RefusedRule] = {}
        for step in program.steps.values():
            if step.id in program.fixed:
                continue
            for rule in self.search.rules:
                draft.refusals.clear()
                for _ in rule.find(draft, step):
                    pass
                for part, why in draft.refusals:
                    behind = [draft.step(operand(r)) for r in walk(part) if r.op == "read"]
                    names = tuple(dict.fromkeys(INPUT if s is None else self.name(s) for s in behind))
                    site = self.name(step)
                    found.setdefault((site, names, why), RefusedRule(rule.name, site, names, why))
        return tuple(found.values())

    def _simplified(self, step: Step) -> Step:
        body = tuple(self._rewriter(b) for b in step.expr.body)
        return step if body == step.expr.body else replace(step, expr=replace(step.expr, body=body))

    def descend(self, s: _State, only: Iterable[AlgebraRule] | None = None) -> _State:
        """The steepest way down."""
        wanted = set(self.search.rules if only is None else only)
        for _ in range(ALGEBRA_SEARCH.descent_steps):
            ways = [self.after(s, m) for m in self.moves(s.program) if m[0] in wanted]
            best = min(ways, key=lambda n: n.program.cost, default=s)
            if best.program.cost >= s.program.cost:
                return s
            s = best
        return s

    def anneal(self, s: _State) -> _State:
        """The best state on a walk that also goes up, less and less."""
        random, best = Random(self.search.seed), s
        scale = max(s.program.cost, 1)
        for k in range(self.search.steps):
            heat = 0.2 * (1 - k / self.search.steps) ** 2
            ways = self.moves(s.program)
            if not ways:
                return best
            chosen = self.after(s, random.choice(ways))
            loss = (chosen.program.cost - s.program.cost) / scale
            if loss <= 0 or random.random() < math.exp(-loss / heat):
                s = chosen
            if s.program.cost < best.program.cost:
                best = s
        return best


def _behind(program: Program) -> dict[int, frozenset[Step]]:
    """Every step with all that it is computed from."""
    found: dict[int, frozenset[Step]] = {}

    def go(id: int) -> frozenset[Step]:
        if id not in found:
            step = program.steps[id]
            found[id] = frozenset((step,)).union(*(go(p) for p in step.reads if p in program.steps))
        return found[id]

    for id in program.steps:
        go(id)
    return found


def _searched(program: Program, part: Sequence[Op], search: Search, name: Callable[[Op], str]) -> _Solution:
    """The best program that the search finds; without a change that is the one it is given."""
    walk = Walk(program, search, lambda step: name(part[step.source]))
    outward = [r for r in search.rules if "leaves" in r.name or "stands" in r.name]
    ends = [walk.descend(walk.start), walk.descend(walk.descend(walk.start, outward))]
    ends.append(walk.descend(walk.anneal(walk.start)))
    best = min(ends, key=lambda s: (s.program.cost, len(s.applied)))
    if best.program.cost >= program.cost:
        best = walk.start
    change = Change(best.applied, program.cost, best.program.cost)
    return _Solution(best.program, change, walk.refused(best.program))


# --- back to a graph ------------------------------------------------------------


def ops_of(program: Program, part: Sequence[Op], values: Sequence[Value], first_id: int) -> list[Op]:
    """The steps as ops, producers first: unchanged ones are the ops that they were."""
    table: dict[int, Value] = dict(enumerate(values))
    out: list[Op] = []
    done: set[int] = set()

    def value(id: int) -> Value:
        if id not in table:
            v = program.value(id)
            table[id] = Value(first_id + len([k for k in table if k >= len(values)]), v.shape, v.dtype)
        return table[id]

    def emit(id: int) -> None:
        if id in done or id not in program.steps:
            return
        done.add(id)
        for producer in program.producers(id):
            emit(producer)
        out.append(_op_of(program.steps[id], part, value))

    for id in program.steps:
        emit(id)
    return out


def _views(part: Sequence[Op], new: Sequence[Op]) -> list[Op]:
    """The views of the part of which the source is still there: library calls may read them."""
    made, inside = {v for op in new for v in op.outputs}, {v for op in part for v in op.outputs}
    out: list[Op] = []
    for op in part:
        if op.expr is not None and op.expr.is_view() and op.output not in made:
            if all(v in made or v not in inside for v in op.inputs):
                out.append(op)
                made.add(op.output)
    return out


def _op_of(step: Step, part: Sequence[Op], value: Callable[[int], Value]) -> Op:
    old = part[step.source]
    operands: dict[Value, int] = {}
    expr = renumber_reads(step.expr, lambda id: operands.setdefault(value(id), len(operands)))
    out = value(step.id)
    new = replace(old, name=step.name or old.name, inputs=tuple(operands), outputs=(out,), expr=expr)
    return old if old.output is out and old.inputs == new.inputs and old.expr == expr else new


def _replaced(graph: Graph, instead: Mapping[Op, Sequence[Op]], changed: Iterable[int]) -> Graph:
    """The graph with ops replaced, and without the library calls of the captured nodes that changed."""
    lost = set(changed)
    origins = tuple(replace(o, call=None) if o.id in lost else o for o in graph.origins)
    ops = [op for old in graph.ops for op in instead.get(old, (old,))]
    made = {v: op for op in ops for v in op.outputs}
    out: list[Op] = []
    done: set[Op] = set()

    def emit(op: Op) -> None:
        if op in done:
            return
        done.add(op)
        for v in op.inputs:
            if v in made:
                emit(made[v])
        out.append(op)

    for op in ops:
        emit(op)
    result = normalise(replace(graph, ops=tuple(out), origins=origins))
    result.verify()
    return result
