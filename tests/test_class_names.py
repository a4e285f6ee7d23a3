"""A name of a class that others may use stands in one module, or the list below says where else and why."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tests.support.layers import Sources, parsed, read_package

SAME_ROLE: Mapping[str, tuple[str, str]] = {
    "Body": ("emit.cpp.statements emit.triton.statements", "each printer has one"),
    "Expressions": ("emit.cpp.expr emit.triton.expr", "each printer has one"),
    "Helpers": ("emit.cpp.reduce emit.triton.helpers", "each printer has one"),
    "Lines": ("emit.cpp.scope emit.triton.scope", "each printer has one"),
    "Scope": ("emit.cpp.scope emit.triton.scope", "each printer has one"),
    "Compiled": ("pipeline.compiler report.records", "what a report sees of it"),
    "Phase": ("pipeline.phases report.records", "what a report sees of it"),
    "Trace": ("pipeline.trace report.records", "what a report sees of it"),
    "ModelSegment": ("capture.onnx.split runtime.call.graph_breaks", "what the runtime sees of it"),
    "Split": ("capture.onnx.split runtime.call.graph_breaks", "what the runtime sees of it"),
    "Runs": ("runtime.call.fast_path runtime.plan.call_form", "each says what it needs of what runs"),
    "Evaluator": ("interp.evaluate lower.evaluate", "expressions to arrays, and to statements"),
    "Loop": ("ir.graph ir.program.statements", "steps of a graph, and of a program"),
    "Buffer": ("ir.program.statements plan.data", "memory of a program, and of a plan"),
    "Ratio": ("capture.onnx.values.ratio ir.ops.upsample", "a quotient of sizes, in torch's numbers and in ours"),
}  # fmt: skip
"""Names that stand for one role in several modules, which are all of them, and why."""


def shared_names(sources: Sources) -> dict[str, list[str]]:
    """The names of classes, but those that modules keep for themselves, that stand in several modules; which ones."""
    found: dict[str, set[str]] = {}
    for module, text in sources.items():
        for node in ast.walk(parsed(text, module)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(module)
    return {name: sorted(modules) for name, modules in found.items() if len(modules) > 1}


def test_shared_names_are_found() -> None:
    one, two = (
        "class Same: ...\nclass _Own: ...",
        "if True:\n    class Same: ...\nclass _Own: ...\nclass Other: ...",
    )
    assert shared_names({"a": one, "b.c": two}) == {"Same": ["a", "b.c"]}


def test_a_name_stands_for_one_class() -> None:
    allowed = {name: modules.split() for name, (modules, _) in SAME_ROLE.items()}
    assert shared_names(read_package()) == allowed
