"""A name of a class that others may use stands in one module, or the lists below say where else and why."""

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
    "Compiled": ("cli.work pipeline.compiler", "what the command line sees of it"),
    "Phase": ("cli.work pipeline.phases", "what the command line sees of it"),
    "Trace": ("cli.work pipeline.trace", "what the command line sees of it"),
    "Split": ("capture.onnx.split runtime.call.graph_breaks", "what the runtime sees of it"),
    "Runs": ("runtime.call.exported runtime.call.fast_path", "each says what it needs of what runs"),
    "Evaluator": ("interp.evaluate lower.evaluate", "expressions to arrays, and to statements"),
    "Loop": ("ir.graph ir.program.statements", "steps of a graph, and of a program"),
    "Buffer": ("ir.program.statements plan.data", "memory of a program, and of a plan"),
    "Ratio": ("capture.onnx.values.ratio ir.ops.upsample", "a quotient of sizes, in torch's numbers and in ours"),
}  # fmt: skip
"""Names that stand for one role in several modules, which are all of them, and why."""

STILL_SHARED: Mapping[str, str] = {
    "Builder": "ir.builder pipeline.build",
    "Built": "measure runtime.call.exported runtime.cuda.build",
    "Call": "capture.aten.registry plan.data",
    "Candidate": "bisection.states partition.candidates",
    "Case": "analysis.value.cases cli.reproduction",
    "Known": "library.offers.offer lower.plan",
    "Launch": "ir.schedule plan.data",
    "Made": "pipeline.loops pipeline.state",
    "Operand": "ir.graph library.recognise",
    "Parts": "partition.kernel_ops rewrite.split.parts",
    "Piece": "analysis.dependence.axis_access analysis.loop_segments runtime.call.graph_breaks",
    "Place": "emit.cpp.scope ir.program.statements pipeline.place runtime.own.form",
    "Places": "emit.triton.addresses runtime.loops.native",
    "Prepared": "measure runtime.own.native",
    "Products": "runtime.own.product schedule.gpu.matmul",
    "Properties": "analysis.dependence.properties runtime.cuda.device",
    "Record": "cli.work runtime.plan.launch tuning.load",
    "Recorder": "capture.autograd.joint pipeline.trace runtime.loops.cuda_graph",
    "Refused": "pipeline.build rewrite.algebra.search",
    "Region": "analysis.value.constant_regions partition.regions runtime.call.fallback",
    "Request": "cli.request pipeline.state",
    "Routine": "ir.graph library.recognise runtime.own.form",
    "Run": "ir.selection library.epilogue pipeline.build",
    "Segment": "analysis.loop_segments capture.onnx.split plan.data runtime.call.graph_breaks",
    "Source": "capture.onnx.proto emit.source",
    "Stage": "capture.placement.sides runtime.cpu.native_steps",
    "State": "pipeline.state runtime.cpu.native_steps",
    "Store": "ir.program.statements runtime.store.cache",
    "Trial": "cli.check pipeline.trial",
    "Unit": "emit.cpp.scope runtime.plan.launch",
    "Way": "pipeline.replay_trial runtime.call.model runtime.own.form",
    "Window": "ir.ops.pool runtime.own.conv_window",
    "Entry": "capture.aten.registry cli.explain runtime.store.listing",
    "Form": "ir.form runtime.own.form",
    "Graph": "cli.work ir.graph",
    "Owner": "runtime.own.attention runtime.own.form",
    "Table": "runtime.plan.launch runtime.plan.reading",
}
"""Names that stand for different things in several modules, which are all of them. To be renamed: none
is to be added."""


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
    allowed = {name: modules for name, (modules, _) in SAME_ROLE.items()} | dict(STILL_SHARED)
    assert shared_names(read_package()) == {name: modules.split() for name, modules in allowed.items()}
    assert not SAME_ROLE.keys() & STILL_SHARED.keys()
