"""Python loops of exported programs: torch writes them out step by step, in ops of its registry."""

# What torch keeps of calls it names with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import torch
from torch import fx

from tilewright.capture.loops.rolled import roll_loops

from .registry import as_programs_do


def rolled_module(program: torch.export.ExportedProgram) -> fx.GraphModule | None:
    """The program as a module with a loop in the place of each of its long runs of equal steps; None if it has none."""
    module = program.module(check_guards=False)
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    as_programs_do(module)
    made = roll_loops(module)
    if made is module:
        return None
    made.graph.set_codegen(module.graph._codegen)  # arguments and results nest as they did
    made.recompile()
    return made
