"""Loops that Dynamo took apart step by step, as scans again.

A loop in Python leaves equal steps behind each other in the graph. Where step k reads what step k - 1 made, the same
tensors in every step, and parts of tensors that move by one with each step, the steps become one scan of torch's. Torch
knows its gradient: so this happens before autograd, and is right for training and inference alike. Numbers that change
with the step become one more tensor that is sliced. What is read of each step is stacked by the scan. Steps that write
into tensors, or draw random numbers, stay as they are."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from .leaving import Watch, memories_of, written_after
from .lifted import PRODUCTS, lifted
from .modes import shift_of, silent
from .recurrent import MOST_UNROLLED, SCANS_DIFFERENTIATE, tied
from .repeats import Repeat, repeats
from .unrolled import Lifted, Numbers, Sliced, Steps, Unlike, classified, runs, val_of

LOG = logging.getLogger("tilewright")


def rolled(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with a scan in the place of each loop of more than `MOST_UNROLLED` equal steps; itself if it has none.
    Nodes carry `meta["example_value"]`."""
    made = gm
    while True:
        nodes = list(made.graph.nodes)
        if len(nodes) <= MOST_UNROLLED or _device(nodes) not in ("cpu", "cuda"):
            return made
        loop = next((x for r in repeats(nodes, MOST_UNROLLED) if (x := _loop(nodes, r)) is not None), None)
        if loop is None:
            return made
        LOG.info("%d equal steps became a loop", loop.steps)
        made = _replaced(made, loop)


def _device(nodes: Sequence[fx.Node]) -> str:
    """Where the tensors of a graph lie; empty if at several places."""
    found = {t.device.type for t in _tensors(nodes)}
    return found.pop() if len(found) == 1 else ""


def _loop(nodes: Sequence[fx.Node], repeat: Repeat) -> _Loop | None:
    """The loop of a stretch, if it is one: of all its steps, or of the longest run of steps that are alike."""
    period, shift = repeat.period, shift_of(nodes, repeat)
    start, count = repeat.start + shift, repeat.steps - (shift > 0)
    windows = [list(nodes[start + k * period : start + (k + 1) * period]) for k in range(count)]
    if not all(n.op in ("call_function", "call_method") for n in windows[0]):
        return None
    for first, last in runs(windows):
        if last - first <= MOST_UNROLLED:
            return None
        try:
            steps = lifted(classified(windows[first:last]))
            body, stacked, ends, idle = _body(steps)
            begin, end = start + first * period, start + last * period
            leaving = [window[m] for window in steps.windows for m in stacked]
            leaving += [steps.windows[-1][m] for m in ends]
            written = written_after(nodes[:begin], leaving, nodes[end:])
            return _Loop(steps, body, stacked, ends, written, idle)
        except Unlike as why:
            LOG.info("equal steps stay apart: %s", why)
    return None


# --- the body ---


@dataclass(frozen=True, slots=True)
class _Loop:
    """Steps with their body: it takes carried values, slices and what is outer, and gives the next carried values and
    then `stacked`, numbers of nodes of a step that something outside of the steps reads. The nodes `ends`, with the
    numbers of the carried values that they make, have no stack: only what the last step makes is read there. Something
    writes to `written` after the steps. What it takes at the places `idle` gets no gradient through it."""

    found: Steps
    body: fx.GraphModule
    stacked: tuple[int, ...]
    ends: Mapping[int, int]
    written: frozenset[fx.Node]
    idle: frozenset[int]

    @property
    def steps(self) -> int:
        """Their number."""
        return self.found.steps


