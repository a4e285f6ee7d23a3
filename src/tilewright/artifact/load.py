"""Reads an artifact: runs its plan as it is where its code is trusted and for this machine, else builds it again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from tilewright.artifact.file import container, seals
from tilewright.artifact.file.container import Container, SectionKind
from tilewright.artifact.file.strict_json import damaged
from tilewright.artifact.text.gpu_kernels import read_gpu_unit
from tilewright.artifact.text.program import read_interface, read_plan
from tilewright.artifact.text.reports import read_reports
from tilewright.artifact.text.routines import Routines
from tilewright.artifact.text.tensors import TensorReader, read_weights
from tilewright.errors import ArtifactError, BuildError, InputError, names_keywords, shown, warn
from tilewright.ir.text.values import Json
from tilewright.options import Options
from tilewright.pipeline.trace import PhaseRecorder
from tilewright.plan.data import Launches, Plan
from tilewright.runtime.call.asked import asking, reading
from tilewright.runtime.call.kept_weights import KeptWeights
from tilewright.runtime.call.module import CompiledModule
from tilewright.runtime.cpu.kernels import NativeUnit
from tilewright.runtime.cpu.native_plan import join
from tilewright.runtime.cpu.toolchain import LIBRARY, give_library, host_target, is_given, usable_cores
from tilewright.runtime.cuda import driver
from tilewright.runtime.cuda.executable import CudaExecutable
from tilewright.runtime.cuda.graph import Graphs
from tilewright.runtime.loops.native import loop_function
from tilewright.runtime.own.product import ProductCalls
from tilewright.runtime.plan.call_form import ProgramCall
from tilewright.runtime.plan.executable import TRUSTED, Executable, Guards
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.target import Target, preset
from tilewright.tuning.text_limits import TEXTS

from . import machine
from .loops import LoopReader
from .way import LoadedGraph, LoadedWay

if TYPE_CHECKING:
    from tilewright.pipeline.state import CapturedProgram


@names_keywords
def load(
    path: str | os.PathLike[str],
    *,
    trust: bool = False,
    rebuild: bool = True,
    device: str | None = None,
    options: Options | None = None,
) -> CompiledModule:
    """The model that `tilewright.save` kept. Its machine code runs if this user made the file, or with `trust`, which
    lets whoever made it run code as you. Of several machines that it has code for, the first that fits this one is
    taken, on this kind of `device` ("cpu" or "cuda") if one is named. Else, or where it is for another machine or
    version, it is built again from the graph inside, with a warning; without `rebuild` that is an error.

    Raises ArtifactError for a file that is damaged or was changed, and for one that is neither run nor built again.
    """
    with asking(runs=False):
        return _loaded(Path(path), trust, rebuild, device, options or Options.make())


def _loaded(path: Path, trust: bool, rebuild: bool, device: str | None, given: Options) -> CompiledModule:
    """As `load` says."""
    run = PhaseRecorder()
    with reading():
        file = run("read", lambda: container.read(path), _nothing)
        facts = run("read", lambda: _Facts(file), _nothing)
        own = run("look at the seal", lambda: seals.is_ours(file, given), _nothing) or trust
        wanted = run("read", lambda: _merged(facts.options, given, file.place, trusted=own), _nothing)
        targets = [t for t in facts.targets if device in (None, t.device)]
        if not targets:
            raise InputError(
                f"it has no code for {device}", phase="load", place=file.place, hint=facts.origin
            )
        found = run("compare machines", lambda: _chosen(facts, targets, own, given), _nothing)
    chosen, refused, hint = found
    if chosen is not None:
        way = run("read", lambda: _Loader(file, facts, chosen, wanted, run), _nothing).way()
        return run("bind", lambda: _module(way), _nothing)
    if not rebuild:
        raise ArtifactError(refused, place=file.place, hint=hint)
    why = shown(refused, TEXTS.max_message_characters)
    warn(f"{file.place} is built again from the graph inside: {why} ({hint})", RuntimeWarning)
    with reading():
        from .rebuild import rebuilt
    return _module(rebuilt(file, facts, wanted, trusted=own))


def _module(way: LoadedWay) -> CompiledModule:
    """What users hold."""
    return CompiledModule(way, KeptWeights(way.weights, way.device))


def _chosen(
    facts: _Facts, targets: Sequence[_TargetFacts], own: bool, given: Options
) -> tuple[_TargetFacts | None, str, str]:
    """The first machine whose code runs here; if there is none, why it does not run, and what to do."""
    if not own:
        return (
            None,
            "nobody vouches for the machine code in it",
            "load it with trust=True if you trust who made it",
        )
    if given.verify is True:
        return None, "the option `verify` holds kernels against the graph", "load it without the option"
    found: list[str] = []
    for target in targets:
        differs = machine.differences(facts.made, target.facts)
        if not differs:
            return target, "", ""
        found += differs
    return None, f"it was made for {'; '.join(dict.fromkeys(found))}", "make it again on this machine"


def _nothing(made: object) -> None:
    """What is kept of a phase's result."""
    del made


