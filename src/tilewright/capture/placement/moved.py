"""What a graph of a GPU makes on the CPU of nothing that lies there: made on the GPU instead.

Models make index tables, masks and constants without naming a device, and copy them over or index with them. Their
elements are the same wherever they are made, so that such values need no place of their own, and the graph has one
device. (What a device may choose, as where indices repeat, it chooses as that device does.) What stays:
what comes in on the CPU, numbers that leave tensors, random draws (each device has its own generator), and whatever
these are made with. What goes out on the CPU is brought there behind the graph (`around_host_results`)."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from tilewright.capture.aliasing.memory import storage_of
from tilewright.capture.aten.registry import entry_of
from tilewright.capture.opaque import Build, Runner, returned

from .device import HOST, tensors

aten = torch.ops.aten
SIZES = frozenset({"aten::sym_size", "aten::sym_numel"})
"""Ops that read no element."""
PRODUCTS = frozenset({"contraction", "convolution"})
"""Reasons for which ops are library calls, whose libraries on GPUs take no integers."""


def around_host_results(build: Build) -> Build:
    """`build` for graphs of a GPU of which results go out on the CPU: what it builds leaves them on the GPU. Results
    that share memory there, or are to be pinned, stay as they are."""

    def one(gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        there = gm if _other_device(gm) is None else moved(gm, results=_own_results(gm))
        pairs = enumerate(zip(returned(gm), returned(there), strict=True))
        brought = [k for k, (a, b) in pairs if _is_on_host(a) and not _is_on_host(b)]
        runner = build(there if brought else gm, kind, frozen)
        return _bringing(runner, brought) if brought else runner

    return one


def _bringing(runner: Runner, brought: Sequence[int]) -> Runner:
    """`runner` with these of its results on the CPU."""

    def run(args: list[object]) -> list[object]:
        results = list(runner(args))
        args.clear()
        for k in brought:
            made = results[k]
            if isinstance(made, Tensor):
                results[k] = made.to(HOST)
        return results

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]  (torch's sign that the list may be emptied)
    return run


def _own_results(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """The results on the CPU that share no memory with each other."""
    nodes = [n for n in returned(gm) if isinstance(n, fx.Node) and _is_on_host(n)]
    times = Counter(map(storage_of, nodes))
    return frozenset(n for n in nodes if times[storage_of(n)] == 1 and not n.kwargs.get("pin_memory"))


def _is_on_host(node: object) -> bool:
    return isinstance(node, fx.Node) and any(t.device == HOST for t in tensors(node))


def moved(gm: fx.GraphModule, results: frozenset[fx.Node] = frozenset()) -> fx.GraphModule:
    """A graph with its values on one device, as far as they may move there; itself if none may. Of what goes out only
    `results` may."""
    device = _other_device(gm)
    moving = _movable(gm.graph, results)
    if device is None or not moving:
        return gm
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    made = fx.GraphModule(gm, graph)
    made.meta |= {k: v for k, v in gm.meta.items() if k not in made.meta}
    _move(made, [env[n] for n in moving], device)
    return made


def move(gm: fx.GraphModule) -> None:
    """The same in place, but for what goes out."""
    device = _other_device(gm)
    if device is not None:
        _move(gm, _movable(gm.graph, frozenset()), device)


def _move(gm: fx.GraphModule, nodes: Sequence[fx.Node], device: torch.device) -> None:
    moving, of = set(nodes), _Elsewhere(device)
    for node in nodes:
        _place(node, of)
    for node in gm.graph.find_nodes(op="get_attr"):
        users = [n for n in node.users if n in moving]
        if users and any(t.device == HOST for t in tensors(node)):
            with gm.graph.inserting_after(node):
                there = gm.graph.call_function(aten._to_copy.default, (node,), {"device": device})
            there.meta = {k: tree_map(of, v) for k, v in node.meta.items() if k == "val"}
            for user in users:
                user.replace_input_with(node, there)
    gm.recompile()


def _other_device(gm: fx.GraphModule) -> torch.device | None:
    """The only device beside the CPU, if there is one."""
    found = {t.device for n in gm.graph.nodes for t in tensors(n)} - {HOST}
    return found.pop() if len(found) == 1 else None


def _movable(graph: fx.Graph, results: frozenset[fx.Node]) -> list[fx.Node]:
    """The nodes whose results lie on the CPU and may be made elsewhere."""
    held = [n for n in graph.nodes if any(t.device == HOST for t in tensors(n))]
    found = {n for n in held if _may_move(n)}
    doubtful = list(found)
    while doubtful:
        node = doubtful.pop()
        if node in found and not _free(node, found, results):
            found.discard(node)
            doubtful += [*node.all_input_nodes, *node.users]
    return [n for n in held if n in found]


def _may_move(node: fx.Node) -> bool:
    """Whether a node by itself makes the same on another device. Ops with several results (factorisations, sorts) may
    choose other signs or another of equal elements there; lists of views are one result."""
    if node.target is operator.getitem:
        return True  # of what moves
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    if node.op != "call_function" or schema is None or schema.is_mutable or len(schema.returns) != 1:
        return False
    if torch.Tag.nondeterministic_seeded in tags or not schema.name.startswith(("aten::", "prims::")):
        return False
    found = list(tensors(node))
    entry = entry_of(node.target)
    if entry is not None and entry.reason in PRODUCTS and not all(t.is_floating_point() for t in found):
        return False
    return all(t.device == HOST for t in found)


def _free(node: fx.Node, moving: set[fx.Node], results: frozenset[fx.Node]) -> bool:
    """Whether what a node reads on the CPU moves with it, and whoever reads it can read it elsewhere."""
    sources = [n for n in node.all_input_nodes if any(t.device == HOST for t in tensors(n))]
    return all(n in moving or n.op == "get_attr" for n in sources) and all(
        n in moving or _reads_anywhere(n) or (n.op == "output" and node in results) for n in node.users
    )


def _reads_anywhere(node: fx.Node) -> bool:
    """Whether a node's results are tensors of the other device alone, or sizes, which are the same everywhere."""
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.name in SIZES:
        return True
    found = list(tensors(node))
    leaves = tree_leaves(node.meta.get("val"))
    return len(found) == len(leaves) > 0 and all(t.device != HOST for t in found)


