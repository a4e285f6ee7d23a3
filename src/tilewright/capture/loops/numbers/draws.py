"""Random draws whose chance changes with the step of a loop.

How likely something is dropped is a plain number to whatever draws: no tensor stands there. So what all steps draw is
drawn in front of the loop, in the order of the steps, by the calls that the steps would make; each step takes its
part. A loop that draws anything else keeps its order, and stays as it is."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tilewright.capture.loops.nodes import arguments_of, val_of
from tilewright.capture.loops.taken.kinds import Drawn, Numbers
from tilewright.capture.loops.unrolled import EqualSteps, Unlike

from .places import place_of_chance

DROPS = (F.dropout, torch.dropout)
"""What drops elements, and is its operand where it drops nothing."""


def sample_of(drawn: Drawn) -> Tensor:
    """What stands for what one step reads."""
    made = _made_by(drawn.node)
    return made.detach().new_empty(made.shape, dtype=torch.bool if drawn.node.target in DROPS else made.dtype)


def drawn_in_front(found: EqualSteps) -> None:
    """Note what the steps read of what is drawn in front of them, where chances change. Raises Unlike where it cannot
    be drawn there."""
    nodes = found.windows[1]
    drawing = {m: p for m, n in enumerate(nodes) if (p := _chance_of(n)) is not None}
    known = {m: tuple(arguments_of(window[m])[p] for window in found.windows) for m, p in drawing.items()}
    plain = {m: [c for c in cs if isinstance(c, (int, float))] for m, cs in known.items()}
    if not any(isinstance(found.sliced.get((m, p)), Numbers) for m, p in drawing.items()):
        return
    for m, p in drawing.items():
        chances = tuple(plain[m])
        if len(chances) < found.steps:
            continue  # what a tensor says of the chance is drawn in the steps
        if nodes[m].target in (*DROPS, F.alpha_dropout) and 0 in chances:
            raise Unlike("some steps drop nothing")
        if nodes[m].target is F.alpha_dropout and 1 in chances:
            raise Unlike("some steps drop all")
        found.sliced[m, p] = Numbers(chances)
        beyond = len(arguments_of(nodes[m]))
        found.sliced[m, beyond] = Drawn(nodes[m], chances, _sizes(found, nodes[m]))


def _chance_of(node: fx.Node) -> int | None:
    """The place of the chance among the arguments of what draws with one."""
    idle = node.target in (*DROPS, F.alpha_dropout) and not _trains(node)
    return None if idle else place_of_chance(node)


def _trains(node: fx.Node) -> bool:
    usual = node.target is not F.alpha_dropout
    training = (
        node.args[2] if len(node.args) > 2 else node.kwargs.get("training", node.kwargs.get("train", usual))
    )
    return training is True


def _made_by(node: fx.Node) -> Tensor:
    made = val_of(node)
    assert isinstance(made, Tensor)
    return made


def _sizes(found: EqualSteps, node: fx.Node) -> tuple[int | tuple[fx.Node, int], ...]:
    """The sizes of what a node draws, by what is known in front of the loop. Raises Unlike."""
    made = _made_by(node)
    if not made.is_contiguous():
        raise Unlike("what is drawn lies in another order")
    return tuple(_size(n, (*found.carried.values(), *found.outer)) for n in made.shape)


def _size(n: int | torch.SymInt, known: Iterable[fx.Node]) -> int | tuple[fx.Node, int]:
    if isinstance(n, int):
        return n
    for node in known:
        value = val_of(node)
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(size, torch.SymInt) and str(size) == str(n):
                return node, dim
    raise Unlike("the size of what is drawn is not known in front of the loop")


def drawn_of(graph: fx.Graph, drawn: Drawn, like: fx.Node, chance: float) -> fx.Node:
    """What a step draws with this chance, of the type and sizes of `like`: a node of a graph without the loop."""
    if drawn.node.target is F.alpha_dropout:
        return graph.call_function(torch.bernoulli, (like, 1 - chance))
    if drawn.node.target not in DROPS:
        return graph.call_function(torch.bernoulli, (like, chance))
    if chance == 1:  # all is dropped, and nothing is drawn
        return graph.call_function(torch.zeros_like, (like,), {"dtype": torch.bool})
    made = graph.call_function(torch.native_dropout, (like, chance, True))
    return graph.call_function(operator.getitem, (made, 1))