class Scan(torch.nn.Module):
    """Runs a body step by step: on carried values, tensors that are sliced along dim 0, and what is outer."""

    def __init__(self, body: fx.GraphModule, carried: int, sliced: int) -> None:
        super().__init__()
        self.body, self.carried, self.sliced = body, carried, sliced

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The last carried values, then what the body stacks."""
        ends = self.carried + self.sliced
        body = self.body

        def step(*now: Tensor) -> list[Tensor]:
            return list(body(*now))

        dense = torch.contiguous_format  # copies: torch refuses one tensor that begins two carried values
        state = [x.clone(memory_format=dense) for x in given[: self.carried]]
        return tuple(scan_op(step, tied(state, given), list(given[self.carried : ends]), given[ends:]))


def _leaving(found: Steps) -> tuple[tuple[int, ...], dict[int, int]]:
    """Numbers of the nodes of a step: carried ones of which only what the last step makes is read outside are second,
    with the carried values that they are; all others that are read outside are first."""
    windows = found.windows
    inside = {n for window in windows for n in window}
    made = [m for m in range(len(windows[0])) if windows[1][m] not in found.sliced]
    carried = {m: p for p, (m, _) in reversed([*enumerate(found.carried)])}
    readers = {m: [k for k in range(len(windows)) if _read_outside(found, k, m, inside)] for m in made}
    ends = {m: carried[m] for m in made if readers[m] == [len(windows) - 1] and m in carried}
    return tuple(m for m in made if readers[m] and m not in ends), ends


def _body(
    found: Steps,
) -> tuple[fx.GraphModule, tuple[int, ...], dict[int, int], frozenset[int]]:
    """The body of the steps, what of each step is stacked, what of the last is read, and what it takes that gets no
    gradient. Raises Unlike."""
    windows = found.windows
    stacked, ends = _leaving(found)
    if not all(isinstance(val_of(windows[1][m]), Tensor) for m in (*(m for m, _ in found.carried), *stacked)):
        raise Unlike("what leaves a step is no tensor")
    made = [cast(Tensor, val_of(windows[1][m])) for m in (*(m for m, _ in found.carried), *stacked)]
    if not all(t.is_floating_point() or t.is_complex() for t in made) and _asks_gradient(windows[1]):
        raise Unlike("torch has no gradient of loops that make integers")
    if any(t.is_complex() for t in _tensors(windows[1])) and _asks_gradient(windows[1]):
        raise Unlike("torch has no gradient of loops over complex numbers")
    graph = fx.Graph()
    values: dict[object, fx.Node] = {}
    samples: list[object] = []

    def take(key: object, sample: object) -> None:
        values[key] = graph.placeholder(f"given_{len(samples)}")
        samples.append(sample)

    for key in found.carried:
        take(key, val_of(windows[0][key[0]]))
    for key, what in found.taken.items():
        take(key, val_of(key) if isinstance(key, fx.Node) else _number(what, 0))
    if not found.taken:
        take("counter", torch.zeros((), dtype=torch.int64))
    for node in found.outer:
        take(node, val_of(node))
    inits = {windows[0][m]: values[m, first] for m, first in found.carried}
    if len(inits) < len(found.carried):
        raise Unlike("one value is carried from two beginnings")
    for m, node in enumerate(windows[1]):
        if node not in found.sliced:
            values[node] = _copied(graph, found, node, m, values, inits)
    carried = [values[windows[1][m]] for m, _ in found.carried]
    results = [graph.call_method("clone", (values[windows[1][m]],)) for m in stacked]
    rows = [graph.call_method("contiguous", (x,)) for x in carried]
    graph.output((*[graph.call_method("clone", (x,)) for x in rows], *results))
    body = fx.GraphModule(torch.nn.Module(), graph)
    _check(found, body, samples, stacked)
    idle = _idle(body, samples, len(found.carried))
    if not SCANS_DIFFERENTIATE and any(k < len(found.carried) for k in idle):
        raise Unlike("this torch fails where a step differentiates nothing of a state")
    return body, stacked, ends, idle


def _tensors(nodes: Sequence[fx.Node]) -> list[Tensor]:
    return [t for n in nodes for t in tree_leaves(val_of(n)) if isinstance(t, Tensor)]


def _asks_gradient(nodes: Sequence[fx.Node]) -> bool:
    return any(t.requires_grad for t in _tensors(nodes))


def _number(what: Sliced | Numbers | Lifted, k: int) -> Tensor:
    assert isinstance(what, Numbers)
    return _tensor_of(what)[k]


def _tensor_of(what: Numbers) -> Tensor:
    whole = all(type(v) is int for v in what.values)
    return torch.tensor(what.values, dtype=torch.int64 if whole else torch.float64)


def _copied(
    graph: fx.Graph, found: Steps, node: fx.Node, m: int, values: dict[object, fx.Node],
    inits: dict[fx.Node, fx.Node],
) -> fx.Node:  # fmt: skip
    """A node of step 1 in the body."""
    count = iter(range(1 << 30))

    def visit(a: object) -> object:
        if isinstance(a, (list, tuple)):
            items = [visit(x) for x in a]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            return tuple(items) if isinstance(a, tuple) else items
        if isinstance(a, dict):
            return {k: visit(x) for k, x in a.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if isinstance(a, slice):
            return slice(visit(a.start), visit(a.stop), visit(a.step))
        p = next(count)
        if isinstance(a, fx.Node):
            return inits.get(a) or values[a]
        number = values.get((m, p))
        return a if number is None else _as_number(graph, number, val_of(node))

    args, kwargs = visit(node.args), visit(node.kwargs)
    made = graph.create_node(node.op, node.target, args, kwargs)  # pyright: ignore[reportArgumentType]
    made.meta = _written(node)
    return made


def _as_number(graph: fx.Graph, number: fx.Node, made: object) -> fx.Node:
    """A tensor in the place of a number in what makes `made`: without dims itself, it must not widen others."""
    alone = isinstance(made, Tensor) and not made.dim() and made.dtype == torch.float32
    return graph.call_method("to", (number, torch.float32)) if alone else number


def _written(node: fx.Node) -> dict[str, object]:
    """Where the user's source has a node."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def _read_outside(found: Steps, k: int, m: int, inside: set[fx.Node]) -> bool:
    return any(u not in inside for u in found.windows[k][m].users)


