"""A captured graph with a scan in the place of equal steps."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from tilewright.capture.modes import SET_GRADIENTS, composites_cast, nodes_without_gradients

from .lifted import PRODUCTS
from .nodes import val_of
from .numbers.draws import drawn_of
from .numbers.stepping import type_of
from .recurrent import apart_in_memory, as_inexact, computed_again, from_inexact, tie_states
from .taken.kinds import Drawn, Lifted, Numbers, Own, Picked, Sliced, Taken
from .taken.parts import TAKES
from .unrolled import CHECKPOINTS, EqualSteps

_DATA = torch._C._autograd._get_data_attr  # pyright: ignore[reportAttributeAccessIssue]
"""What shows a tensor to nobody's gradient."""
_FILLS = (torch.zeros, torch.ones, torch.full)
"""What fills a new tensor with a number."""


@dataclass(frozen=True, slots=True)
class ScannedLoop:
    """Steps with their body: it takes carried values, slices and what is outer, and gives the next carried values and
    then `stacked`, numbers of nodes of a step that something outside of the steps reads. The nodes `ends`, with the
    numbers of the carried values that they make, have no stack: only what the last step makes is read there. Something
    writes to `written` after the steps. What it takes at the places `idle` gets no gradient through it."""

    found: EqualSteps
    body: fx.GraphModule
    stacked: tuple[int, ...]
    ends: Mapping[int, int]
    written: frozenset[fx.Node]
    idle: frozenset[int]
    cycle: int = 1
    """How many steps of the program each step is."""

    @property
    def steps(self) -> int:
        """Their number."""
        return self.found.steps


class Scan(torch.nn.Module):
    """Runs a body step by step: on carried values, tensors that are sliced along dim 0, and what is outer."""

    def __init__(self, body: fx.GraphModule, carried: int, sliced: int) -> None:
        super().__init__()
        self.body, self.carried, self.sliced = body, carried, sliced

    def forward(self, *given: Any) -> tuple[Tensor, ...]:
        """The last carried values, then what the body stacks."""
        body, carried, ends = self.body, self.carried, self.carried + self.sliced
        trains = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)
        dense = torch.contiguous_format  # copies: torch refuses one tensor that begins two carried values
        state = [x.clone(memory_format=dense) for x in given[:carried]]
        kinds = [x.dtype for x in state]

        read = [x.dtype if isinstance(x, Tensor) else None for x in given[carried:]]

        def step(*now: Tensor) -> list[Tensor]:
            if not trains:
                with composites_cast():
                    return list(body(*now))
            states = map(from_inexact, now[:carried], kinds)
            others = [
                from_inexact(x, kind) if kind and kind.is_complex else x
                for x, kind in zip(now[carried:], read, strict=True)
            ]
            with composites_cast():
                made = body(*states, *others)
            kinds[carried:] = [x.dtype for x in made[carried:]]
            return list(map(as_inexact, made))

        others = [*given[carried:ends], *apart_in_memory(given[ends:])]
        if trains:
            state = tie_states([*map(as_inexact, state)], given)
            others = [
                as_inexact(x) if kind and kind.is_complex else x for x, kind in zip(others, read, strict=True)
            ]
        saves_little = any(n.target in CHECKPOINTS for n in body.graph.nodes)
        with computed_again(saves_little):
            made = scan_op(step, state, others[: self.sliced], tuple(others[self.sliced :]))
        return tuple(map(from_inexact, made, kinds) if trains else made)


def replace_by_scan(gm: fx.GraphModule, loop: ScannedLoop) -> fx.GraphModule:
    """The graph with the scan in the place of the steps."""
    found = loop.found
    inside = {n: (k, m) for k, window in enumerate(found.windows) for m, n in enumerate(window)
              if found.windows[1][m] not in found.sliced}  # fmt: skip
    last = found.windows[-1][-1]
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    placed = _Placed(graph, loop, inside, values)
    name = next(n for k in range(len(inside)) if (n := f"rolled_{k}") not in dict(gm.named_children()))
    for node in gm.graph.nodes:
        if node not in inside:
            values[node] = placed.joined(node) or graph.node_copy(node, placed.of)
        if node is last:
            placed.scan(name)
    setattr(gm, name, Scan(loop.body, found.states, max(1, len(found.taken))))
    try:
        made = fx.GraphModule(gm, graph)
    finally:
        delattr(gm, name)
    made.meta = dict(gm.meta)
    _drop_unread(made.graph)
    made.recompile()
    return made


