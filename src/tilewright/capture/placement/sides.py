"""Graphs of a GPU of which a part lives on the CPU: cut into stages that alternate between the two sides.

What touches tensors of the CPU runs as it was captured, and what stands between is compiled for the GPU. A node's stage
is the last of its operands', or the next one where the side changes, so that host stages have even numbers and device
stages odd ones. Order that no operand shows is kept besides: draws, collectives and checks follow each other, and a
write into an input follows these and every reader of it. (Other ops may fail, and have effects that they hide,
in another order.)"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves

from tilewright.capture.aliasing.memory import by_place
from tilewright.capture.aliasing.shares import is_write
from tilewright.capture.autograd.rng import draws_nothing
from tilewright.capture.autograd.saved import first_saved, mark_saved
from tilewright.capture.node import counted_nodes, mutations
from tilewright.capture.opaque import Build, Runner, returned
from tilewright.errors import UnsupportedError

from .device import ADMITTED, HOST, graph_device, tensors
from .moved import moved

DEVICE = 1
"""What the numbers of device stages leave when halved."""


@dataclass(frozen=True, slots=True, eq=False)
class SideStage:
    """Nodes of one side as a graph of their own. What it takes and gives has the names that it had in the whole."""

    gm: fx.GraphModule
    on_host: bool
    takes: tuple[str, ...]
    gives: tuple[str, ...]


def around_sides(build: Build, plain: Build) -> Build:
    """`build` for graphs of a GPU of which a part lives on the CPU: that part is left to `plain`, which runs graphs as
    they were captured. Where no cut keeps the order and the memory of the whole, `build` gets the whole."""

    def one(gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        mixed = _mixed(gm)
        if mixed is None:
            return build(gm, kind, frozen)
        try:
            cut = stages(mixed)
        except UnsupportedError:
            return build(gm, kind, frozen)
        compiled = [not stage.on_host and bool(counted_nodes(stage.gm)) for stage in cut]
        if not any(compiled):
            return plain(gm, kind, frozen)
        runners: list[Runner] = []
        for stage, worth in zip(cut, compiled, strict=True):
            places = zip(stage.gm.graph.find_nodes(op="placeholder"), stage.takes, strict=True)
            fixed = {place.name: frozen[name] for place, name in places if name in frozen}
            runners.append((build if worth else plain)(stage.gm, kind, fixed))
        return _in_turn(mixed, cut, runners, frozen)

    return one


def _mixed(gm: fx.GraphModule) -> fx.GraphModule | None:
    """The graph with what may be made on the GPU made there, if tensors of the CPU are left in it; None for graphs that
    can be compiled as they are, or live elsewhere."""
    found = {t.device for n in gm.graph.nodes for t in tensors(n)}
    if HOST not in found or len(found) != 2 or not {d.type for d in found} <= ADMITTED:
        return None
    there = moved(gm)
    try:
        graph_device(there)
    except UnsupportedError:
        return there
    return None


def _in_turn(
    gm: fx.GraphModule, cut: Sequence[SideStage], runners: Sequence[Runner], frozen: Mapping[str, Tensor]
) -> Runner:
    """The stages one after another. What none that follows takes is let go of."""
    names = [n.name for n in gm.graph.find_nodes(op="placeholder") if n.name not in frozen]
    results = [a.name if isinstance(a, fx.Node) else None for a in returned(gm)]
    constants = [None if isinstance(a, fx.Node) else a for a in returned(gm)]
    needed = {n for n in results if n is not None}
    steps: list[tuple[Runner, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = []
    for stage, runner in reversed([*zip(cut, runners, strict=True)]):
        takes = tuple(n for n in stage.takes if n not in frozen)
        steps.append((runner, takes, tuple(n for n in takes if n not in needed), stage.gives))
        needed.update(takes)
    steps.reverse()
    fixed: dict[str, object] = {n: t for n, t in frozen.items() if n in results}

    def run(args: list[object]) -> list[object]:
        held = dict(zip(names, args, strict=True)) | fixed
        args.clear()
        for runner, takes, ended, gives in steps:
            given = [held[n] for n in takes]
            for n in ended:
                del held[n]
            held.update(zip(gives, runner(given), strict=True))
        return [c if n is None else held[n] for n, c in zip(results, constants, strict=True)]

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]  (torch's sign that the list may be emptied)
    return run


def stages(gm: fx.GraphModule) -> tuple[SideStage, ...]:
    """The stages of a graph with tensors on the CPU and on one GPU, in the order in which they run.

    Raises UnsupportedError if a write, a constant among the results, or an address in memory that another stage makes
    stands against a cut: a compiled stage may keep no more of a storage than what is shown of it."""
    if mutations(gm) or any(isinstance(n, fx.Node) and n.op == "get_attr" for n in returned(gm)):
        raise UnsupportedError("a write into an intermediate tensor, or a constant result", phase="capture")
    numbers = _Numbers()
    for node in gm.graph.nodes:
        numbers.take(node)
    at = numbers.at
    nodes: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            nodes.setdefault(at[node], []).append(node)
    order = {node: k for k, node in enumerate(gm.graph.nodes)}
    sizes = _sizes(gm)
    taken = {k: sorted(_taken(k, nodes[k], at, sizes), key=order.__getitem__) for k in sorted(nodes)}
    wanted = {n for found in taken.values() for n in found}
    outputs, count = returned(gm), first_saved(gm)
    saved = set(outputs) - set(outputs[:count]) - wanted
    made: list[SideStage] = []
    for k, takes in taken.items():
        gives = [n for n in nodes[k] if n in wanted or n in outputs]
        gives.sort(key=saved.__contains__)
        part = _graph(gm, nodes[k], takes, gives)
        if count is not None:
            mark_saved(part, sum(n not in saved for n in gives))
        made.append(SideStage(part, k % 2 != DEVICE, _names(takes), _names(gives)))
    return tuple(made)


@dataclass(slots=True)
class _Numbers:
    """Gives each node the number of its stage."""

    at: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    last: int = 0
    """The stage of the last node whose order counts."""
    read: dict[int, int] = field(default_factory=dict[int, int])
    """The last stage that reads a storage."""
    made: dict[int, int] = field(default_factory=dict[int, int])
    """The stage that makes a storage."""
    written: set[int] = field(default_factory=set[int])

    def take(self, node: fx.Node) -> None:
        """The next node of the graph."""
        self.at[node] = 0 if node.op in ("placeholder", "get_attr", "output") else self._stage(node)
        for s in _storages(node):
            self.made.setdefault(s, self.at[node])
        lying = {k for n in by_place(node) for k in (self.at[n], *(self.made[s] for s in _storages(n)))}
        if any(k % 2 == DEVICE and k != self.at[node] for k in lying):
            raise UnsupportedError("an address in what another stage makes", phase="capture", op=node.name)

    def _stage(self, node: fx.Node) -> int:
        """The stage of a node that computes, noted as a reader of its operands."""
        before = max((self.at[n] for n in node.all_input_nodes), default=0)
        storages = {s for n in node.all_input_nodes for s in _storages(n)}
        if storages & self.written:
            raise UnsupportedError("a read of what was written", phase="capture", op=node.name)
        if is_write(node):
            target = set(_storages(node.args[0]))
            before = max(before, self.last, *(self.read.get(s, 0) for s in target))
            self.written |= target
        ordered = _is_ordered(node)
        before = max(before, self.last) if ordered else before
        side = _side(node)
        stage = before if side is None else before + (before % 2 != side)
        self.last = stage if ordered else self.last
        for s in storages:
            self.read[s] = max(stage, self.read.get(s, 0))
        return stage


def _side(node: fx.Node) -> int | None:
    """Where a node runs: 0 on the CPU, `DEVICE` on the GPU, None where there is nothing to compute but numbers."""
    made = list(tensors(node))
    read = [t for n in node.all_input_nodes if n.op != "get_attr" for t in tensors(n)]
    if not made and not read:
        return None
    single = bool(made) and not is_write(node)  # numbers of the CPU are operands of the GPU's ops
    on_host = any(t.device == HOST for t in made) or any(
        t.device == HOST and not (single and not t.dim()) for t in read
    )
    return 0 if on_host else DEVICE


def _is_ordered(node: fx.Node) -> bool:
    """Whether a node draws random numbers or reads the state of what does, may stop the program, or talks to other
    processes."""
    if is_write(node):
        return False
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not draws_nothing(node)
    return (
        draws
        or node.target is torch.get_rng_state
        or isinstance(node.target, HigherOrderOperator)
        or node.is_impure()
        or "c10d" in str(node.target)
    )


def _storages(node: object) -> Iterable[int]:
    """The storages of all tensors that a node stands for."""
    for t in tensors(node) if isinstance(node, fx.Node) else ():
        if t.layout is torch.strided:
            yield t.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _taken(
    stage: int, nodes: Sequence[fx.Node], at: Mapping[fx.Node, int], sizes: Mapping[object, fx.Node]
) -> set[fx.Node]:
    """What a stage takes: operands from elsewhere, and on the GPU the sizes that its tensors have."""
    inside = set(nodes)
    found = {a for n in nodes for a in n.all_input_nodes if a not in inside and a.op != "get_attr"}
    if stage % 2 == DEVICE:
        symbols = {s for n in (*nodes, *found) for s in _symbols(n)}
        held = (sizes[s] for s in symbols if s in sizes)
        found |= {n for n in held if n.op == "placeholder" or at[n] < stage}
    return found


def _symbols(node: fx.Node) -> Iterable[object]:
    for leaf in tree_leaves(node.meta.get("val")):
        if isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield from free_symbols(leaf)


def _sizes(gm: fx.GraphModule) -> dict[object, fx.Node]:
    """The first node that is just a symbol, for each symbol that has one."""
    found: dict[object, fx.Node] = {}
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt) and val.node.expr in free_symbols(val):
            found.setdefault(val.node.expr, node)
    return found


def _graph(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], takes: Sequence[fx.Node], gives: Sequence[fx.Node]
) -> fx.GraphModule:
    """These nodes as a graph of their own."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in takes:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in nodes:
        for a in node.all_input_nodes:
            if a.op == "get_attr" and a not in env:
                env[a] = graph.node_copy(a)
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for n in gives))  # pyright: ignore[reportArgumentType]  (torch takes tuples of nodes)
    made = fx.GraphModule(gm, graph)
    made.meta |= {k: v for k, v in gm.meta.items() if k not in made.meta}
    return made


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(n.name for n in nodes)


__all__ = ["SideStage", "around_sides", "stages"]
