"""The machines that an artifact has code for: the one that the model was compiled for, and others that are named.

Code for another machine is made of the captured graph, without that machine: nothing is timed, and library calls keep
their usual forms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tilewright.errors import InputError, TilewrightError, UnsupportedError
from tilewright.ir.graph import LibraryCall, Op
from tilewright.ir.text.values import op_name
from tilewright.pipeline.backends.cuda import as_allowed
from tilewright.pipeline.compiler import Compiled, plan_graph
from tilewright.pipeline.state import CapturedProgram
from tilewright.plan.data import CallStep, Plan
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.cuda.device import gpu_target
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.launch import BuiltUnit
from tilewright.target import PRESETS, Target, preset

from . import machine
from .loops import loop_on_gpu
from .text.reports import SavedStep

_ONE_KIND: Mapping[str, re.Pattern[str]] = {
    "cpu": re.compile(r"cudnn|miopen|_(flash|efficient)_attention(?!_for_cpu)"),
    "cuda": re.compile(r"_for_cpu|mkldnn|onednn|\bmkl|fbgemm"),
}
"""Names of ops that are not on this kind of device: torch tells it only where it is built for both."""


@dataclass(frozen=True, slots=True, eq=False)
class TargetCode:
    """One graph, compiled for one machine; `told` are its reports."""

    plan: Plan
    constants: Sequence[Tensor]
    unit: BuiltUnit | None
    told: SavedStep


def device_of(target: Target) -> str:
    """The kind of device that a machine is to torch."""
    return target.backend or "cpu"


def own_target(plan: Plan) -> Target:
    """The machine that a plan of this process is for."""
    device = torch.device(plan.device)
    return host_target() if device.type == "cpu" else gpu_target(device.index or 0)


def targets_named(names: Sequence[str], own: Target) -> list[Target]:
    """The machines of these names, each once; `own` alone without any. Raises InputError for a name that is none, and
    UnsupportedError for a machine that no code can be kept for here."""
    return [_named(name, own) for name in dict.fromkeys(names)] or [own]


def _named(name: str, own: Target) -> Target:
    kept = [t.name for t in PRESETS.values() if t.backend == "cuda" or t.name.startswith(("x86", "aarch"))]
    host = host_target()
    if name in (own.name, host.name):
        return own if name == own.name else host
    if name not in kept:
        raise InputError(
            f"there is no target {name!r}", phase="save", hint=f"one of {', '.join(sorted(kept))}"
        )
    found = preset(name)
    if found.backend == "cuda":
        return found
    if not machine.runs(name, host.name):
        raise UnsupportedError(
            f"code for {name} cannot be made on {host.name}: weights are packed by running it", phase="save",
            hint=f"save the model on {name}",
        )  # fmt: skip
    return found.resized(cores=host.cores)


def code_for(compiled: Compiled, captured: CapturedProgram, target: Target) -> TargetCode:
    """A graph for a machine: as it was compiled if it was for that one, else compiled for it now."""
    executable = compiled.executable
    assert isinstance(executable, Executable)
    if target.name == own_target(executable.plan).name:
        return TargetCode(executable.plan, executable.constants, executable.unit, compiled)
    device = device_of(target)
    loops = [op.call.name for op in captured.graph.ops if op.call is not None and op.call.loop is not None]
    if loops and device != "cpu":
        raise loop_on_gpu(loops[0])
    try:
        made = plan_graph(
            _on(captured, device), "cpu" if device == "cpu" else f"{device}:0",
            as_allowed(target, captured.options),
        )  # fmt: skip
    except TilewrightError as error:
        error.place = error.place or f"target {target.name}"
        raise
    _check_calls(made.plan, device, target.name)
    held = [t for t in made.cover.graph.constants.values() if isinstance(t, Tensor)]
    return TargetCode(made.plan, held, made.unit, made)


def _check_calls(plan: Plan, device: str, target: str) -> None:
    """Raise UnsupportedError where a plan calls what is not on its kind of device."""
    for segment in plan.segments:
        for step in segment.steps:
            if not isinstance(step, CallStep):
                continue
            name = op_name(step.call.function) or step.call.name  # a routine has the name of what it calls
            if _ONE_KIND[device].search(name):
                raise UnsupportedError(
                    f"the model calls {name}, which {target} does not have", phase="save", op=name,
                    hint="compile and save the model where such a device is",
                )  # fmt: skip


def _on(captured: CapturedProgram, device: str) -> CapturedProgram:
    """The same program on a kind of device: what names a device names that one."""
    there = torch.device(device) if device == "cpu" else torch.device(device, 0)

    def place(x: Any) -> Any:
        return there if isinstance(x, torch.device) else x

    def moved(call: LibraryCall) -> LibraryCall:
        spare = call.spare
        return replace(
            call, args=tree_map(place, call.args), kwargs=tree_map(place, call.kwargs),
            spare=moved(spare) if isinstance(spare, LibraryCall) else spare,
        )  # fmt: skip

    def op_there(op: Op) -> Op:
        return op if op.call is None else replace(op, call=moved(op.call))

    graph = captured.graph
    return replace(captured, graph=replace(graph, ops=tuple(map(op_there, graph.ops))))
