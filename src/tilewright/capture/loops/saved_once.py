"""What each step of a scan saves alike for the backward pass is saved once.

Torch stacks whatever a step's gradient reads, also what the step makes of tensors that are the same in all of them: a
copy of a transposed weight for each step. Here it is made outside of the scan, and the scan of the backward pass reads
it as what is the same in every step. (The joint graph; before it is cut into a forward and a backward one.)"""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Argument

SCAN = torch.ops.higher_order.scan


def save_once(joint: fx.GraphModule) -> None:
    """Change the joint graph in place; its operands and results stay what they are, and lie as before."""
    scans = joint.graph.find_nodes(op="call_function", target=SCAN)
    if not scans:
        return
    alike: dict[fx.Node, fx.Node] = {}
    for scan in scans:
        _read_once(joint, scan, alike)
        alike |= _made_once(joint, scan)
    for stack in [n for n in alike if not n.users]:
        joint.graph.erase_node(stack)
    joint.graph.eliminate_dead_code()
    joint.recompile()


def _parts(scan: fx.Node) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """What a scan begins with, takes slices of, and reads whole."""
    init, sliced, invariant = (list(cast(Sequence[fx.Node], group)) for group in scan.args[1:4])
    return init, sliced, invariant


def _body(joint: fx.GraphModule, scan: fx.Node) -> fx.GraphModule:
    return cast(fx.GraphModule, getattr(joint, cast(str, cast(fx.Node, scan.args[0]).target)))


# --- what a scan stacks ---


def _made_once(joint: fx.GraphModule, scan: fx.Node) -> dict[fx.Node, fx.Node]:
    """What a scan stacks is stacked no more where every step makes the same. By what stands for the stack, which shows
    one value in each place: that value."""
    init, sliced, invariant = _parts(scan)
    body = _body(joint, scan)
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    known = dict(zip(places[len(init) + len(sliced) :], invariant, strict=True))
    results = list(cast(Sequence[fx.Node], body.graph.output_node().args[0]))
    steady = _steady(body, set(known))
    dropped = [k for k in range(len(init), len(results)) if results[k] in steady]
    if not dropped or any(n.target is not operator.getitem for n in scan.users):
        return {}
    readers = {cast(int, n.args[1]): n for n in scan.users}
    if len(readers) < len(scan.users):
        return {}
    found: dict[fx.Node, fx.Node] = {}
    for k in dropped:
        stack = readers.get(k)
        if stack is not None:
            with joint.graph.inserting_before(stack):
                value = _copied(joint.graph, results[k], known)
                shown = _shown(joint.graph, value, sliced[0])
                dense = _dense(joint.graph, shown)
            stack.replace_all_uses_with(dense)
            for user in [u for u in dense.users if _is_turned(u) or u.target is SCAN]:
                user.replace_input_with(dense, shown)
            joint.graph.erase_node(stack)
            found[shown] = value
    remaining = [k for k in range(len(results)) if k not in dropped]
    for k, stack in readers.items():
        if k in remaining:
            stack.args = (scan, remaining.index(k))
    scan.meta["val"] = tuple(scan.meta["val"][k] for k in remaining)
    _replace_body(joint, scan, _with_results(body, [results[k] for k in remaining]))
    return found


def _steady(body: fx.GraphModule, invariant: set[fx.Node]) -> set[fx.Node]:
    """The nodes of a body that are made of what is `invariant` alone, and of nothing random."""
    found = set(invariant)
    for n in body.graph.nodes:
        op = n.target
        plain = isinstance(op, OpOverload) and not op._schema.is_mutable
        if plain and torch.Tag.nondeterministic_seeded not in cast(OpOverload, op).tags:
            if n.all_input_nodes and found.issuperset(n.all_input_nodes):
                found.add(n)
    return found


