"""Writes an artifact: one or several graphs of a compiled model, for this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.artifact.file import container, seals
from tilewright.artifact.file.container import Parts, SectionKind
from tilewright.artifact.text.captured import write_captured
from tilewright.artifact.text.program import Interface, write_interface, write_plan
from tilewright.artifact.text.reports import write_reports
from tilewright.artifact.text.tensors import TensorWriter
from tilewright.errors import UnsupportedError
from tilewright.ir.text.values import Json
from tilewright.options import Options
from tilewright.pipeline.compiler import Compiled
from tilewright.pipeline.state import CapturedProgram
from tilewright.runtime.cpu.kernels import NativeUnit
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.store.cache import ContentStore, default_root

from . import machine


@dataclass(frozen=True, slots=True, eq=False)
class SavedGraph:
    """One graph to save: how it is called, and what it was compiled to."""

    interface: Interface
    compiled: Compiled


def save(path: Path, title: str, graphs: Sequence[SavedGraph], *, beside: bool = False) -> None:
    """Write an artifact. With `beside`, weights go to a safetensors file of the same name. Raises UnsupportedError for
    what cannot be kept, and names it, and InputError where the file cannot be written."""
    made = [_checked(g.compiled) for g in graphs]
    options, target = made[0][1].options, host_target()
    store = ContentStore(default_root(options))
    parts = Parts()
    tensors = TensorWriter(parts)
    rows: list[Json] = []
    for k, (graph, (executable, captured)) in enumerate(zip(graphs, made, strict=True)):
        name = f"g{k}"
        parts.text(f"{name}.call", write_interface(graph.interface, tensors))
        parts.text(f"{name}.plan.{target.name}", write_plan(executable.plan, executable.constants, tensors))
        parts.text(f"{name}.graph", write_captured(captured, tensors))
        parts.text(f"{name}.report", write_reports(graph.compiled, parts, name))
        rows.append({"name": name, "unit": _unit(executable, parts, name)})
    natives = machine.libraries(target.compiler_flags, options, store)
    libraries: dict[str, Json] = {
        identity: parts.add(SectionKind.LIBRARY, f"native.{k}", library.read_bytes())
        for k, (identity, library) in enumerate(natives.items())
    }
    parts.text("tensors", tensors.rows)
    facts: dict[str, Json] = {
        "title": title,
        "made": machine.versions(),
        "options": _options(options),
        "graphs": [str(row["name"]) for row in rows if isinstance(row, Mapping)],
        "targets": [{"facts": machine.facts_of(target), "graphs": rows, "libraries": libraries}],
    }
    weights = path.with_suffix(".safetensors") if beside else None
    container.write(path, facts, parts, lambda head: seals.seal(head, options), beside=weights)


def _checked(compiled: Compiled) -> tuple[Executable, CapturedProgram]:
    """What runs a graph, and what it was compiled from. Raises UnsupportedError where an artifact cannot have it."""
    executable, made = compiled.executable, compiled.compilation
    what = ""
    if made.kind != "inference":
        what = f"a {made.kind} graph of training"
    elif type(executable) is not Executable or made.captured is None:
        what = "a graph that runs as it was captured" if made.captured is None else "a graph on a GPU"
    elif executable.plan.device != "cpu":
        what = f"a graph on {executable.plan.device}"
    if what or not isinstance(executable, Executable) or made.captured is None:
        raise UnsupportedError(
            f"{what} cannot be kept in an artifact yet",
            phase="save",
            hint="compile it for inference on the CPU",
        )
    return executable, made.captured


def _unit(executable: Executable, parts: Parts, name: str) -> Json:
    """The section of the built kernels; None if there are none."""
    unit = executable.unit
    if unit is None:
        return None
    if not isinstance(unit, NativeUnit):
        raise UnsupportedError(
            "kernels of this kind cannot be kept yet", phase="save", op=type(unit).__name__
        )
    return parts.add(SectionKind.LIBRARY, f"{name}.unit", unit.path.read_bytes())


def _options(options: Options) -> Json:
    """Options by name, but for those that name places on this machine."""
    left_out = ("cache", "cache_dir", "tuning_file", "compiler", "verify")
    return {name: value for name, value in dataclasses.asdict(options).items() if name not in left_out}
