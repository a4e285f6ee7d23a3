"""Ops, and the values between them, each with the memory level where it lies while it is read.

How two tiles meet at an edge (the whole one is there, or a step of a loop at a time) is no field: the loops of a tile
program run over classes of its form, and tell of no value along which axis it streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.analysis.dependence.properties import size
from tilewright.ir.expr import show
from tilewright.ir.graph import Op, Value
from tilewright.ir.kernel import Step, ViewStep
from tilewright.target import MemoryKind


@dataclass(frozen=True, slots=True)
class Node:
    """An op where one step of a cover runs it. An op that several kernels compute for themselves is a node in each."""

    op: Op
    step: Step

    @property
    def is_view(self) -> bool:
        """Whether it only gives memory another name, which moves nothing."""
        return isinstance(self.step, ViewStep)


@dataclass(frozen=True, slots=True)
class Edge:
    """`value`, made by `producer` and read by `consumer`, lies at `level`.

    Without a producer it comes from outside: an input or a frozen tensor. Without a consumer it goes to the caller, or
    nothing reads it (a second result of a library call)."""

    value: Value
    producer: Node | None
    consumer: Node | None
    level: MemoryKind

    @property
    def on_chip(self) -> bool:
        """Whether it stays inside one kernel."""
        return self.level.core


@dataclass(frozen=True, slots=True)
class TileGraph:
    """Ops in the order in which they run, and the edges between them, those of a producer together."""

    ops: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def at(self, level: MemoryKind) -> tuple[Edge, ...]:
        """The edges at a level."""
        return tuple(e for e in self.edges if e.level is level)

    def levels(self) -> tuple[MemoryKind, ...]:
        """The levels that edges are at, lowest first."""
        return tuple(sorted({e.level for e in self.edges}))

    def show(self) -> str:
        """The edges as text, those of one value at one level in one line: `value  producer -> consumers  level  bytes`.
        `op@n` is an op of step n."""
        number: dict[Step, int] = {}
        for node in self.ops:
            number.setdefault(node.step, len(number))
        named = lambda node: "outside" if node is None else f"{node.op.name}@{number[node.step]}"  # noqa: E731
        rows: list[tuple[str, ...]] = []
        for value, producer, level, consumers in self._lines():
            shape = ", ".join(map(show, value.shape))
            route = f"{named(producer)} -> {', '.join(map(named, consumers))}"
            rows.append((f"%{value.id}:{value.dtype}[{shape}]", route, level.name, show(size(value).bytes)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _lines(self) -> Iterator[tuple[Value, Node | None, MemoryKind, list[Node | None]]]:
        together: dict[tuple[Value, Node | None, MemoryKind], list[Node | None]] = {}
        for e in self.edges:
            together.setdefault((e.value, e.producer, e.level), []).append(e.consumer)
        for (value, producer, level), consumers in together.items():
            yield value, producer, level, consumers
