"""Rows of tables, each read and written as one: what is written into parts of row t is put into a copy of the row, and
the copy into the table once, at the last of these writes.

`table[t, 1:] = a; table[t, 0] = b` is `row = table[t].clone(); row[1:] = a; row[0] = b; table[t] = row`, and
`table[t, :-1]` is `table[t][:-1]`. So what one step wrote in several parts is one value that the next step reads."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from tilewright.capture.loops.leaving import memories_of, overlaps
from tilewright.capture.loops.nodes import val_of
from tilewright.capture.loops.taken.parts import is_basic_index, is_full_slice, spelled_index
from tilewright.capture.modes import nodes_without_gradients


@dataclass(frozen=True, slots=True)
class _Table:
    """A tensor of which all parts that are taken or written are those of rows: what lies at a number of dim `place`."""

    base: fx.Node
    place: int
    rows: dict[fx.Node, tuple[int, tuple[object, ...]]]
    """Of each access: number of the row, and which part of it."""
    last: dict[int, fx.Node]
    """The last write into a row."""

    def index(self, number: int) -> tuple[object, ...]:
        """What takes a row of the table."""
        return (*[slice(None)] * self.place, number)


def write_rows_once(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph in which tables are written row by row; itself if none is written in parts of rows. Nodes carry
    `meta["example_value"]`."""
    nodes = list(gm.graph.nodes)
    where = {n: k for k, n in enumerate(nodes)}
    bases = {
        n.args[0]: None for n in nodes if n.target is operator.setitem and isinstance(n.args[0], fx.Node)
    }
    silent = nodes_without_gradients(nodes)
    tables = [
        t for base in bases if (t := _table(base, nodes, where)) is not None and not silent & t.rows.keys()
    ]
    if not tables:
        return gm
    of = {access: t for t in tables for access in t.rows}
    writer = _Writer(fx.Graph(), {}, {})
    for node in nodes:
        if node not in of:
            writer.values[node] = writer.graph.node_copy(node, writer.values.__getitem__)
        elif node.target is operator.setitem:
            writer.write(node, of[node])
        else:
            writer.values[node] = writer.part(node, of[node])
    made = fx.GraphModule(gm, writer.graph)
    made.meta = dict(gm.meta)
    return made


def _table(base: fx.Node, nodes: Sequence[fx.Node], where: dict[fx.Node, int]) -> _Table | None:
    """The table that `base` is, if some part of a row is written, and nothing else reads or writes meanwhile."""
    tensor = val_of(base)
    accesses = [n for n in base.users if _is_access(n, base)]
    if not isinstance(tensor, FakeTensor) or overlaps(tensor):
        return None
    indices = {n: spelled_index(n.args[1], tensor.dim()) for n in accesses}
    place = _place(list(indices.values()))
    size = cast(object, tensor.shape[place]) if place is not None else None
    if place is None or type(size) is not int:
        return None
    rows: dict[fx.Node, tuple[int, tuple[object, ...]]] = {}
    for n, index in indices.items():
        number = cast(int, index[place])
        rows[n] = (number + size * (number < 0), (*index[:place], *index[place + 1 :]))
    writes = sorted((n for n in rows if n.target is operator.setitem), key=where.__getitem__)
    parted = [n for n in writes if not all(map(is_full_slice, rows[n][1]))]
    if not parted or not all(isinstance(n.args[2], fx.Node) for n in writes):
        return None
    table = _Table(base, place, rows, {rows[n][0]: n for n in writes})
    span = range(where[writes[0]], where[writes[-1]] + 1)
    alone = not any(where[u] in span for u in _others(table, nodes))
    return table if alone and _are_read_in_time(table, writes, where) else None


def _is_access(node: fx.Node, base: fx.Node) -> bool:
    known = node.target in (operator.getitem, operator.setitem)
    return known and node.args[0] is base and is_basic_index(node.args[1]) and base not in node.args[2:]


def _place(indices: Sequence[tuple[object, ...]]) -> int | None:
    """The dim of which all indices have a number: that of the most numbers."""
    if any(None in index for index in indices):
        return None
    numbers = [
        (len({index[place] for index in indices}), -place)
        for place in range(min(map(len, indices), default=0))
        if all(type(index[place]) is int for index in indices)
    ]
    return -max(numbers)[1] if numbers else None


