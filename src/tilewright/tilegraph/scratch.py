"""Which values a kernel keeps in scratch memory, read off its tile program by value numbering.

A program stores computed numbers, and knows no values of the graph. So both are numbered alike: equal numbers, equal
computations from the same parameters. What a segment of a loop decides leaves a mask out: a choice has the numbers of
its branches too, and x + 0 and x * 1 that of x.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from tilewright.ir.expr import Expr, walk
from tilewright.ir.graph import Op, Value
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Compute, Load, Store, TileProgram, defines
from tilewright.tuning.search_limits import FACTS

FORMS = ("close_", "coarse_", "quick_")
"""Prefixes of functions that a schedule may take for another one (see `ir.expr.SCALARS`)."""

THROUGH = ("cast", "narrow", "checked", "implied")
"""Ops that leave their first argument what it is, or as it is rounded."""

NEUTRAL = {"add": 0, "mul": 1}
"""Ops, and the constant that changes nothing in them."""


Numbers = tuple[int, ...]
"""The number of an expression as it is written, then those that it has where a choice is decided."""


def kept_in_scratch(scheduled: Scheduled) -> set[Value]:
    """The values of a kernel that its program stores in scratch memory for a later pass.

    Results of reductions are not told apart, so of two values that differ in nothing else both are named. A buffer with
    a part of an op's body, which is no value, names none."""
    if not scheduled.program.scratch:
        return set()
    numbering = Numbering()
    stored = _stored(scheduled.program, numbering)
    values: dict[Value, Numbers] = {
        v: (numbering.of("param", k),) for k, v in enumerate(scheduled.kernel.inputs)
    }
    made: list[Value] = []
    for op in scheduled.kernel.ops:
        values.update(_results(op, values, numbering))
        made += op.outputs
    return {v for v in made if not stored.isdisjoint(values[v])}


def _stored(program: TileProgram, numbering: Numbering) -> set[int]:
    """The numbers of what a program stores in scratch memory, but for constants that fill it up."""
    scratch = {b.name for b in program.scratch}
    held: dict[str, Numbers] = {b.name: (numbering.of("param", k),) for k, b in enumerate(program.params)}
    variables: dict[int, Numbers] = {}
    found: set[int] = set()

    def variable(x: Expr) -> Numbers | None:
        return variables[x.value] if x.op == "var" and isinstance(x.value, int) else None

    for s in program.statements():
        if isinstance(s, Load):
            variables[s.var.id] = held.get(s.buffer.name) or (numbering.of("filled", s.buffer.name),)
        elif isinstance(s, Compute):
            variables[s.var.id] = numbering(s.expr, variable)
        elif isinstance(s, Store):
            if s.buffer.name in scratch and s.value.op != "const":
                held[s.buffer.name] = numbering(s.value, variable)
                found.add(held[s.buffer.name][0])
        else:
            variables.update((v.id, (numbering.of("reduction"),)) for v in defines(s))
    return found


def _results(op: Op, values: Mapping[Value, Numbers], numbering: Numbering) -> dict[Value, Numbers]:
    """The numbers of an op's results."""
    assert op.expr is not None

    def operand(x: Expr) -> Numbers | None:
        return values[op.inputs[x.value]] if x.op == "read" and isinstance(x.value, int) else None

    if op.expr.reduction is not None:
        return dict.fromkeys(op.outputs, (numbering.of("reduction"),))
    return {op.output: numbering(op.expr.body[0], operand)}


class Numbering:
    """Value numbering: equal expressions have equal numbers, whatever places they are about, the types in which they
    are rounded, and the forms of functions."""

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], int] = {}

    def of(self, *key: object) -> int:
        """The number of an op on numbers, or of a leaf."""
        if key[0] in NEUTRAL:
            neutral = self.of("const", NEUTRAL[str(key[0])])
            rest = [k for k in key[1:] if k != neutral]
            if len(rest) == 1 and isinstance(rest[0], int):
                return rest[0]
        return self.known.setdefault(key, len(self.known))

    def __call__(self, e: Expr, leaf: Callable[[Expr], Numbers | None]) -> Numbers:
        """The numbers of an expression; `leaf` gives those of its operands."""
        done: dict[Expr, Numbers] = {}
        for x in walk(e):
            done[x] = leaf(x) or self._of_node(x, [done[a] for a in x.args])
        return done[e]

    def _of_node(self, x: Expr, args: list[Numbers]) -> Numbers:
        if x.op in THROUGH:
            return args[0]
        if x.op == "const":
            return (self.of("const", x.value),)
        op = next((x.op.removeprefix(p) for p in FORMS if x.op.startswith(p)), x.op)
        found = [
            self.of(op, *chosen) for chosen in itertools.islice(itertools.product(*args), FACTS.max_numbers)
        ]
        branches = (*args[1], *args[2]) if op == "where" else ()
        return tuple(dict.fromkeys((found[0], *branches, *found[1:])))[: FACTS.max_numbers]