@dataclass(slots=True)
class _Elsewhere:
    """Describes tensors of the CPU as they will be on a device: what shared a storage shares one there, at the same
    places, which ops may address."""

    device: torch.device
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def __call__(self, t: object) -> object:
        if not isinstance(t, torch.Tensor) or t.device != HOST:
            return t
        mode = getattr(t, "fake_mode", None)
        assert mode is not None, "values of captured nodes are fake"
        storage = t.untyped_storage()
        key = storage._cdata, t.dtype  # pyright: ignore[reportPrivateUsage]
        with mode:
            if key not in self.storages:
                size = storage.nbytes() // t.element_size()
                self.storages[key] = torch.empty(size, dtype=t.dtype, device=self.device)
            held = self.storages[key]
            return torch.as_strided(held, t.shape, t.stride(), t.storage_offset())


def _place(node: fx.Node, of: _Elsewhere) -> None:
    node.args, node.kwargs = _renamed(node.args, of.device), _renamed(dict(node.kwargs), of.device)
    schema = getattr(node.target, "_schema", None)
    takes = schema is not None and any(a.name == "device" for a in schema.arguments)
    if takes and not any(isinstance(a, torch.device) for a in tree_leaves(node.args)):
        node.kwargs = {**node.kwargs, "device": of.device}
    if node.kwargs.get("pin_memory"):
        node.kwargs = {**node.kwargs, "pin_memory": False}
    node.meta = copy.copy(node.meta)
    if "val" in node.meta:
        node.meta["val"] = tree_map(of, node.meta["val"])


def _renamed(given: Any, device: torch.device) -> Any:
    return tree_map(lambda a: device if isinstance(a, torch.device) and a == HOST else a, given)


__all__ = ["around_host_results", "move", "moved"]
