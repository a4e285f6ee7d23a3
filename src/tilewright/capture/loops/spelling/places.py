"""Parts of tensors that are written: taken and written at places that are arguments (`numbers.parts_at`).

`cache[k] = x` and `cache[k - 1]`, where something reads all of `cache` as well, so become ops whose numbers change with
the step. In a loop they copy what they take, where `cache[k]` shows it: so this is done only where nothing is written
to between a part that is taken and the last that reads it."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from tilewright.capture.loops.leaving import memories_of, written_by
from tilewright.capture.loops.nodes import val_of
from tilewright.capture.loops.numbers.parts_at import Index, put_at, take_at
from tilewright.capture.loops.numbers.shifts import diagonal_of
from tilewright.capture.loops.taken.parts import is_basic_index, is_full_slice, spelled_index

from .in_place_ops import IN_PLACE

_DIAGONALS = (torch.diagonal, "diagonal")


@dataclass(frozen=True, slots=True)
class _Part:
    """`base[index]`, as `numbers.parts_at` says it."""

    base: fx.Node
    index: Index
    at: tuple[int, ...]


def place_parts(gm: fx.GraphModule, *, through: bool = False) -> fx.GraphModule:
    """The graph in which parts of tensors that are written in parts are taken and written at places, and diagonals are
    taken as well; itself if there are none. Parts that are written `through` (`cache[k].add_(x)`) are then written once
    more, behind what does so. Nodes carry `meta["example_value"]`."""
    nodes = list(gm.graph.nodes)
    accesses = {n: part for n in nodes if (part := _part(n)) is not None}
    written = {m for n in nodes if _is_written_over(n) for m in memories_of(val_of(cast(fx.Node, n.args[0])))}
    accesses = {n: p for n, p in accesses.items() if written.intersection(memories_of(val_of(p.base)))}
    diagonals = [n for n in nodes if n.target in _DIAGONALS and n.args and isinstance(val_of(n), FakeTensor)]
    read = _read(nodes, [*(n for n in accesses if n.target is not operator.setitem), *diagonals])
    copied = {n for n, r in read.items() if r.fresh and (not r.writers or (through and n in accesses))}
    placed = {n: p for n, p in accesses.items() if n not in read or n in copied}
    if not placed and not copied:
        return gm
    again: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for taken in reversed([n for n in placed if n in read]):  # a part of a part is written into that first
        for n in read[taken].writers:
            again[n].append(taken)
    writer = _Writer(fx.Graph(), {})
    for node in nodes:
        part = placed.get(node)
        if part is not None:
            value = node.args[2] if node.target is operator.setitem else None
            writer.values[node] = writer.call(node, part, cast("fx.Node | None", value))
        elif node in copied:
            writer.values[node] = writer.diagonal(node)
        else:
            writer.values[node] = writer.graph.node_copy(node, writer.values.__getitem__)
        for taken in again.get(node, ()):
            writer.call(node, placed[taken], taken)
    made = fx.GraphModule(gm, writer.graph)
    made.meta = dict(gm.meta)
    return made


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the new graph: `values` stand for nodes of the old one."""

    graph: fx.Graph
    values: dict[fx.Node, fx.Node]

    def call(self, node: fx.Node, part: _Part, value: fx.Node | None) -> fx.Node:
        """Takes a part, or writes a value into it, where `node` stands."""
        given = (self.values[part.base], part.index, list(part.at))
        if value is None:
            made = self.graph.call_function(take_at, given)  # pyright: ignore[reportArgumentType]
        else:
            made = self.graph.call_function(put_at, (*given, self.values[value]))  # pyright: ignore[reportArgumentType]
        made.meta = {**node.meta, "example_value": val_of(node if value is None else part.base)}
        return made

    def diagonal(self, node: fx.Node) -> fx.Node:
        """Takes a diagonal."""
        base, *others = node.args
        length = cast(Tensor, val_of(node)).shape[-1]
        given = (self.values[cast(fx.Node, base)], length, *others)
        made = self.graph.call_function(diagonal_of, given, dict(node.kwargs))  # pyright: ignore[reportArgumentType]
        made.meta = dict(node.meta)
        return made


def _is_written_over(node: fx.Node) -> bool:
    """Whether the first operand of a node seems to be written into."""
    named = isinstance(node.target, str) and node.target.endswith("_") and not node.target.endswith("__")
    writes = (
        node.target is operator.setitem or node.target in IN_PLACE or (named and node.op == "call_method")
    )
    return writes and bool(node.args) and isinstance(node.args[0], fx.Node)


