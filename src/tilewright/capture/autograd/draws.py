"""Random numbers in graphs that are to be split in two: what draws them twice is no common subexpression."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from torch import fx
from torch._functorch.compile_utils import rand_ops

from .rng import draws_nothing, may_draw


def keep_draws_apart(joint: fx.GraphModule) -> None:
    """Tell torch of the ops in a joint graph that draw. Before such a graph is split, equal ops are taken for one, but
    for some that are known to draw by name: two draws of another (exponential, in `gumbel_softmax`) became one."""
    for module in joint.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_function" and may_draw(node.target) and not draws_nothing(node):
                op = getattr(node.target, "overloadpacket", node.target)
                if op not in rand_ops:
                    rand_ops.append(op)