def _drop_unread(graph: fx.Graph) -> None:
    """Remove parts that steps took, and products of these, which nobody reads. (Torch's own removal goes into functions
    that the graph calls, and takes their writes for nothing.)"""
    for node in reversed(graph.nodes):
        lifted = node.target in PRODUCTS and "out" not in node.kwargs
        if not node.users and (node.target in TAKES or lifted):
            graph.erase_node(node)


class _Placed:
    """Makes the scan and what stands for values of its steps."""

    def __init__(
        self, graph: fx.Graph, loop: ScannedLoop, inside: dict[fx.Node, tuple[int, int]], values: dict[fx.Node, fx.Node]
    ) -> None:  # fmt: skip
        self.graph, self.loop, self.inside, self.values = graph, loop, inside, values
        self.silent = nodes_without_gradients(next(iter(inside)).graph.nodes)
        self.place = place_of(loop.found.windows[0])
        self.made: fx.Node | None = None
        """The scan."""
        self.stacks: dict[int, fx.Node] = {}
        self.parts: dict[tuple[int, int], fx.Node] = {}
        self.drawn: dict[Drawn, fx.Node] = {}
        self.behind: fx.Node | None = None
        """The last node of the scan and of what it writes."""

    def scan(self, name: str) -> None:
        """The scan, and the tensors that hold what its steps made."""
        found, graph = self.loop.found, self.graph
        mode = next(v for n in found.windows[0] if isinstance(v := val_of(n), FakeTensor)).fake_mode
        given: list[fx.Node] = [self.first_of(n) for n in (*found.carried.values(), *found.held)]
        self.drawn = self.draws([what for what in found.taken.values() if isinstance(what, Drawn)])
        given += [self.taken(key, what) for key, what in found.taken.items()]
        if not found.taken:
            given.append(self.graph.call_function(torch.arange, (self.loop.steps,), {"device": self.place}))
        given += [self.values[n] for n in found.outer if n not in found.functions and n not in found.held]
        given = [self.call(torch.detach, x) if k in self.loop.idle else x for k, x in enumerate(given)]
        made = self.made = graph.call_module(name, tuple(given))
        made.meta = written_of(found.windows[0][-1])
        for k, m in enumerate(self.loop.stacked):
            stack = self.stacks[m] = self.result(found.states + k, found.windows[-1][m])
            one = cast(Tensor, val_of(found.windows[1][m]))
            with mode:
                stack.meta["example_value"] = one.new_empty((self.loop.steps, *one.shape))
        self.writes()
        self.behind = next(iter(reversed(graph.nodes)))

    def draws(self, wanted: Sequence[Drawn]) -> dict[Drawn, fx.Node]:
        """What all steps draw, in their order."""
        graph, likes, rows = self.graph, list[fx.Node](), [list[fx.Node]() for _ in wanted]
        for what in wanted:
            sizes = [
                n if isinstance(n, int) else graph.call_method("size", (self.values[n[0]], n[1]))
                for n in what.sizes
            ]
            kind = cast(Tensor, val_of(what.node)).dtype
            likes.append(graph.call_function(torch.ones, (sizes,), {"dtype": kind, "device": self.place}))
        for k in range(self.loop.steps):
            for what, like, row in zip(wanted, likes, rows, strict=True):
                row.append(drawn_of(graph, what, like, what.chances[k]))
        return {what: self.call(torch.stack, row) for what, row in zip(wanted, rows, strict=True)}

    def first_of(self, node: fx.Node) -> fx.Node:
        """What begins a carried value: also a part that a step takes of what was there before the loop."""
        return self.graph.node_copy(node, self.of) if node in self.inside else self.values[node]

    def result(self, k: int, last: fx.Node) -> fx.Node:
        """Result number k of the scan, which is for `last` what the last step made: without a gradient where that has
        none, which torch's scans do not tell."""
        made, value = self.call(operator.getitem, self.made, k), val_of(last)
        return made if isinstance(value, Tensor) and value.requires_grad else self.call(torch.detach, made)

    def writes(self) -> None:
        """What the steps write, where it belongs."""
        found, graph = self.loop.found, self.graph
        for k, (m, store) in enumerate(found.stores.items(), found.states + len(self.loop.stacked)):
            value = found.windows[-1][m].args[2]
            assert isinstance(value, fx.Node)
            parts, stack = self.parts_of(self.values[store.part.base], store.part), self.result(k, value)
            if store.part.step < 0:
                stack = self.call(torch.flip, stack, (0,))
            silent = found.windows[1][m] in self.silent
            if silent:
                self.call(SET_GRADIENTS, False)
            graph.call_method("copy_", (parts, stack))
            if silent:
                self.call(SET_GRADIENTS, True)
        owned = [
            (first, self.result(p, found.windows[-1][m]))
            for p, ((m, delay), first) in enumerate(found.carried.items())
            if m in found.owned and delay == 1
        ]
        held = [(node, self.result(p, node)) for p, node in enumerate(found.held, len(found.carried))]
        for node, value in (*held, *owned):
            whole = self.values[node]
            data = self.call(_DATA, whole) if node in found.unseen else whole
            graph.call_method("copy_", (data, value))

    def call(self, target: Callable[..., object], *args: object) -> fx.Node:
        """A call in the new graph."""
        return self.graph.call_function(target, args)  # pyright: ignore[reportArgumentType]

    def taken(self, key: object, what: Taken) -> fx.Node:
        """What is sliced, without a gradient where a step takes it under `no_grad`."""
        stacked = self.whole(what)
        silent = not isinstance(what, (Numbers, Drawn)) and self.loop.found.node_of(key) in self.silent
        return self.call(torch.detach, stacked) if silent else stacked

    def whole(self, what: Taken) -> fx.Node:
        """What is sliced, with the part of step k at place k of dim 0."""
        graph = self.graph
        if isinstance(what, Lifted):
            node, parts = what.node, self.whole(what.part)
            others = fx.map_arg((node.args[1:], node.kwargs), self.values.__getitem__)
            args, kwargs = cast(tuple[tuple[object, ...], dict[str, object]], others)
            target = torch.matmul if node.target in (torch.mm, "mm") else node.target
            op = "call_function" if target is torch.matmul else node.op
            made = graph.create_node(op, target, (parts, *args), kwargs)  # pyright: ignore[reportArgumentType]
            made.meta = written_of(node)
            return made
        if isinstance(what, Numbers):
            kind = type_of(what)
            return graph.call_function(
                torch.tensor, (list(what.values),), {"dtype": kind, "device": self.place}
            )
        if isinstance(what, Own):
            return self.gathered(what.nodes)
        if isinstance(what, Drawn):
            return self.drawn[what]
        if isinstance(what, Picked):
            base = self.values[what.base]
            base = base if what.index is None else self.call(operator.getitem, base, what.index)
            places = graph.call_function(torch.tensor, (list(what.places),), {"device": self.place})
            return self.call(
                torch.movedim, self.call(torch.index_select, base, what.dim, places), what.dim, 0
            )
        part = self.parts_of(self.values[what.base], what)
        return part if what.step > 0 else self.call(torch.flip, part, (0,))

    def gathered(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """One tensor of what the steps read each of its own. Of equal fills that only they read it takes one: what else
        reads them may write into them, through a view too."""
        first = nodes[0]
        calls = {(n.op, n.target, str(n.args), str(n.kwargs)) for n in nodes}
        alone = all(user in self.inside for n in nodes for user in n.users)
        if first.target in _FILLS and len(calls) == 1 and not first.all_input_nodes and alone:
            shape = cast(Tensor, val_of(first)).shape
            made = self.call(torch.unsqueeze, self.values[first], 0)
            return self.graph.call_method("expand", (made, len(nodes), *(-1 for _ in shape)))
        return self.call(torch.stack, [self.values[n] for n in nodes])

    def parts_of(self, base: fx.Node, what: Sliced) -> fx.Node:
        """The parts of `base` from the lowest on, at places of dim 0, where they lie."""
        if what.index is not None:
            base = self.call(operator.getitem, base, what.index)
        steps, stride, dim = self.loop.steps, abs(what.step), what.dim
        span = (steps - 1) * stride + (what.length or 1)
        low = min(what.first, what.first + (steps - 1) * what.step)
        part = self.call(torch.narrow, base, dim, low, span)
        if what.length is None:
            if stride > 1:
                part = self.call(operator.getitem, part, (*[slice(None)] * dim, slice(None, None, stride)))
        elif what.length == stride:
            part = self.call(torch.unflatten, part, dim, (steps, stride))
        else:
            part = self.graph.call_method("unfold", (part, dim, what.length, stride))
            part = self.call(torch.movedim, part, -1, dim + 1)
        return self.call(torch.movedim, part, dim, 0)

    def of(self, node: fx.Node) -> fx.Node:
        """What stands for a node."""
        if node not in self.inside:
            return self.values[node]
        at = self.inside[node]
        found = self.parts.get(at)
        if found is None:
            step, number = at
            if number in self.loop.found.owned:
                return self.values[self.loop.found.carried[number, 1]]
            assert self.behind is not None
            # right behind the loop: the first reader may stand where there are no gradients, others where there are
            with self.graph.inserting_before(self.behind.next):
                if number in self.loop.ends:
                    part = self.result(self.loop.ends[number], node)
                else:
                    part = self.call(torch.select, self.stacks[number], 0, step)
                found = self.parts[at] = self.copied(part, node)
        return found

    def copied(self, made: fx.Node, node: fx.Node) -> fx.Node:
        """A copy that lies as `node` does: programs look at strides, and may view what they were promised."""
        strides = cast(Tensor, val_of(node)).stride()
        steps = [s.node.hint if isinstance(s, torch.SymInt) else s for s in strides]
        order = list(range(len(steps)))
        if None not in steps:  # else a size that only the data tell
            order.sort(key=lambda d: -steps[d])
        plain = order == list(range(len(steps)))
        made = made if plain else self.call(torch.permute, made, order)
        made = self.graph.call_method("clone", (made,), {"memory_format": torch.contiguous_format})
        made = made if plain else self.call(torch.permute, made, [order.index(d) for d in range(len(order))])
        made.meta = dict(node.meta)
        return made

    def joined(self, node: fx.Node) -> fx.Node | None:
        """A stack or a concatenation of results of steps, piece by piece of those that the scan has stacked."""
        if node.target not in (torch.stack, torch.cat, torch.concat) or len(node.args) > 2:
            return None
        items = node.args[0] if node.args else None
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if not isinstance(items, (list, tuple)) or not isinstance(dim, int) or set(node.kwargs) - {"dim"}:
            return None
        source = val_of(node)
        if not all(isinstance(n, fx.Node) for n in items) or not isinstance(source, Tensor):
            return None
        stacks = node.target is torch.stack
        dim %= source.dim()
        pieces = self.pieces(cast(Sequence[fx.Node], items), dim, stacks=stacks)
        made = pieces[0] if len(pieces) == 1 else self.graph.call_function(torch.cat, (pieces, dim))
        return self.copied(made, node)

    def pieces(self, items: Sequence[fx.Node], dim: int, *, stacks: bool) -> list[fx.Node]:
        """The operands of the concatenation."""
        pieces: list[fx.Node] = []
        k = 0
        while k < len(items):
            at = None if items[k] in self.loop.written else self.inside.get(items[k])
            if at is None or at[1] not in self.stacks:
                single = self.of(items[k])
                pieces.append(self.call(torch.unsqueeze, single, dim) if stacks else single)
                k += 1
                continue
            end = k + 1
            while end < len(items) and self.inside.get(items[end]) == (at[0] + end - k, at[1]):
                if items[end] in self.loop.written:
                    break
                end += 1
            part = self.call(torch.narrow, self.stacks[at[1]], 0, at[0], end - k)
            part = self.call(torch.movedim, part, 0, dim)
            pieces.append(part if stacks else self.call(torch.flatten, part, dim, dim + 1))
            k = end
        return pieces


def tensors_of(nodes: Iterable[fx.Node]) -> list[Tensor]:
    """All tensors among what stands for the values of nodes."""
    return [t for n in nodes for t in tree_leaves(val_of(n)) if isinstance(t, Tensor)]


def place_of(nodes: Sequence[fx.Node]) -> torch.device:
    """Where the tensors of a loop lie. What counts its steps lies there too: it would keep the loop of a GPU on the
    CPU."""
    return tensors_of(nodes)[0].device


def written_of(node: fx.Node) -> dict[str, object]:
    """Where the user's source has a node."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
