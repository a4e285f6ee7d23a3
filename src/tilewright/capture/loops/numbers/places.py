"""Which arguments of an op may be another number in each step of a loop."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from functools import cache
from typing import cast

import torch
from torch import Tensor, fx

from tilewright.capture.loops.nodes import arguments_of, val_of
from tilewright.capture.loops.spelling.in_place_ops import IN_PLACE

from .activations import ACTIVATIONS
from .losses import LOSSES
from .parts_at import PARTS
from .random_twins import DRAWN_OVER, WITH_CHANCE, WITHIN
from .shifts import SHIFTS
from .twins import TWINS, Twin

_SIGNS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor",
    "lshift", "rshift",
)  # fmt: skip
_NAMES = (
    "add", "sub", "mul", "div", "pow", "lt", "le", "gt", "ge", "eq", "ne", "floor_divide", "remainder", "fmod",
    "subtract", "multiply", "divide", "true_divide", "less", "less_equal", "greater", "greater_equal", "not_equal",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "xlogy", "copysign",
)  # fmt: skip
ARITHMETIC = {*(getattr(operator, n) for n in _SIGNS), *(getattr(torch, n) for n in _NAMES), *_NAMES}
"""What a number and a tensor without dims mean the same to, if that has the number's type."""

FILLS = (torch.full, torch.full_like, "new_full")
"""What fills a tensor with a number."""
_TENSORS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)


def takes_number(node: fx.Node, place: int) -> bool:
    """Whether the argument at this place (see `arguments_of`) may be another number in each step."""
    made = val_of(node)
    if is_one_number(node):
        return True
    if not isinstance(made, Tensor):
        return False
    return place in _twin_places(node) or in_its_place(node) or computed_by(node) in FILLS


def takes_numbers(node: fx.Node) -> bool:
    """Whether a node calls a function of which `takes_number` may hold at some place. Asked of the function: the node
    need not have numbers there."""
    return in_its_place(node) or computed_by(node) in (*FILLS, *_TENSORS) or _known(node) is not None


def computed_by(node: fx.Node) -> object:
    """What computes what `node` makes, and writes it over nothing."""
    if node.target in DRAWN_OVER and len(node.args) + len(node.kwargs) > 1:
        return DRAWN_OVER[node.target]
    return IN_PLACE.get(node.target, node.target)


def in_its_place(node: fx.Node) -> bool:
    """Whether `node` takes a tensor without dims in the place of a number, and means the same."""
    return computed_by(node) in ARITHMETIC or str(node.target) == "prims.fma.default"


def twin_of(node: fx.Node, changing: frozenset[int]) -> Twin | None:
    """What computes the same as `node` of tensors in the place of the numbers that change, if the op itself takes
    none there."""
    twin = _known(node)
    return twin if twin is not None and changing & _twin_places(node) else None


def knows(node: fx.Node, place: int, numbers: Iterable[float]) -> bool:
    """Whether the argument at this place, which may be a number, may be each of these."""
    twin = _known(node)
    return twin is None or place not in _twin_places(node) or all(map(twin.knows, numbers))


def writes_over(node: fx.Node) -> bool:
    """Whether `node`, which has a twin, is told to write what it makes over its first operand."""
    flag = _given(node).get("inplace")
    return flag is not None and arguments_of(node)[flag[0]] is True


def is_one_number(node: fx.Node) -> bool:
    """Whether a node makes a tensor of one number."""
    made = val_of(node)
    return node.target in _TENSORS and isinstance(made, Tensor) and made.numel() == 1


def _known(node: fx.Node) -> Twin | None:
    target = computed_by(node)
    return next(
        (t[target] for t in (TWINS, ACTIVATIONS, LOSSES, PARTS, SHIFTS, WITH_CHANCE, WITHIN) if target in t),
        None,
    )


def place_of_chance(node: fx.Node) -> int | None:
    """The place of the number that says how likely a node draws something."""
    return next(iter(_twin_places(node)), None) if computed_by(node) in WITH_CHANCE else None


def _twin_places(node: fx.Node) -> frozenset[int]:
    """The places of the arguments that the twin of a node takes as tensors."""
    twin = _known(node)
    given = {} if twin is None else _given(node)
    return frozenset(p for name in (twin.numbers if twin else ()) for p in given.get(name, ()))


def _given(node: fx.Node) -> dict[str, list[int]]:
    """The places of the arguments of a node, by the names that its twin has for them: of all that is in a list. None if
    the twin does not know this spelling of the op."""
    twin = _known(node)
    counted = iter(range(len(arguments_of(node))))

    def numbered(a: object) -> list[int]:
        inside = [a.start, a.stop, a.step] if isinstance(a, slice) else a
        if isinstance(inside, dict):
            inside = [*cast(dict[str, object], inside).values()]
        if isinstance(inside, (list, tuple)):
            return [p for x in cast(list[object], inside) for p in numbered(x)]
        return [next(counted)]

    args = [numbered(a) for a in node.args]
    kwargs = {name: numbered(a) for name, a in node.kwargs.items()}
    try:
        return {} if twin is None else _signature(twin).bind(*args, **kwargs, kind=None).arguments
    except TypeError:
        return {}


@cache
def _signature(twin: Twin) -> inspect.Signature:
    return inspect.signature(twin.function)