def _check(found: Steps, body: fx.GraphModule, samples: Sequence[object], stacked: Sequence[int]) -> None:
    """Run the body on what only pretends to be there. Raises Unlike unless its results are what the steps made."""
    fake = next((s for s in samples if isinstance(s, FakeTensor)), None)
    if fake is None or any(s is None for s in samples):
        raise Unlike("what the steps read is not known")
    with fake.fake_mode as mode, torch.no_grad(), enable_python_dispatcher():
        given = [
            mode.from_tensor(s) if isinstance(s, Tensor) and not isinstance(s, FakeTensor) else s
            for s in samples
        ]
        with Watch() as watch:
            try:
                made = body(*given)
            except Exception as error:
                raise Unlike(f"a step fails alone: {error}") from error
    refused = watch.drew or next((watch.wrote[m] for m in memories_of(given) if m in watch.wrote), "")
    if refused:
        raise Unlike(f"a step runs {refused}")
    wanted = [*(m for m, _ in found.carried), *stacked]
    before = [val_of(first) for _, first in found.carried]
    pairs = [*zip(made, (val_of(found.windows[1][m]) for m in wanted), strict=True)]
    pairs += zip(made[: len(before)], before, strict=True)
    for have, want in pairs:
        if not isinstance(want, Tensor) or not isinstance(have, Tensor):
            raise Unlike("a step gives what is no tensor")
        if have.dtype != want.dtype or str(have.shape) != str(want.shape) or have.device != want.device:
            raise Unlike(f"a value of {want.dtype}{list(want.shape)} becomes {have.dtype}{list(have.shape)}")


def _idle(body: fx.GraphModule, samples: Sequence[object], carried: int) -> frozenset[int]:
    """The places of what asks for a gradient and gets none, since the steps read it under `no_grad` or detached: eager
    has None there, and torch's gradient of a scan is zeros. All states ask that are `tied`."""
    fake = next(s for s in samples if isinstance(s, FakeTensor))
    given: dict[int, Tensor] = {}
    shapes = fake.fake_mode.shape_env
    ties = not SCANS_DIFFERENTIATE and any(isinstance(s, Tensor) and s.requires_grad for s in samples)
    silent = nullcontext() if shapes is None else shapes.suppress_guards()  # a trial binds no size
    with fake.fake_mode as mode, torch.enable_grad(), silent:

        def leaf(k: int, s: object) -> object:
            if not isinstance(s, Tensor):
                return s
            x = (s if isinstance(s, FakeTensor) else mode.from_tensor(s)).detach()
            if s.requires_grad or (ties and k < carried and s.is_floating_point()):
                given[k] = x.requires_grad_()
            return x

        leaves = [leaf(k, s) for k, s in enumerate(samples)]
        made = tree_leaves(body(*leaves)) if given else []
    reached = _leaves_of([x.grad_fn for x in made if isinstance(x, Tensor) and x.grad_fn is not None])
    return frozenset(k for k, x in given.items() if id(x) not in reached)


def _leaves_of(ends: Sequence[Node]) -> set[int]:
    """The identities of the leaves that autograd reaches from these nodes."""
    found, seen, left = set[int](), set[Node](), list(ends)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        left += [n for n, _ in node.next_functions if n is not None]
    return found


# --- the graph ---


def _replaced(gm: fx.GraphModule, loop: _Loop) -> fx.GraphModule:
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
    setattr(gm, name, Scan(loop.body, len(found.carried), max(1, len(found.taken))))
    try:
        made = fx.GraphModule(gm, graph)
    finally:
        delattr(gm, name)
    made.meta = dict(gm.meta)
    made.graph.eliminate_dead_code(_is_dead)
    made.recompile()
    return made


def _is_dead(node: fx.Node) -> bool:
    """Whether a node has an effect, for torch's removal of what nobody reads: only parts that steps took, and products
    of these, have none."""
    parts = (operator.getitem, torch.unbind, "unbind", "select", torch.select)
    return node.target not in parts and (node.target not in PRODUCTS or "out" in node.kwargs)