def _others(table: _Table, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What reads or writes the table's memory otherwise than by its rows."""
    memory = set(memories_of(val_of(table.base)))
    shown = {n for n in nodes if memory & set(memories_of(val_of(n)))}
    taken: set[fx.Node] = set()
    for n in nodes:
        if n in table.rows or (n in shown and n is not table.base and taken & set(n.all_input_nodes)):
            taken.add(n)
    beside = [n for n in shown if n not in taken]
    return [u for n in beside for u in n.users if u not in table.rows]


def _are_read_in_time(table: _Table, writes: Sequence[fx.Node], where: dict[fx.Node, int]) -> bool:
    """Whether nobody reads a part of a row that was taken in front of a write into that row behind it."""
    written: defaultdict[int, list[int]] = defaultdict(list)
    for n in writes:
        written[table.rows[n][0]].append(where[n])
    memory = set(memories_of(val_of(table.base)))

    def last_use(n: fx.Node) -> int:
        ends = [where[n]]
        for u in n.users:
            ends.append(last_use(u) if memory & set(memories_of(val_of(u))) else where[u])
        return max(ends)

    for n, (number, _) in table.rows.items():
        if n.target is operator.getitem:
            later = [w for w in written[number] if w > where[n]]
            if later and last_use(n) > min(later):
                return False
    return True


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the new graph: `values` stand for nodes of the old one, `latest` for rows that are not written yet."""

    graph: fx.Graph
    values: dict[fx.Node, fx.Node]
    latest: dict[tuple[fx.Node, int], fx.Node]

    def row(self, table: _Table, number: int, node: fx.Node) -> fx.Node:
        """A row as it is now."""
        found = self.latest.get((table.base, number))
        return found or self._part(node, self.values[table.base], val_of(table.base), table.index(number))

    def part(self, node: fx.Node, table: _Table) -> fx.Node:
        """What stands for a node that takes a part of a row."""
        number, rest = table.rows[node]
        row = self.row(table, number, node)
        return row if all(map(is_full_slice, rest)) else self._part(node, row, val_of(row), rest)

    def write(self, node: fx.Node, table: _Table) -> None:
        """Write a part of a row: into a copy, which is written into the table if it is the last one of the row."""
        number, rest = table.rows[node]
        value = cast(fx.Node, node.args[2])
        row = self.row(table, number, node)
        made = self.graph.call_function(torch.clone, (row,))
        made.meta = {**self._meta(node), "example_value": self._copy(row, value)}
        part = rest if not all(map(is_full_slice, rest)) else Ellipsis
        self._set(node, made, part, self.values[value])
        if table.last[number] is node:
            self.latest.pop((table.base, number), None)
            self._set(node, self.values[table.base], table.index(number), made)
        else:
            self.latest[table.base, number] = made

    def _part(self, node: fx.Node, base: fx.Node, value: object, index: tuple[object, ...]) -> fx.Node:
        assert isinstance(value, FakeTensor)
        made = self.graph.call_function(operator.getitem, (base, index))  # pyright: ignore[reportArgumentType]
        with value.fake_mode, torch.no_grad():
            part = value[index]  # pyright: ignore[reportArgumentType]
        made.meta = {**self._meta(node), "example_value": part}
        return made

    def _copy(self, row: fx.Node, value: fx.Node) -> Tensor:
        sample, given = cast(FakeTensor, val_of(row)), val_of(value)
        with sample.fake_mode, torch.no_grad():
            made = sample.clone()
        asks = sample.requires_grad or (isinstance(given, Tensor) and given.requires_grad)
        return made.requires_grad_(asks and (made.is_floating_point() or made.is_complex()))

    def _set(self, node: fx.Node, base: fx.Node, index: object, value: fx.Node) -> None:
        made = self.graph.call_function(operator.setitem, (base, index, value))  # pyright: ignore[reportArgumentType]
        made.meta = self._meta(node)

    def _meta(self, node: fx.Node) -> dict[str, object]:
        return {k: v for k, v in node.meta.items() if k != "example_value"}
