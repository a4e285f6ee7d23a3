"""What a forward pass saves: the value that views and widening casts start from, not what they lead to.

The cut between the passes counts bytes but not whose memory they are: it saves the transpose of a weight beside the
weight, and halves as singles. Views cost nothing in the backward pass, and a cast is a part of what reads it.
"""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten

_VIEWS = frozenset(
    {
        aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten.unsqueeze.default,
        aten.squeeze.dims, aten.squeeze.dim, aten.expand.default, aten.detach.default, aten.alias.default,
    }
)  # fmt: skip
_CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})


_FIRST = "first_saved"
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def must_recompute(node: fx.Node) -> bool:
    """Whether the program asks that the backward pass computes a value again. Torch has such a function beside its
    partitioner, whose import brings all of Dynamo and Inductor."""
    return node.meta.get("recompute") in _AGAIN


def keep_compared(joint: fx.GraphModule) -> None:
    """What is compared for equality is saved, unless the program itself asks to compute it again: another kernel could
    round it in another way, and nothing would equal the maximum that the forward pass found."""
    for target in (aten.eq.Tensor, aten.ne.Tensor):
        for node in joint.graph.find_nodes(op="call_function", target=target):
            for operand in node.all_input_nodes:
                value = operand.meta.get("val")
                floats = isinstance(value, Tensor) and value.is_floating_point()
                if floats and operand.op == "call_function" and not must_recompute(operand):
                    operand.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def keep_overwritten(joint: fx.GraphModule) -> None:
    """What is computed from an input that the forward pass writes into is saved, unless the program itself asks to
    compute it again: the backward pass would find another value in that input."""
    for copy in joint.graph.find_nodes(op="call_function", target=aten.copy_.default):
        written = copy.args[0]
        if isinstance(written, fx.Node) and written.op == "placeholder":
            for node in _readers(written):
                if node is not copy and not must_recompute(node):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a value, or a view of it, and makes another; of several results, each."""
    found: list[fx.Node] = []
    for user in node.users:
        value = user.meta.get("val")
        if isinstance(value, Tensor):
            found += _readers(user) if _is_view(user) else [user]
        elif isinstance(value, tuple | list):
            found += [n for n in user.users if isinstance(n.meta.get("val"), Tensor)]
    return found


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def save_sources(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
    """Save the source of each saved tensor that views and widening casts of fixed sizes make, and make it again in the
    backward graph. The first `count` outputs of `forward` are the program's."""
    (output,) = forward.graph.find_nodes(op="output")
    returned: list[object] = list(output.args[0])  # pyright: ignore[reportArgumentType]
    program = {a for a in returned[:count] if isinstance(a, fx.Node)}
    places = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    held = [a for a in returned[count:] if isinstance(a, fx.Node)]
    moved: dict[fx.Node, list[fx.Node]] = {}
    for node in held:
        chain = _chain(node, program)
        if chain and node.name in places and not node.meta.get("saved_tensor_with_no_vc_check", False):
            moved[node] = chain
    if not moved:
        return
    already: dict[fx.Node, fx.Node] = {n: places[n.name] for n in held if n.name in places and n not in moved}
    saved: list[object] = returned[:count]
    for a in returned[count:]:
        if not isinstance(a, fx.Node) or a not in moved:
            saved.append(a)
            continue
        *above, source = moved[a]
        if source not in already:
            already[source] = _renamed(backward, places[a.name], source)
            saved.append(source)
        _made_again(backward, places[a.name], already[source], above)
    output.args = (tuple(saved),)
    forward.recompile()
    backward.recompile()


def mark_saved(forward: fx.GraphModule, count: int) -> None:
    """Note that the results of `forward` behind the first `count` are saved."""
    (output,) = forward.graph.find_nodes(op="output")
    output.meta[_FIRST] = count


def first_saved(gm: fx.GraphModule) -> int | None:
    """The number of the first result that is saved; None if `gm` is no forward pass."""
    (output,) = gm.graph.find_nodes(op="output")
    return output.meta.get(_FIRST)


def _chain(node: fx.Node, program: set[fx.Node]) -> list[fx.Node]:
    """`node`, what it is a view or wider form of, and so on to the source, which an op of this graph makes and the
    program does not return; empty if `node` is its own source."""
    found = [node]
    while _is_step(found[-1]):
        before = found[-1].args[0]
        assert isinstance(before, fx.Node)
        if before.op != "call_function" or before in program:
            break
        found.append(before)
    return found if len(found) > 1 else []


def _is_step(node: fx.Node) -> bool:
    """Whether a node is a view of its operand, or the same numbers in more bits; with fixed sizes only."""
    before = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(before, fx.Node) or len(node.all_input_nodes) != 1:
        return False
    old, new = before.meta.get("val"), node.meta.get("val")
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old.device != new.device:
        return False
    if any(isinstance(n, torch.SymInt) for t in (old, new) for n in (*t.shape, *t.stride())):
        return False
    if node.target in _VIEWS:
        return True
    widens = old.dtype in (torch.float16, torch.bfloat16) and new.dtype is torch.float32
    return node.target in _CASTS and widens and old.stride() == new.stride()


def _renamed(backward: fx.GraphModule, place: fx.Node, source: fx.Node) -> fx.Node:
    """A placeholder for `source` in front of `place`."""
    with backward.graph.inserting_before(place):
        new = backward.graph.placeholder(source.name)
    new.meta = dict(source.meta)
    return new


def _made_again(backward: fx.GraphModule, place: fx.Node, start: fx.Node, above: list[fx.Node]) -> None:
    """Put what leads from `start` to the value of `place` in the place of that: `above` from the last step to the
    first."""
    last = backward.graph.find_nodes(op="placeholder")[-1]
    value = start
    for node in reversed(above):
        with backward.graph.inserting_after(last if value is start else value):
            assert callable(node.target)
            value = backward.graph.call_function(node.target, (value, *node.args[1:]), dict(node.kwargs))
        value.meta = dict(node.meta)
    place.replace_all_uses_with(value)
    backward.graph.erase_node(place)