class _Placed:
    """Makes the scan and what stands for values of its steps."""

    def __init__(
        self, graph: fx.Graph, loop: _Loop, inside: dict[fx.Node, tuple[int, int]], values: dict[fx.Node, fx.Node]
    ) -> None:  # fmt: skip
        self.graph, self.loop, self.inside, self.values = graph, loop, inside, values
        self.silent = silent(next(iter(inside)).graph.nodes)
        self.made: fx.Node | None = None
        """The scan."""
        self.stacks: dict[int, fx.Node] = {}
        self.parts: dict[tuple[int, int], fx.Node] = {}

    def scan(self, name: str) -> None:
        """The scan, and the tensors that hold what its steps made."""
        found, graph = self.loop.found, self.graph
        mode = next(v for n in found.windows[0] if isinstance(v := val_of(n), FakeTensor)).fake_mode
        given: list[fx.Node] = [self.values[first] for _, first in found.carried]
        given += [self.taken(key, what) for key, what in found.taken.items()]
        if not found.taken:
            given.append(self.call(torch.arange, self.loop.steps))
        given += [self.values[n] for n in found.outer]
        given = [self.call(torch.detach, x) if k in self.loop.idle else x for k, x in enumerate(given)]
        made = self.made = graph.call_module(name, tuple(given))
        made.meta = _written(found.windows[0][-1])
        for k, m in enumerate(self.loop.stacked):
            stack = self.stacks[m] = self.call(operator.getitem, made, len(found.carried) + k)
            one = cast(Tensor, val_of(found.windows[1][m]))
            with mode:
                stack.meta["example_value"] = one.new_empty((self.loop.steps, *one.shape))

    def call(self, target: Callable[..., object], *args: object) -> fx.Node:
        """A call in the new graph."""
        return self.graph.call_function(target, args)  # pyright: ignore[reportArgumentType]

    def taken(self, key: object, what: Sliced | Numbers | Lifted) -> fx.Node:
        """What is sliced, without a gradient where a step takes it under `no_grad`."""
        whole = self.whole(what)
        return self.call(torch.detach, whole) if key in self.silent else whole

    def whole(self, what: Sliced | Numbers | Lifted) -> fx.Node:
        """What is sliced, with the part of step k at place k of dim 0."""
        graph, steps = self.graph, self.loop.steps
        if isinstance(what, Lifted):
            node, parts = what.node, self.whole(what.part)
            others = fx.map_arg((node.args[1:], node.kwargs), self.values.__getitem__)
            args, kwargs = cast(tuple[tuple[object, ...], dict[str, object]], others)
            target = torch.matmul if node.target in (torch.mm, "mm") else node.target
            op = "call_function" if target is torch.matmul else node.op
            made = graph.create_node(op, target, (parts, *args), kwargs)  # pyright: ignore[reportArgumentType]
            made.meta = _written(node)
            return made
        if isinstance(what, Numbers):
            kind = _tensor_of(what).dtype
            return graph.call_function(torch.tensor, (list(what.values),), {"dtype": kind})
        base = self.values[what.base]
        if what.index is not None:
            base = self.call(operator.getitem, base, what.index)
        moved = self.call(torch.movedim, base, what.dim, 0)
        low = what.first if what.step > 0 else what.first - steps + 1
        part = self.call(torch.narrow, moved, 0, low, steps)
        return part if what.step > 0 else self.call(torch.flip, part, (0,))

    def of(self, node: fx.Node) -> fx.Node:
        """What stands for a node."""
        if node not in self.inside:
            return self.values[node]
        at = self.inside[node]
        found = self.parts.get(at)
        if found is None:
            step, number = at
            if number in self.loop.ends:
                part = self.call(operator.getitem, self.made, self.loop.ends[number])
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
        whole = val_of(node)
        if not all(isinstance(n, fx.Node) for n in items) or not isinstance(whole, Tensor):
            return None
        stacks = node.target is torch.stack
        dim %= whole.dim()
        pieces = self.pieces(cast(Sequence[fx.Node], items), dim, stacks=stacks)
        made = pieces[0] if len(pieces) == 1 else self.graph.call_function(torch.cat, (pieces, dim))
        return self.copied(made, node)

    def pieces(self, items: Sequence[fx.Node], dim: int, *, stacks: bool) -> list[fx.Node]:
        """The operands of the concatenation."""
        pieces: list[fx.Node] = []
        k = 0
        while k < len(items):
            at = None if items[k] in self.loop.written else self.inside.get(items[k])
            if at is None or at[1] in self.loop.ends:
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
