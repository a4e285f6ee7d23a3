"""What is written into new tensors as values of their own: `x = zeros(n); x += h` is `x = zeros(n) + h`."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from tilewright.capture.loops.leaving import memories_of, written_by
from tilewright.capture.loops.nodes import val_of
from tilewright.capture.loops.unrolled import Unlike
from tilewright.capture.modes import nodes_without_gradients

from .in_place_ops import IN_PLACE, writes_apart


def compute_apart(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph in which tensors that it makes itself, and that no part or view is taken of, are written to by nobody:
    who did so computes; itself if there are none. Nodes carry `meta["example_value"]`."""
    nodes = list(gm.graph.nodes)
    written = _written(nodes)
    if not written:
        return gm
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        if node not in written:
            values[node] = graph.node_copy(node, values.__getitem__)
            continue
        made = _copied(graph, node, values)
        for other in written[node]:
            values[other] = made
    made = fx.GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    return made


def _written(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that write over such a tensor, with all that stand for it."""
    owners: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for n in nodes:
        for memory in memories_of(val_of(n)):
            owners[memory].append(n)
    silent = nodes_without_gradients(nodes)
    found: dict[fx.Node, list[fx.Node]] = {}
    for memory, group in owners.items():
        if len(group) > 1 and _is_rewritten(memory, group, silent):
            found |= dict.fromkeys(group[1:], group)
    return found


def _is_rewritten(memory: int, group: Sequence[fx.Node], silent: set[fx.Node]) -> bool:
    """Whether these nodes are a new tensor and what writes over all of it, and nothing else writes there."""
    first, *others = group
    example = val_of(first)
    if first.op not in ("call_function", "call_method") or not isinstance(example, FakeTensor):
        return False
    if not all(_target(n) in group and _looks_alike(example, n) for n in others):
        return False
    if any(n in silent for n in others) and any(cast(Tensor, val_of(n)).requires_grad for n in group):
        return False
    users = {u: None for n in group for u in n.users if u not in group and u.op != "output"}
    return not any(u.target is operator.setitem or written_by(u, {memory}) for u in users)


def _target(node: fx.Node) -> object:
    """What a node of a known op writes over."""
    if "out" in node.kwargs:
        return node.kwargs["out"]
    return node.args[0] if node.args and writes_apart(node) else None


def _looks_alike(example: FakeTensor, node: fx.Node) -> bool:
    """Whether what a node writes can be computed apart, and then is a tensor as the one that it writes over."""
    try:
        made = _computed(node)
    except Unlike:
        return False
    before = val_of(node)
    return isinstance(before, Tensor) and all(
        str(t.shape) == str(example.shape) and str(t.stride()) == str(example.stride())
        for t in (made, before)
    )


def _call_of(node: fx.Node) -> tuple[str, Callable[..., object], tuple[object, ...], Mapping[str, object]]:
    """What computes what a node writes: kind, function, arguments."""
    args, kwargs = tuple(node.args), {k: v for k, v in node.kwargs.items() if k != "out"}
    if node.target == "copy_":
        return "call_function", torch.clone, args[1:2], {"memory_format": torch.contiguous_format}
    if node.target in IN_PLACE:
        return "call_function", IN_PLACE[node.target], args, kwargs
    return node.op, cast(Callable[..., object], node.target), args, kwargs


def _computed(node: fx.Node) -> Tensor:
    """What stands for what a node writes. Raises Unlike where it cannot be computed apart."""
    _, called, args, kwargs = _call_of(node)
    mode = cast(FakeTensor, val_of(node)).fake_mode
    given = fx.map_arg((args, kwargs), val_of)  # pyright: ignore[reportArgumentType]
    try:
        with mode, torch.no_grad():
            made = called(*given[0], **given[1])  # pyright: ignore[reportArgumentType, reportCallIssue, reportUnknownVariableType, reportGeneralTypeIssues]
    except Exception as error:
        raise Unlike(f"{node.target} fails apart: {error}") from error
    if not isinstance(made, Tensor):
        raise Unlike(f"{node.target} makes no tensor")
    return made


def _copied(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, fx.Node]) -> fx.Node:
    """What computes what a node writes, of the type of what it wrote over."""
    kind = cast(Tensor, val_of(node)).dtype
    op, called, args, kwargs = _call_of(node)
    computed = _computed(node)
    args, kwargs = fx.map_arg((args, kwargs), values.__getitem__)  # pyright: ignore[reportArgumentType, reportAssignmentType, reportGeneralTypeIssues, reportUnknownVariableType]
    made = graph.create_node(op, called, args, kwargs)  # pyright: ignore[reportArgumentType, reportUnknownArgumentType]
    made.meta = {**node.meta, "example_value": computed}
    if computed.dtype == kind:
        made.meta["example_value"] = _like(node, computed)
        return made
    cast_to = graph.call_method("to", (made, kind))
    cast_to.meta = {**node.meta, "example_value": _like(node, computed)}
    return cast_to


def _like(node: fx.Node, computed: Tensor) -> Tensor:
    """What stands for it: of memory of its own."""
    before = cast(FakeTensor, val_of(node))
    with before.fake_mode, torch.no_grad():
        made = torch.empty_like(computed, dtype=before.dtype)
    given = [t for n in node.all_input_nodes if isinstance(t := val_of(n), Tensor)]
    inexact = made.is_floating_point() or made.is_complex()
    return made.requires_grad_(inexact and any(t.requires_grad for t in given))
