"""Writes an artifact: one or several graphs of a compiled model, for this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.artifact.file import container, seals
from tilewright.artifact.file.container import Parts, SectionKind
from tilewright.artifact.text.captured import write_captured
from tilewright.artifact.text.gpu_kernels import write_gpu_unit
from tilewright.artifact.text.program import Interface, write_interface, write_plan
from tilewright.artifact.text.reports import write_reports
from tilewright.artifact.text.tensors import TensorWriter
from tilewright.errors import UnsupportedError
from tilewright.ir.text.values import Json
from tilewright.options import Options
from tilewright.pipeline.compiler import Compiled
from tilewright.pipeline.state import CapturedProgram
from tilewright.runtime.call.kept_weights import NamedWeight
from tilewright.runtime.cpu.kernels import NativeUnit
from tilewright.runtime.cuda.kernels import CudaUnit
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.launch import BuiltUnit
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.target import Target

from . import machine
from .loops import LoopWriter
from .targets import TargetCode, code_for, device_of, own_target, targets_named


@dataclass(frozen=True, slots=True, eq=False)
class SavedGraph:
    """One graph to save: how it is called, and what it was compiled to."""

    interface: Interface
    compiled: Compiled


def save(
    path: Path, title: str, graphs: Sequence[SavedGraph], *, beside: bool = False, names: Sequence[str] = (),
    weights: Sequence[NamedWeight] = (),
) -> None:  # fmt: skip
    """Write an artifact with code for the machines of these `names`; none: for the one that the model was compiled for.
    With `beside`, weights go to a safetensors file of the same name. `weights` are listed where they lie in the file
    as they are. Raises UnsupportedError for what cannot be kept,
    and names it, and InputError where the file cannot be written."""
    apart = path.with_suffix(".safetensors") if beside else None
    container.check_place(path, apart)
    made = [_checked(g.compiled) for g in graphs]
    options, own = made[0][1].options, own_target(made[0][0].plan)
    parts = Parts()
    tensors = TensorWriter(parts)
    for k, (graph, (_, captured)) in enumerate(zip(graphs, made, strict=True)):
        parts.text(f"g{k}.call", write_interface(graph.interface, tensors))
        parts.text(f"g{k}.graph", write_captured(captured, tensors))
    targets: list[Json] = []
    for number, target in enumerate(targets_named(names, own)):
        codes = [
            code_for(g.compiled, captured, target) for g, (_, captured) in zip(graphs, made, strict=True)
        ]
        targets.append(
            _target(target, codes, "" if not number else f".{target.name}", parts, tensors, options)
        )
    parts.text("weights", _named(weights, tensors))
    parts.text("tensors", tensors.rows)
    facts: dict[str, Json] = {
        "title": title,
        "made": machine.versions(),
        "options": _options(options),
        "graphs": [f"g{k}" for k in range(len(graphs))],
        "captured": device_of(own),
        "targets": targets,
    }
    container.write(path, facts, parts, lambda head: seals.seal(head, options), beside=apart)


def _named(weights: Sequence[NamedWeight], tensors: TensorWriter) -> Json:
    rows: list[Json] = []
    for w in weights:
        place = tensors.known(w.tensor)
        if place is not None:
            rows.append([w.name, place, w.is_parameter, w.written])
    return rows


def _checked(compiled: Compiled) -> tuple[Executable, CapturedProgram]:
    """What runs a graph, and what it was compiled from. Raises UnsupportedError where an artifact cannot have it."""
    executable, made = compiled.executable, compiled.compilation
    what = ""
    if made.kind != "inference":
        what = f"a {made.kind} graph of training"
    elif not isinstance(executable, Executable) or made.captured is None:
        what = "a graph that runs as it was captured"
    if what or not isinstance(executable, Executable) or made.captured is None:
        raise UnsupportedError(
            f"{what} cannot be kept in an artifact yet",
            phase="save",
            hint="compile it for inference",
        )
    return executable, made.captured


def _target(
    target: Target, codes: Sequence[TargetCode], suffix: str, parts: Parts, tensors: TensorWriter, options: Options
) -> Json:  # fmt: skip
    """What the header says of one machine; its code becomes sections."""
    rows: list[Json] = []
    for k, code in enumerate(codes):
        name = f"g{k}"
        text = f"{name}.plan.{target.name}"
        loops = LoopWriter(parts, tensors, text)
        parts.text(text, write_plan(code.plan, code.constants, tensors, loops.keep))
        parts.text(f"{name}.report{suffix}", write_reports(code.told, parts, f"{name}{suffix}"))
        rows.append({"name": name, "unit": _unit(code.unit, parts, f"{name}.unit{suffix}")})
    natives = machine.libraries(target, options, ContentStore(default_root(options)))
    libraries: dict[str, Json] = {
        identity: parts.add(SectionKind.LIBRARY, f"native{suffix}.{k}", library.read_bytes())
        for k, (identity, library) in enumerate(natives.items())
    }
    return {"facts": machine.facts_of(target), "graphs": rows, "libraries": libraries}


def _unit(unit: BuiltUnit | None, parts: Parts, name: str) -> Json:
    """The section of the built kernels; None if there are none."""
    if unit is None:
        return None
    if isinstance(unit, CudaUnit):
        parts.text(name, write_gpu_unit(unit, parts, name))
        return name
    if not isinstance(unit, NativeUnit):
        raise UnsupportedError(
            "kernels of this kind cannot be kept yet", phase="save", op=type(unit).__name__,
            hint="compile the model where it runs (warm caches make that quick)",
        )  # fmt: skip
    return parts.add(SectionKind.LIBRARY, name, unit.path.read_bytes())


def _options(options: Options) -> Json:
    """Options by name, but for those that name places on this machine."""
    left_out = ("cache", "cache_dir", "tuning_file", "compiler", "verify")
    return {name: value for name, value in dataclasses.asdict(options).items() if name not in left_out}