def _part(node: fx.Node) -> _Part | None:
    """The part that a node takes, or writes a tensor into."""
    base = node.args[0] if node.args else None
    if not isinstance(base, fx.Node) or node.kwargs or not isinstance(tensor := val_of(base), FakeTensor):
        return None
    index = _index_of(node, tensor)
    if index is None or (node.target is operator.setitem and not _fits(node, index, tensor)):
        return None
    return _placed(base, index, tensor)


def _index_of(node: fx.Node, tensor: Tensor) -> tuple[object, ...] | None:
    """What a node takes of a tensor, as an index."""
    if node.target in (operator.getitem, operator.setitem):
        return spelled_index(node.args[1], tensor.dim()) if is_basic_index(node.args[1]) else None
    numbers = node.args[1:]
    if not all(type(n) is int for n in numbers):
        return None
    if node.target in (torch.select, "select") and len(numbers) == 2:
        dim, place = cast(tuple[int, int], numbers)
        return (*[slice(None)] * (dim % tensor.dim()), place)
    if node.target in (torch.narrow, "narrow") and len(numbers) == 3:
        dim, place, length = cast(tuple[int, int, int], numbers)
        return (*[slice(None)] * (dim % tensor.dim()), slice(place, place + length)) if place >= 0 else None
    return None


def _fits(node: fx.Node, index: tuple[object, ...], tensor: Tensor) -> bool:
    """Whether what a node writes is a tensor that can be one of the part's shape."""
    value = val_of(node.args[2]) if isinstance(node.args[2], fx.Node) else None
    if not isinstance(value, Tensor) or value.device != tensor.device:
        return False
    with cast(FakeTensor, tensor).fake_mode, torch.no_grad():
        part = tensor[index]  # pyright: ignore[reportArgumentType]
    sizes = zip(reversed(value.shape), reversed(part.shape), strict=False)
    return value.dim() <= part.dim() and all(str(a) == str(b) or a == 1 for a, b in sizes)


def _placed(base: fx.Node, index: Sequence[object], tensor: Tensor) -> _Part | None:
    """The part with this index, unless it has no place."""
    how: list[object] = []
    at: list[int] = []
    dim = 0
    for x in index:
        size: object = None if x is None else tensor.shape[dim]
        dim += x is not None
        place = None if x is None or is_full_slice(x) else _place(x, size)
        if place is None:
            how.append(x)
        else:
            at.append(place[0])
            how.append(place[1])
    return (
        _Part(base, tuple(how), tuple(at)) if at and not any(type(x) is int and x < 0 for x in how) else None
    )


def _place(x: object, size: object) -> tuple[int, int] | None:
    """Where an index begins in a dim of a known size, and the length of what it takes; 0: one, without the dim."""
    if type(size) is not int:
        return (x, 0) if type(x) is int and x >= 0 else None
    if type(x) is int:
        return x % size, 0
    assert isinstance(x, slice)
    start, stop, step = x.indices(size)
    return (start, stop - start) if step == 1 and start < stop else None


@dataclass(frozen=True, slots=True)
class _Read:
    """What is done with a part that is taken."""

    fresh: bool
    """Whether nothing else writes to its memory before the last that reads it, and it is no result."""
    writers: tuple[fx.Node, ...]
    """What writes through it."""


def _read(nodes: Sequence[fx.Node], takes: Sequence[fx.Node]) -> dict[fx.Node, _Read]:
    where = {n: k for k, n in enumerate(nodes)}
    writes = _writes(nodes, {m for n in takes for m in memories_of(val_of(n))})
    found: dict[fx.Node, _Read] = {}
    for node in takes:
        memory = {*memories_of(val_of(node))}
        shown, left = {node}, [node]
        while left:
            for user in left.pop().users:
                if user not in shown and memory.intersection(memories_of(val_of(user))):
                    shown.add(user)
                    left.append(user)
        users = {u for n in shown for u in n.users}
        last = max(map(where.__getitem__, users), default=0)
        between = [n for m in memory for n in writes[m] if where[node] < where[n] <= last]
        writers = [
            n for n in between if n in users and (n.target is not operator.setitem or n.args[0] in shown)
        ]
        fresh = all(n in writers or where[n] == last for n in between) and not any(
            u.op == "output" for u in users
        )
        found[node] = _Read(fresh, tuple(writers))
    return found


def _writes(nodes: Sequence[fx.Node], memory: set[int]) -> dict[int, list[fx.Node]]:
    """The nodes that write into each of these memories."""
    found: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        touched = {m for n in node.all_input_nodes for m in memories_of(val_of(n)) if m in memory}
        if (
            not touched
            or node.op == "output"
            or _part(node) is not None
            and node.target is not operator.setitem
        ):
            continue
        for m in written_by(node, touched):
            found[m].append(node)
    return found