def _copied(graph: fx.Graph, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """A node of a body, with what it is made of, outside."""
    for n in [*_below(node, known), node]:
        if n not in known:
            known[n] = _valued(graph.node_copy(n, known.__getitem__))
    return known[node]


def _below(node: fx.Node, known: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """What a node is made of, first things first."""
    found: dict[fx.Node, None] = {}
    for n in node.all_input_nodes:
        if n not in known:
            found |= dict.fromkeys(_below(n, known)) | {n: None}
    return list(found)


def _shown(graph: fx.Graph, value: fx.Node, sliced: fx.Node) -> fx.Node:
    """A value as if it were stacked, as often as `sliced` has parts."""
    count = sliced.meta["val"].shape[0]
    steps: Argument = count
    if isinstance(count, torch.SymInt):
        steps = graph.call_function(torch.ops.aten.sym_size.int, (sliced, 0))
        steps.meta["val"] = count
    one = _valued(graph.call_function(torch.ops.aten.unsqueeze.default, (value, 0)))
    sizes: list[Argument] = [steps, *[-1] * value.meta["val"].dim()]
    return _valued(graph.call_function(torch.ops.aten.expand.default, (one, sizes)))


def _dense(graph: fx.Graph, shown: fx.Node) -> fx.Node:
    """What is shown in many places, in each of them."""
    return _valued(
        graph.call_function(
            torch.ops.aten.clone.default, (shown,), {"memory_format": torch.contiguous_format}
        )
    )


def _valued(node: fx.Node) -> fx.Node:
    """The node with what stands for its value."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    inputs = [n.meta["val"] for n in node.all_input_nodes]
    mode = detect_fake_mode([v for v in inputs if isinstance(v, FakeTensor)])
    assert mode is not None
    with mode, torch.no_grad():
        node.meta["val"] = cast(Callable[..., object], node.target)(*args, **kwargs)
    return node


# --- what a scan reads ---


def _read_once(joint: fx.GraphModule, scan: fx.Node, alike: Mapping[fx.Node, fx.Node]) -> None:
    """What is the same in each slice is read whole."""
    init, sliced, invariant = _parts(scan)
    steady = {k: v for k, x in enumerate(sliced) if (v := alike.get(_unturned(x))) is not None}
    if len(steady) == len(sliced):  # one slice says how many steps there are
        steady.popitem()
    if not steady:
        return
    body = _body(joint, scan)
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    moved = [places[len(init) + k] for k in steady]
    order = [*(n for n in places if n not in moved), *moved]
    scan.args = (
        scan.args[0], init, [x for k, x in enumerate(sliced) if k not in steady],
        (*invariant, *steady.values()),
    )  # fmt: skip
    _replace_body(joint, scan, _with_places(body, order))


def _unturned(x: fx.Node) -> fx.Node:
    """What is seen of a stack from its other end."""
    while _is_turned(x):
        x = cast(fx.Node, x.args[0])
    return x


def _is_turned(x: fx.Node) -> bool:
    """Whether a node shows what it reads from the other end of dim 0."""
    return x.target is torch.ops.aten.flip.default and list(cast(Sequence[int], x.args[1])) == [0]


# --- bodies ---


def _with_results(body: fx.GraphModule, results: Sequence[fx.Node]) -> fx.GraphModule:
    """The body with other results."""
    graph, table = fx.Graph(), dict[fx.Node, fx.Node]()
    for n in body.graph.nodes:
        if n.op != "output":
            table[n] = graph.node_copy(n, table.__getitem__)
    graph.output(fx.map_arg(tuple(results), table.__getitem__))
    graph.eliminate_dead_code()
    return fx.GraphModule(body, graph)


def _with_places(body: fx.GraphModule, order: Sequence[fx.Node]) -> fx.GraphModule:
    """The body with its operands in another order."""
    graph, table = fx.Graph(), dict[fx.Node, fx.Node]()
    for n in (*order, *(n for n in body.graph.nodes if n.op != "placeholder")):
        table[n] = graph.node_copy(n, table.__getitem__)
    return fx.GraphModule(body, graph)


def _replace_body(joint: fx.GraphModule, scan: fx.Node, body: fx.GraphModule) -> None:
    """Another body for one scan: others may have the same."""
    before = cast(str, cast(fx.Node, scan.args[0]).target)
    taken = dict(joint.named_children())
    name = next(n for k in range(1 + len(taken)) if (n := f"{before}_{k}") not in taken)
    setattr(joint, name, body)
    with joint.graph.inserting_before(scan):
        scan.args = (joint.graph.get_attr(name), *scan.args[1:])
