"""Random numbers in graphs that are split in two: what the backward graph computes again must draw the same ones.

Torch saves the generator's state before each op that may draw and is computed again (activation checkpointing), and
wraps the op in a higher-order one, whose results are nested. Here the ops stay what they are: one that draws nothing,
as attention without dropout, needs no state; the state of the others is a value of its own."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from .saved import must_recompute

aten = torch.ops.aten
CHANCE = "dropout_p"
"""The argument of attention ops that says how likely an element is dropped: nothing is drawn where it is 0."""


def draws_nothing(node: fx.Node) -> bool:
    """Whether a node calls an op that may draw random numbers, but does not with these arguments."""
    return may_draw(node.target) and has_no_chance(node.target, node.args, node.kwargs)


def may_draw(function: object) -> bool:
    """Whether torch says of an op that it may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())


def has_no_chance(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a function is an op that drops elements by a chance, which is 0 with these arguments."""
    for place, argument in enumerate(function._schema.arguments if isinstance(function, OpOverload) else ()):
        if argument.name == CHANCE:
            given = args[place] if place < len(args) else kwargs.get(CHANCE)
            return bool((argument.default_value if given is None else given) == 0)
    return False


@contextmanager
def without_idle_draws(joint: fx.GraphModule) -> Generator[Callable[[fx.GraphModule], None]]:
    """Within it, ops of `joint` that draw nothing do not look as if they did. What is handed out undoes that in a graph
    made of it."""
    hidden: dict[OpOverload, Callable[..., object]] = {}
    shown: dict[object, OpOverload] = {}

    def plain(op: OpOverload) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            return op(*args, **kwargs)

        shown[run] = op
        return run

    def show(gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.target in shown:
                node.target = shown[node.target]
        gm.recompile()

    for node in joint.graph.nodes:
        if must_recompute(node) and draws_nothing(node):
            op = node.target
            if op not in hidden:
                hidden[op] = plain(op)
            node.target = hidden[op]
    try:
        yield show
    finally:
        show(joint)


def dropped_by_masks(joint: fx.GraphModule) -> None:
    """Dropout as a product: out = x * mask * 1 / (1 - p), as torch's own kernels compute it, of the mask alone that the
    op drew. Then the backward pass needs to be left the mask, which is a byte an element, and not the result too."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, chance, training = node.args
        items = {u.args[1]: u for u in node.users if u.target is operator.getitem}
        out, val = items.get(0), node.meta.get("val")
        if not training or not isinstance(chance, float) or not 0 < chance < 1 or out is None or val is None:
            continue
        assert isinstance(x, fx.Node)
        with graph.inserting_after(node):
            mask = items.get(1) or graph.call_function(operator.getitem, (node, 1))
        mask.meta = {**out.meta, "val": val[1], "tensor_meta": None}
        with graph.inserting_after(mask):
            masked = graph.call_function(aten.mul.Tensor, (x, mask))
        with graph.inserting_after(masked):
            scaled = graph.call_function(aten.mul.Tensor, (masked, 1 / (1 - chance)))
        masked.meta, scaled.meta = dict(out.meta), dict(out.meta)
        out.replace_all_uses_with(scaled)
        graph.erase_node(out)
    joint.recompile()


def save_states_apart(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """The state before a draw is read by a call of its own, so that the op is like any other; what runs with such a
    state in the backward graph gets the type of its result."""
    for node in forward.graph.find_nodes(op="call_function", target=run_and_save_rng_state):
        _apart(node)
    forward.recompile()
    for node in backward.graph.find_nodes(op="call_function", target=run_with_rng_state):
        _, op, *args = (a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args)
        kwargs = {k: a.meta["val"] if isinstance(a, fx.Node) else a for k, a in node.kwargs.items()}
        mode = detect_fake_mode(args)
        if mode is not None and callable(op):
            with mode:
                node.meta["val"] = op(*args, **kwargs)


def _apart(node: fx.Node) -> None:
    op, *args = node.args
    assert callable(op)
    with node.graph.inserting_before(node):
        state = node.graph.call_function(torch.get_rng_state)
        drawn = node.graph.call_function(op, tuple(args), dict(node.kwargs))
    for item in list(node.users):
        assert item.target is operator.getitem
        new = drawn if item.args[1] else state
        new.meta = item.meta
        item.replace_all_uses_with(new)
        node.graph.erase_node(item)
    node.graph.erase_node(node)
