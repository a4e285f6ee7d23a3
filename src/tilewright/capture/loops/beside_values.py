"""What nodes do besides making values of values. A scan carries values alone: steps stay apart where something reads
which place of memory a value lies in, where autograd is told something of a value that passes from step to step, and
where functions of torch's (`grad`, `vmap`) are at work around them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from torch import fx

from .spelling.flat import ENTER, LEAVE
from .unrolled import Unlike

_BY_PLACE = frozenset({"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"})
"""Names of what reads memory by its places. A scan lays out anew what it carries and slices."""

_HOOK = "register_hook"
"""The name of what calls a function with the gradient of a value."""


def check_beside(nodes: Sequence[fx.Node], begin: int, end: int) -> None:
    """Raise Unlike if the steps between these numbers of `nodes` do more than make values of values, or if something
    does with what they make."""
    steps = {*nodes[begin:end]}
    if _depth(nodes[:begin]) or any(_name(n).endswith((ENTER, LEAVE)) for n in steps):
        raise Unlike("a function of torch's that takes functions is at work")
    if any(name in _BY_PLACE for n in steps for name in _names(n)):
        raise Unlike("a step reads memory by its places")
    hooked = [n.all_input_nodes[0] for n in nodes if _name(n) == _HOOK and (n in steps or _reads(n, steps))]
    if any(len(n.users) > 1 for n in hooked) or any("has_backward_hook" in n.meta for n in steps):
        raise Unlike("a hook gets the gradient of what is read elsewhere too")


def _reads(node: fx.Node, others: Container[fx.Node]) -> bool:
    return any(n in others for n in node.all_input_nodes)


def _depth(nodes: Sequence[fx.Node]) -> int:
    """How many levels are open behind these nodes."""
    return sum(_name(n).endswith(ENTER) - _name(n).endswith(LEAVE) for n in nodes)


def _names(node: fx.Node) -> Iterator[str]:
    """What a node calls, and what the functions call that it calls."""
    yield _name(node)
    owner = node.graph.owning_module
    for given in node.all_input_nodes:
        body = getattr(owner, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            for inner in body.graph.nodes:
                yield from _names(inner)


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""
