"""Torch's own loops, `scan` and `while_loop`, as the loop op that the importer reads."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from .op import loop_op

_SCAN = torch.ops.higher_order.scan
_WHILE = torch.ops.higher_order.while_loop


def with_loop_ops(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with `scan` and `while_loop` as `loop_op`, where they carry tensors only; itself if it has none."""
    if not any(n.target in (_SCAN, _WHILE) for n in gm.graph.nodes):
        return gm
    made = copy.copy(gm)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        replaced = None
        if node.target is _SCAN:
            replaced = _scan(made, graph, node, values)
        elif node.target is _WHILE:
            replaced = _while(made, graph, node, values)
        if replaced is None:
            replaced = graph.node_copy(node, values.__getitem__)
        values[node] = replaced
    return fx.GraphModule(made, graph)


def _scan(
    made: fx.GraphModule, graph: fx.Graph, node: fx.Node, values: Mapping[fx.Node, fx.Node]
) -> fx.Node | None:
    held, carried, slices, _ = node.args
    body, state, first = _module(made, held), _tensors(carried), _tensors(slices)
    if body is None or state is None or not first or not isinstance(node.meta.get("val"), (tuple, list)):
        return None
    length = first[0].meta["val"].shape[0]
    inner = fx.Graph()
    counter = _counter(inner, [*state, *first])
    if counter is None:
        return None
    attributes: dict[str, object] = {}
    results = _inlined(inner, body, None, attributes)
    inner.output(results)
    steps: object = length
    if not isinstance(length, int):
        size = graph.call_function(torch.ops.aten.sym_size.int, (values[first[0]], 0))
        size.meta["val"] = length
        steps = size
    collected = len(results) - len(state)
    return _placed(made, graph, node, (inner, attributes), (steps, None, collected), values)


def _while(
    made: fx.GraphModule, graph: fx.Graph, node: fx.Node, values: Mapping[fx.Node, fx.Node]
) -> fx.Node | None:
    test, held, carried, outer = node.args[:4]
    condition, body, state = _module(made, test), _module(made, held), _tensors(carried)
    if condition is None or body is None or state is None or len(node.args) > 4 or node.kwargs:
        return None
    inner = fx.Graph()
    attributes: dict[str, object] = {}
    if _counter(inner, state) is None:
        return None
    after = _inlined(inner, body, None, attributes)
    rest = [n for n in inner.nodes if n.op == "placeholder"][1 + len(state) :]
    goes = _inlined(inner, condition, [*after, *rest], attributes)
    inner.output([*goes, *after])
    outside: dict[str, object] = {}
    given = [values[n] if isinstance(n, fx.Node) else n for n in (*state, *_listed(outer))]
    first = _inlined(graph, condition, given, outside, f"{node.name}_first_")
    for name, value in outside.items():
        setattr(made, name, value)
    return _placed(made, graph, node, (inner, attributes), (None, first[0], 0), values)


def _placed(
    made: fx.GraphModule, graph: fx.Graph, node: fx.Node, body: tuple[fx.Graph, dict[str, object]],
    how: tuple[object, object, int], values: Mapping[fx.Node, fx.Node],
) -> fx.Node:  # fmt: skip
    """The loop op in the place of `node`."""
    inner, attributes = body
    name = f"{node.name}_loop_body"
    setattr(made, name, fx.GraphModule(attributes, inner))
    held = graph.get_attr(name)
    operands = (node.args[1], node.args[2]) if node.target is _SCAN else (node.args[2], [])
    groups = [
        [values[n] if isinstance(n, fx.Node) else n for n in _listed(g)] for g in (*operands, node.args[3])
    ]
    given = (held, *how, False, *groups)
    replaced = graph.call_function(loop_op, given)  # pyright: ignore[reportArgumentType]  (lists of nodes and numbers)
    replaced.meta = dict(node.meta)
    return replaced


def _tensors(group: object) -> list[fx.Node] | None:
    """The nodes of a group of operands; None if one is no tensor."""
    found = [n for n in _listed(group) if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), Tensor)]
    return found if len(found) == len(_listed(group)) else None


def _listed(group: object) -> list[object]:
    return list(group) if isinstance(group, (list, tuple)) else []  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _module(gm: fx.GraphModule, held: object) -> fx.GraphModule | None:
    found = getattr(gm, str(held.target), None) if isinstance(held, fx.Node) else None
    return found if isinstance(found, fx.GraphModule) else None


def _counter(inner: fx.Graph, operands: Sequence[fx.Node]) -> fx.Node | None:
    """The first input of a body; None without a tensor that tells its device."""
    fake = next((v for n in operands if isinstance(v := n.meta.get("val"), FakeTensor)), None)
    if fake is None:
        return None
    node = inner.placeholder("counter")
    with fake.fake_mode:
        node.meta["val"] = torch.zeros((), dtype=torch.int64, device=fake.device)
    return node


def _inlined(
    graph: fx.Graph, module: fx.GraphModule, given: Sequence[object] | None, attributes: dict[str, object],
    prefix: str = "",
) -> list[fx.Node]:  # fmt: skip
    """The results of `module` on `given` (None: on inputs of its own), with its nodes copied into `graph`."""
    values: dict[fx.Node, object] = {}
    places = iter(given if given is not None else ())
    for node in module.graph.nodes:
        if node.op == "placeholder" and given is not None:
            values[node] = next(places)
        elif node.op == "get_attr":
            name = f"{prefix}held_{len(attributes)}"
            attributes[name] = getattr(module, str(node.target))
            values[node] = graph.get_attr(name)
            values[node].meta = dict(node.meta)
        elif node.op == "output":
            (returned,) = node.args
            results = returned if isinstance(returned, (list, tuple)) else (returned,)
            return [fx.map_arg(r, values.__getitem__) for r in results]  # pyright: ignore[reportArgumentType, reportReturnType]
        else:
            values[node] = graph.node_copy(node, values.__getitem__)  # pyright: ignore[reportArgumentType]
    return []
