"""How much of a captured program runs as generated code, and why the rest does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tilewright.ir.graph import CHECK, LibraryCall, Op, Origin, Value
from tilewright.ir.kernel import Cover, Kernel, LibraryStep

BY_CHOICE = frozenset({"contraction", "convolution", "attention"})
"""Reasons that count as choice: a kernel could be generated, and the library is taken as the faster one."""
ADMITTED = frozenset({*BY_CHOICE, "sort", "random"})
"""Reasons that `strict` admits."""

How = Literal["own", "choice", "need"]
"""Who runs what no kernel was generated for: a routine of our own, a library by choice, a library by need."""


@dataclass(frozen=True, slots=True)
class Row:
    """Library calls of one op: how many captured nodes, and why."""

    name: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """Captured nodes (pure views and run-time checks are not counted) by how they run. Prints as one line."""

    ops: int
    generated: int
    kernels: int
    choice: tuple[Row, ...] = ()
    need: tuple[Row, ...] = ()
    own: tuple[Row, ...] = ()
    graphs: int = 1
    """How many graphs these are the nodes of: one for each size, pass or part that was compiled by itself."""

    def refused(self) -> tuple[str, ...]:
        """Names of library calls by need that `strict` does not admit."""
        return tuple(dict.fromkeys(row.name for row in self.need if row.reason not in ADMITTED))

    def __add__(self, other: Coverage) -> Coverage:
        """Both graphs together."""
        return Coverage(
            self.ops + other.ops,
            self.generated + other.generated,
            self.kernels + other.kernels,
            _merged(self.choice + other.choice),
            _merged(self.need + other.need),
            _merged(self.own + other.own),
            self.graphs + other.graphs,
        )

    def around(self, body: Coverage) -> Coverage:
        """With the nodes of a loop's body, which is a part of this graph."""
        return replace(self + body, graphs=self.graphs)

    def __str__(self) -> str:
        plural = "kernel" if self.kernels == 1 else "kernels"
        of = f" of {self.graphs} graphs" if self.graphs > 1 else ""
        parts = [f"generated {self.generated} of {self.ops} ops in {self.kernels} {plural}{of}"]
        for rows, how in (
            (self.own, "in routines of our own"),
            (self.choice, "as library calls by choice"),
            (self.need, "as library calls"),
        ):
            if rows:
                listed = ", ".join(f"{r.name} x{r.count} ({r.reason})" for r in rows)
                parts.append(f"{sum(r.count for r in rows)} {how}: {listed}")
        return "; ".join(parts)


def total(parts: Sequence[Coverage]) -> Coverage | None:
    """All graphs together; None without any."""
    found: Coverage | None = None
    for part in parts:
        found = part if found is None else found + part
    return found


def _merged(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    total: Counter[tuple[str, str]] = Counter()
    for r in rows:
        total[r.name, r.reason] += r.count
    return tuple(
        Row(name, reason, n) for (name, reason), n in sorted(total.items(), key=lambda x: (-x[1], x[0]))
    )


def executor_of(step: LibraryStep, call: LibraryCall) -> How:
    """Who runs a step that calls `call`."""
    if call.own:
        return "own"
    return "choice" if step.choice or call.reason in BY_CHOICE else "need"


def is_counted(origin: Origin) -> bool:
    """Whether coverage counts a captured node: views do no work, and a check guards work of others."""
    return not origin.view and (origin.call is None or origin.call.reason != CHECK)


def is_stored_line(op: Op, stored: frozenset[Value]) -> bool:
    """Whether the line that the call of an op would put somewhere is one of those `stored` there by kernels."""
    return op.call is not None and op.call.line is not None and op.inputs[op.call.line.source] in stored


def coverage_of(cover: Cover) -> Coverage:
    """Count the captured nodes of `cover.graph` by how its steps run them.

    A node is generated unless a library step stands for it: also one that was folded away or became a view."""
    calls: dict[int, tuple[LibraryCall, How]] = {}
    rows: dict[How, list[Row]] = {"own": [], "choice": [], "need": []}
    stored = cover.stored_lines()
    for step in cover.steps:
        if not isinstance(step, LibraryStep) or step.op.call is None:
            continue
        call = step.op.call
        if call.part is not None or is_stored_line(step.op, stored):
            continue  # it says where a kernel's lines go
        origins = step.origins or ((step.op.origin,) if step.op.origin >= 0 else ())
        for origin in origins:
            calls.setdefault(origin, (call, executor_of(step, call)))
        if not origins and call.reason != CHECK:
            rows["need"].append(Row(call.name, call.reason, 1))
    ops = [o for o in cover.graph.origins if is_counted(o)]
    generated = 0
    for origin in ops:
        found = calls.get(origin.id)
        if found is None:
            generated += 1
        else:
            rows[found[1]].append(Row(origin.name, found[0].reason, 1))
    kernels = sum(isinstance(step, Kernel) for step in cover.steps)
    parts = {who: _merged(tuple(found)) for who, found in rows.items()}
    return Coverage(len(ops), generated, kernels, parts["choice"], parts["need"], parts["own"])