class _Facts:
    """What the header says, checked."""

    def __init__(self, file: Container) -> None:
        match file.facts:
            case {
                "title": str(title), "made": Mapping() as made, "options": Mapping() as options, "graphs": [*names],
                "captured": "cpu" | "cuda" as captured, "targets": [*targets],
            }:  # fmt: skip
                pass
            case _:
                raise damaged("its header has other facts", file.place)
        if not names or not targets:
            raise damaged("it has no graph", file.place)
        self.title = shown(title, TEXTS.max_place_characters)
        self.made, self.options, self.captured = made, options, str(captured)
        self.names = tuple(map(str, names))
        self.targets = [_TargetFacts(t, self.names, not k, file.place) for k, t in enumerate(targets)]
        by = f"tilewright {made.get('tilewright')} with torch {made.get('torch')}"
        machines = ", ".join(t.name for t in self.targets)
        self.origin = shown(f"made by {by} for {machines}", TEXTS.max_message_characters)


class _TargetFacts:
    """What the header says of one machine, checked."""

    def __init__(self, told: Json, names: Sequence[str], first: bool, place: str) -> None:
        match told:
            case {"facts": Mapping() as facts, "graphs": [*rows], "libraries": Mapping() as libraries}:
                pass
            case _:
                raise damaged("its header tells a target otherwise", place)
        if len(rows) != len(names):
            raise damaged("it has no graph", place)
        self.facts, self.libraries = facts, libraries
        self.rows: list[Mapping[str, Json]] = []
        for name, row in zip(names, rows, strict=True):
            match row:
                case {"name": str(told_name), "unit": None | str()} if told_name == name:
                    self.rows.append(row)
                case _:
                    raise damaged("its header tells a graph otherwise", place)
        self.name, self.device = str(facts.get("name")), str(facts.get("device", "cpu"))
        self.suffix = "" if first else f".{self.name}"


_OF_HERE = ("cache", "cache_dir", "tuning_file", "compiler", "verify")
"""Options of whoever loads."""
_OF_RESULTS = ("strict", "freeze", "round_intermediates", "trim", "contractions", "rules", "fusion", "tf32")
"""Options of what is computed, and how: all others spend time, memory and threads of whoever loads."""


def _merged(saved: Mapping[str, Json], here: Options, place: str, *, trusted: bool) -> Options:
    """The options of whoever saved, with the cache, the compiler and the checks of whoever loads. Of a file that is not
    `trusted`, only those that say what is computed."""
    mine = [f.name for f in fields(Options) if f.name in _OF_HERE or not (trusted or f.name in _OF_RESULTS)]
    try:
        return Options.make({**saved, **{name: getattr(here, name) for name in mine}})
    except InputError as bad:
        raise damaged(bad.message, place) from bad


