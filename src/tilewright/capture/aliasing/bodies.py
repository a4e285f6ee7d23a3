"""Branches and steps of loops: they may not leave what they were given, which dropout that drops nothing does."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from tilewright.capture.loops.unrolled import val_of

aten = torch.ops.aten

_DROPOUT = (
    torch.nn.functional.dropout, torch.dropout, torch.dropout_, aten.dropout.default, aten.dropout_.default
)  # fmt: skip
_HIGHER = tuple(
    getattr(torch.ops.higher_order, name)
    for name in ("cond", "while_loop", "scan", "associative_scan", "map_impl")
)


def bodies_with_dropout(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """The bodies of the branches and loops of a graph, at any depth, that hold a dropout."""
    found: list[fx.GraphModule] = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in _HIGHER:
            continue
        held = [str(x.target) for x in node.all_input_nodes if x.op == "get_attr"]
        for body in [x for name in held if isinstance(x := getattr(gm, name, None), fx.GraphModule)]:
            if any(n.op == "call_function" and n.target in _DROPOUT for n in body.graph.nodes):
                found.append(body)
            found += bodies_with_dropout(body)
    return found


def copy_what_bodies_leave(gm: fx.GraphModule) -> None:
    """Let those bodies of a graph leave copies."""
    for body in bodies_with_dropout(gm):
        output = body.graph.output_node()
        for left in output.all_input_nodes:
            if isinstance(val_of(left), Tensor):
                with body.graph.inserting_before(output):
                    copied = body.graph.call_function(aten.clone.default, (left,))
                copied.meta = dict(left.meta)
                output.replace_input_with(left, copied)
        body.recompile()


def with_copies_of_what_bodies_leave(program: ExportedProgram) -> ExportedProgram:
    """The same program, with copies left by those bodies of its graph."""
    if not bodies_with_dropout(program.graph_module):
        return program
    gm = copy.deepcopy(program.graph_module)
    copy_what_bodies_leave(gm)
    return program._update(gm, program.graph_signature)  # pyright: ignore[reportPrivateUsage]
