"""Products in a loop that no step waits for: of what is sliced and a matrix that is the same in every step. They are
one product in front of the loop, as libraries do it for recurrent layers."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tilewright.capture.modes import MODES
from tilewright.tuning.thresholds import LOOPS

from .nodes import arguments_of, val_of
from .taken.kinds import Lifted, Own, Picked, Sliced
from .unrolled import EqualSteps

PRODUCTS = (operator.matmul, torch.matmul, torch.mm, F.linear, "matmul", "mm")
"""What takes any dims in front of a vector or matrix, and a matrix. (`mm` does not; for all steps it is `matmul`.)"""


def lift_products(found: EqualSteps) -> EqualSteps:
    """The steps with such products among what is sliced."""
    if any(n.target in MODES for n in found.windows[1]):
        return found  # in front of the loop they would be made in another mode
    inside = {n for window in found.windows for n in window}
    carried = {found.windows[1][m] for m, _ in found.carried}
    made: dict[fx.Node, Lifted] = {}
    for m, node in enumerate(found.windows[1]):
        product = _product(m, node, found)
        if (
            product is not None
            and node not in carried
            and all(w[m].users.keys() <= inside for w in found.windows)
        ):
            made[node] = product
    if not made:
        return found
    left = [m for m, n in enumerate(found.windows[1]) if n not in found.sliced and n not in made]
    arguments = [(m, p) for m in left for p in range(len(arguments_of(found.windows[1][m])))]
    taken = {found.taken_by(*at)[0] for at in arguments} | {key for m in left for key in found.given_to(m)}
    read = carried | {k for k in taken if isinstance(k, fx.Node)}
    unread = frozenset(found.sliced.keys() - carried - taken)
    read |= {n for counted in found.counted for n in counted.all_input_nodes}
    outer = {n: None for n in found.outer if n in read}
    return replace(found, sliced={**found.sliced, **made}, outer=outer, unread=unread)


def _product(m: int, node: fx.Node, found: EqualSteps) -> Lifted | None:
    """What `node`, of step 1, is a product of, if it is such a one."""
    if node.target not in PRODUCTS or len(node.args) < 2:
        return None
    x, weight, *rest = node.args
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    part, value, matrix = found.taken_by(m, 0)[1], val_of(x), val_of(weight)
    if (
        not isinstance(part, (Sliced, Picked, Own))
        or not isinstance(value, Tensor)
        or not isinstance(matrix, Tensor)
    ):
        return None
    others = (weight, *rest, *node.kwargs.values())
    if node.kwargs.keys() - {"bias"} or any(n is not None and n not in found.outer for n in others):
        return None
    if not value.dim() or matrix.dim() != 2:
        return None
    made = val_of(node)
    narrow = isinstance(made, Tensor) and statically_known_true(
        made.numel() <= LOOPS.max_lifted_growth_ratio * value.numel()
    )
    return Lifted(part, node) if narrow else None
