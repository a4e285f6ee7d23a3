"""Where a captured graph computes: one device for all its tensors, but for constants, and for single CPU numbers among
its inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tilewright.errors import UnsupportedError

HOST = torch.device("cpu")
ADMITTED = frozenset({"cpu", "cuda"})
"""Kinds of devices that graphs may live on."""


def graph_device(gm: fx.GraphModule) -> str:
    """The device of the tensors of `gm`, as torch writes it ("cpu", "cuda:0").

    In a graph of a GPU, a CPU tensor without dims is admitted where torch admits it: as an operand, not as a result.
    Raises UnsupportedError for any other mixture, and for devices that no code is generated for."""
    found: dict[torch.device, fx.Node] = {}
    for node in gm.graph.nodes:
        for t in tensors(node):
            found.setdefault(t.device, node)
    others = [d for d in found if d != HOST]
    if not others:
        return "cpu"
    if len(others) > 1 or others[0].type not in ADMITTED:
        raise UnsupportedError(f"tensors on {', '.join(sorted(map(str, found)))}", phase="capture")
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            continue  # a constant lies wherever it is read
        wrong = node.op == "output" or _writes(node)
        read = [t for a in node.all_input_nodes for t in tensors(a)] if wrong else []
        if any(t.device == HOST and (wrong or t.dim()) for t in (*tensors(node), *read)):
            raise UnsupportedError(
                f"tensors on cpu and {others[0]} in one graph", phase="capture", op=str(node.target),
                hint="move the inputs and the module to one device",
            )  # fmt: skip
    return str(others[0])


def host_inputs(gm: fx.GraphModule) -> tuple[int, ...]:
    """Numbers of the placeholders that are CPU tensors."""
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return tuple(k for k, n in enumerate(places) if any(t.device == HOST for t in tensors(n)))


def tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that a node stands for."""
    for leaf in tree_leaves(node.meta.get("val")):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
