"""Functions that a captured graph calls by name, in which numbers change with the step of a loop."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from tilewright.capture.loops.nodes import arguments_of, val_of

from .places import knows, place_of_chance, takes_number

InBody = tuple[int, int]
"""The number of a node of a body, and of its argument (see `arguments_of`)."""
Values = tuple[float, ...]
"""A number in each step."""


def body_of(node: object) -> fx.GraphModule | None:
    """The function that a node names."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    body = getattr(node.graph.owning_module, str(node.target), None)
    return body if isinstance(body, fx.GraphModule) else None


def changing_numbers(bodies: Sequence[fx.GraphModule | None]) -> dict[InBody, Values] | None:
    """The numbers in which these differ, one of each; None if they differ in anything else, or where no tensor may
    stand for a number."""
    known = [list(body.graph.nodes) for body in bodies if body is not None]
    if len(known) < len(bodies) or len({len(nodes) for nodes in known}) != 1:
        return None
    found: dict[InBody, Values] = {}
    numbers = [{n: k for k, n in enumerate(nodes)} for nodes in known]
    for m, across in enumerate(zip(*known, strict=True)):
        if len({_shape_of(node, ids) for node, ids in zip(across, numbers, strict=True)}) != 1:
            return None
        for p, given in enumerate(zip(*map(arguments_of, across), strict=True)):
            if isinstance(given[0], fx.Node) or all(
                type(a) is type(given[0]) and a == given[0] for a in given
            ):
                continue
            plain = [a for a in given if type(a) in (int, float)]
            if len(plain) < len(given) or not takes_number(across[0], p) or place_of_chance(across[0]) == p:
                return None
            if not knows(across[0], p, plain):
                return None
            found[m, p] = tuple(plain)  # pyright: ignore[reportArgumentType]
    return found


def _shape_of(node: fx.Node, numbers: dict[fx.Node, int]) -> tuple[object, ...]:
    """What a node of a body does, but for the numbers that it is given. What a body holds is known by identity."""
    target = "" if node.op == "placeholder" else node.target
    holds = node.op in ("get_attr", "call_module")
    held = id(getattr(node.graph.owning_module, str(node.target), node)) if holds else 0
    plain = (float, int)
    arguments = [
        numbers[a] if isinstance(a, fx.Node) else type(a) if type(a) in plain else repr(a)
        for a in arguments_of(node)
    ]
    made = val_of(node)
    kind = (str(made.shape), made.dtype, made.device) if isinstance(made, Tensor) else ()
    nesting = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")  # pyright: ignore[reportArgumentType]
    return (
        node.op,
        target if isinstance(target, str) else id(target),
        held,
        *arguments,
        _outline(nesting),
        *kind,
    )


def _outline(a: object) -> object:
    """How arguments are nested."""
    if isinstance(a, (list, tuple)):
        return type(a).__name__, tuple(map(_outline, a))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(a, dict):
        return tuple((k, _outline(v)) for k, v in a.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return "slice" if isinstance(a, slice) else ""
