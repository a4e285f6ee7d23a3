"""What runs an opened op, in one step of a loop: its results, and its own gradients where these are asked for."""

# Torch's types of functions with gradients are not complete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx


class Differentiated(torch.nn.Module):
    """A function of `operands` tensors, and of numbers without dims behind them, with `results`. `joint` makes the
    results and the gradients of the operands, of operands, gradients of the results, and numbers."""

    def __init__(self, joint: fx.GraphModule, operands: int, results: int, *, single: bool) -> None:
        super().__init__()
        self.operands, self.results, self.single = operands, results, single
        self.onward, self.back = _split(joint, operands, results)
        gradients = next(n for n in self.back.graph.nodes if n.op == "output").args[0]
        self.reached = {k for k, x in enumerate(gradients) if x is not None}
        """The operands that get a gradient."""

    def forward(self, *given: Any) -> Any:
        """The results."""
        given = tuple(x if k in self.reached else x.detach() for k, x in enumerate(given))
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        # results of such a function may not be written to through views: copies may
        results = [x.clone() for x in _Opened.apply(self, *given)] if trains else self.onward.forward(*given)
        made = results[: self.results]
        return made[0] if self.single else tuple(made)


class _Opened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Differentiated, *given: Tensor) -> tuple[Tensor, ...]:
        made = op.onward.forward(*given)
        results = tuple(made[: op.results])
        ctx.op, ctx.given = op, len(given)
        ctx.save_for_backward(*made[op.results :])
        ctx.mark_non_differentiable(*(x for x in results if not (x.is_floating_point() or x.is_complex())))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = ctx.op.back.forward(*ctx.saved_tensors, *gradients)
        return (None, *made, *(None for _ in range(ctx.given - len(made))))


def _split(joint: fx.GraphModule, operands: int, results: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What makes the results and what the other one saves; and what makes the gradients of the operands."""
    nodes = list(joint.graph.nodes)
    given = [n for n in nodes if n.op == "placeholder"]
    tangents = given[operands : operands + results]
    outputs: Sequence[object] = tuple(nodes[-1].args[0])
    behind = set(tangents)
    for n in nodes[:-1]:
        if behind & {*n.all_input_nodes}:
            behind.add(n)
    gradients = outputs[results:]
    read = {i: None for n in nodes[:-1] if n in behind for i in n.all_input_nodes if i not in behind}
    saved = [*(read | {n: None for n in gradients if isinstance(n, fx.Node) and n not in behind})]
    first = [n for n in given if n not in tangents]
    inner = [n for n in nodes[:-1] if n.op != "placeholder"]
    onward = _graph_of(joint, first, [n for n in inner if n not in behind], (*outputs[:results], *saved))
    back = _graph_of(joint, [*saved, *tangents], [n for n in inner if n in behind], gradients)
    return onward, back


def _graph_of(
    root: fx.GraphModule, given: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[object]
) -> fx.GraphModule:
    graph = fx.Graph()
    made = {n: graph.placeholder(f"given_{k}") for k, n in enumerate(given)}
    for n in nodes:
        made[n] = graph.node_copy(n, made.__getitem__)
    graph.output(tuple(made[n] if isinstance(n, fx.Node) else None for n in outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule(root, graph)
