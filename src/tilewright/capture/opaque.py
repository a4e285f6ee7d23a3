"""Values that only pass through a captured graph: neither tensors nor numbers, such as the mesh of tensors that are
spread over processes or the ragged size of a jagged tensor, which is a name and has no value. Torch lifts them into a
graph's inputs and hands them back among its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, fx

Runner = Callable[[list[object]], list[object]]
"""Runs a built graph: flat arguments in (the list is emptied), flat results out."""


class Build(Protocol):
    """Compiles one functional graph. `kind` is inference, forward or backward; `frozen` are placeholders by name."""

    def __call__(self, gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        """The runner of `gm`; it takes the arguments that are not frozen."""
        ...


def around_opaque(build: Build) -> Build:
    """`build` for graphs through which such values pass: what it builds never sees them. A graph that computes with one
    is left as it is."""

    def one(gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        opaque = _opaque(gm)
        if not opaque or any(user.op != "output" for node in opaque for user in node.users):
            return build(gm, kind, frozen)
        live = [n for n in gm.graph.nodes if n.op == "placeholder" and n.name not in frozen]
        taken = [k for k, n in enumerate(live) if n in opaque]
        number = {live[k]: place for place, k in enumerate(taken)}
        passed_on = [
            (k, number[a]) for k, a in enumerate(returned(gm)) if isinstance(a, fx.Node) and a in number
        ]
        return _passing(build(_without(gm, opaque), kind, frozen), taken, passed_on)

    return one


def _passing(runner: Runner, taken: Sequence[int], returned: Sequence[tuple[int, int]]) -> Runner:
    """`runner` on what is left of the arguments; `returned` pairs numbers of results with what was `taken`."""
    last_first = tuple(reversed(taken))

    def run(args: list[object]) -> list[object]:
        held = [args.pop(k) for k in last_first][::-1]
        results = list(runner(args))
        args.clear()
        for k, place in returned:
            results[k] = held[place]
        return results

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]  (torch's sign that the list may be emptied)
    return run


def _opaque(gm: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of what is no tensor and no number."""
    return [n for n in gm.graph.find_nodes(op="placeholder") if not _plain(n.meta.get("val"))]


def _plain(value: object) -> bool:
    if isinstance(value, torch.SymInt):
        return not value.node.is_nested_int()
    return value is None or isinstance(value, (Tensor, bool, int, float, torch.SymFloat, torch.SymBool))


def returned(gm: fx.GraphModule) -> Sequence[object]:
    """What a graph returns: nodes, or what is no node."""
    (found,) = next(n for n in gm.graph.nodes if n.op == "output").args
    return found if isinstance(found, (list, tuple)) else (found,)


def _without(gm: fx.GraphModule, opaque: Sequence[fx.Node]) -> fx.GraphModule:
    """The graph without these placeholders; None stands for them among the results."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        if node.op == "output":
            results = [made.get(a) if isinstance(a, fx.Node) else a for a in returned(gm)]
            ended = graph.output(tuple(results))  # pyright: ignore[reportArgumentType]  (as torch had them)
            ended.meta.update(node.meta)
        elif node not in opaque:
            made[node] = graph.node_copy(node, made.__getitem__)
    return fx.GraphModule(gm, graph)