class _Loader:
    """Makes what runs, of a file that is trusted."""

    def __init__(
        self, file: Container, facts: _Facts, target: _TargetFacts, options: Options, run: PhaseRecorder
    ) -> None:
        self.file, self.facts, self.target, self.options, self.run = file, facts, target, options, run
        self.store = ContentStore(default_root(options))
        self.device = None if target.device == "cpu" else torch.device(target.device, 0)
        self.tensors = TensorReader(file, file.text("tensors"), self.device)
        native = partial(loop_function, self.store, self.options)
        loops = LoopReader(file, self.tensors, lambda: self.routines, self._step, native)
        self.routines = Routines(self._own, None if self.device is not None else loops.read)

    def _own(self) -> ProductCalls:
        """For the machine that the artifact is for, which may be a narrower one than this."""
        flags = preset(self.target.name).compiler_flags
        return ProductCalls(replace(host_target(), compiler_flags=flags), self.store, self.options)

    def way(self) -> LoadedWay:
        """All graphs."""
        self.run("libraries", self._give_libraries, _nothing)
        try:
            graphs = [
                self._graph(str(row["name"]), cast("str | None", row["unit"])) for row in self.target.rows
            ]
        except (BuildError, ValueError, AttributeError, OSError) as bad:  # what loading a library raises
            raise damaged(f"its machine code does not load: {bad}", self.file.place) from bad
        way = LoadedWay(self.facts.title, graphs, f"{self.facts.origin}; its machine code runs")
        way.device = self.device
        place = f"{self.file.place}, section weights"
        told = self.file.text("weights")
        way.weights = self.run("weights", lambda: read_weights(told, self.tensors, place), _nothing)
        return way

    def _give_libraries(self) -> None:
        """Code that all plans for the machine share."""
        for identity, section in self.target.libraries.items():
            if not is_given(identity):
                give_library(identity, self._library(str(section)))

    def _graph(self, name: str, unit: str | None) -> LoadedGraph:
        file, place = self.file, f"{self.file.place}, graph {name}"
        interface = self.run(
            "calls",
            lambda: read_interface(file.text(f"{name}.call"), self.tensors, self.routines, place),
            _nothing,
        )
        text = f"{name}.plan.{self.target.name}"
        plan, constants = self.run(
            "plan",
            lambda: read_plan(file.text(text), self.tensors, self.routines, place, self.target.device),
            lambda made: made[0],
        )
        guards = Guards(False, interface.conditions)
        executable = self.run(
            "bind", lambda: self._executable(plan, constants, unit, guards, place), _nothing
        )
        call = self.run("bind", lambda: ProgramCall(interface.form, executable), _nothing)
        reports = partial(read_reports, file, f"{name}.report{self.target.suffix}")
        return LoadedGraph(interface, call, reports, partial(self._captured, name), self._machine(), self.run)

    def _machine(self) -> Target:
        """What it has code for, with the cores that are here."""
        made_for = preset(self.target.name)
        return made_for if self.device is not None else made_for.resized(cores=usable_cores())

    def _executable(
        self, plan: Plan, constants: tuple[Tensor, ...], unit: str | None, guards: Guards, place: str
    ) -> Executable:
        """What runs a plan on its device."""
        if self.device is not None:
            return self._on_gpu(plan, constants, unit, guards, place)
        built = None if unit is None else self.run("load", lambda: self._unit(unit), _nothing)
        _check_kernels(plan, 0 if built is None else built.kernels, place)
        native = partial(join, native=lambda: loop_function(self.store, self.options))
        return Executable(plan, constants, built, guards=guards, join=native)

    def _step(self, plan: Plan, constants: tuple[Tensor, ...], unit: str | None, place: str) -> Executable:
        """What runs a step of a loop."""
        return self._executable(plan, constants, unit, TRUSTED, place)

    def _on_gpu(
        self, plan: Plan, constants: tuple[Tensor, ...], unit: str | None, guards: Guards, place: str
    ) -> Executable:
        plan = plan.on(str(self.device), plan.host)
        gpu = driver.device(0, self.store, self.options) if unit is not None else None
        built = None
        if unit is not None and gpu is not None:
            built = self.run("load", lambda: read_gpu_unit(self.file, unit, gpu), _nothing)
        _check_kernels(plan, 0 if built is None else len(built.needs), place)
        graphs = Graphs(plan, gpu, None) if self.options.cuda_graphs else None
        return CudaExecutable(plan, constants, built, guards=guards, graphs=graphs)

    def _captured(self, name: str) -> CapturedProgram:
        from tilewright.artifact.text.captured import read_captured

        tensors = self.tensors if self.device is None else TensorReader(self.file, self.file.text("tensors"))
        return read_captured(self.file, name, tensors, self.options)

    def _unit(self, section: str) -> NativeUnit:
        return NativeUnit(self._library(section), self.store, self.options)

    def _library(self, section: str) -> Path:
        """Machine code as a file that can be loaded, which nobody else can change."""
        data = self.file.tensor(section, SectionKind.LIBRARY).numpy()
        make = getattr(os, "memfd_create", None)
        if make is None:
            entry = self.file.sections[section].sha256
            return ContentStore(None).put(entry, {LIBRARY: data.tobytes()}) / LIBRARY
        handle = make("tilewright", getattr(os, "MFD_CLOEXEC", 0))
        with open(handle, "wb", closefd=False) as file:
            file.write(data.data)
        return Path(f"/proc/self/fd/{handle}")


def _check_kernels(plan: Plan, kernels: int, place: str) -> None:
    """Raise ArtifactError where a plan launches a kernel that its library does not have."""
    launched = [
        x.kernel
        for s in plan.segments
        for step in s.steps
        if isinstance(step, Launches)
        for x in step.launches
    ]
    if any(k >= kernels for k in launched):
        raise damaged(f"its library has {kernels} kernels, its plan launches number {max(launched)}", place)
