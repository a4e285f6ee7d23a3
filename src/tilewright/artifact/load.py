"""Reads an artifact: runs its plan as it is where its code is trusted and for this machine, else builds it again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tilewright.artifact.file import container, seals
from tilewright.artifact.file.container import Container, SectionKind
from tilewright.artifact.file.strict_json import damaged
from tilewright.artifact.text.program import read_interface, read_plan
from tilewright.artifact.text.reports import read_reports
from tilewright.artifact.text.routines import Routines
from tilewright.artifact.text.tensors import TensorReader
from tilewright.errors import ArtifactError, BuildError, InputError, shown, warn
from tilewright.ir.text.values import Json
from tilewright.options import Options
from tilewright.pipeline.trace import PhaseRecorder
from tilewright.plan.data import Launches, Plan
from tilewright.runtime.call.model import CompiledModel
from tilewright.runtime.cpu.kernels import NativeUnit
from tilewright.runtime.cpu.native_plan import join
from tilewright.runtime.cpu.toolchain import LIBRARY, give_library, host_target, is_given
from tilewright.runtime.loops.native import loop_function
from tilewright.runtime.own.product import ProductCalls
from tilewright.runtime.plan.call_form import ProgramCall
from tilewright.runtime.plan.executable import Executable, Guards
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.target import preset
from tilewright.tuning.text_limits import TEXTS

from . import machine
from .way import LoadedGraph, LoadedWay

if TYPE_CHECKING:
    from tilewright.pipeline.state import CapturedProgram


def load(
    path: str | os.PathLike[str],
    *,
    trust: bool = False,
    rebuild: bool = True,
    options: Options | None = None,
) -> CompiledModel:
    """The model that `tilewright.save` kept. Its machine code runs if this user made the file, or with `trust`, which
    lets whoever made it run code as you. Else, or where it is for another machine or version, it is built again from
    the graph inside, with a warning; without `rebuild` that is an error.

    Raises ArtifactError for a file that is damaged or was changed, and for one that is neither run nor built again.
    """
    given = options or Options.make()
    run = PhaseRecorder()
    file = run("read", lambda: container.read(Path(path)), _nothing)
    facts = _Facts(file)
    wanted = _merged(facts.options, given, file.place)
    own = seals.is_ours(file, given) or trust
    refused, hint = _refusal(facts, own, given)
    if not refused:
        return CompiledModel(_Loader(file, facts, wanted, run).way())
    if not rebuild:
        raise ArtifactError(refused, place=file.place, hint=hint)
    why = shown(refused, TEXTS.max_message_characters)
    warn(f"{file.place} is built again from the graph inside: {why} ({hint})", RuntimeWarning)
    from .rebuild import rebuilt

    names = tuple(str(row["name"]) for row in facts.rows)
    return CompiledModel(rebuilt(file, facts.title, names, wanted, trusted=own, origin=facts.origin))


def _refusal(facts: _Facts, own: bool, given: Options) -> tuple[str, str]:
    """Why the machine code is not run, and what to do; empty if it is."""
    if not own:
        return "nobody vouches for the machine code in it", "load it with trust=True if you trust who made it"
    differs = machine.differences(facts.made, facts.target_facts)
    if differs:
        return f"it was made for {'; '.join(differs)}", "make it again on this machine"
    if given.verify is True:
        return "the option `verify` holds kernels against the graph", "load it without the option"
    return "", ""


def _nothing(made: object) -> None:
    """What is kept of a phase's result."""
    del made


class _Facts:
    """What the header says, checked."""

    def __init__(self, file: Container) -> None:
        match file.facts:
            case {
                "title": str(title), "made": Mapping() as made, "options": Mapping() as options, "graphs": [*names],
                "targets": [Mapping() as target, *_],
            }:  # fmt: skip
                pass
            case _:
                raise damaged("its header has other facts", file.place)
        match target:
            case {"facts": Mapping() as facts, "graphs": [*rows], "libraries": Mapping() as libraries}:
                pass
            case _:
                raise damaged("its header tells a target otherwise", file.place)
        if not names or len(rows) != len(names):
            raise damaged("it has no graph", file.place)
        self.title = shown(title, TEXTS.max_place_characters)
        self.made, self.options, self.target_facts = made, options, facts
        self.libraries = libraries
        self.rows: list[Mapping[str, Json]] = []
        for name, row in zip(names, rows, strict=True):
            match row:
                case {"name": str(told), "unit": None | str()} if told == name:
                    self.rows.append(row)
                case _:
                    raise damaged("its header tells a graph otherwise", file.place)
        self.machine_name = str(facts.get("name"))
        by = f"tilewright {made.get('tilewright')} with torch {made.get('torch')}"
        self.origin = shown(f"made by {by} for {self.machine_name}", TEXTS.max_message_characters)


def _merged(saved: Mapping[str, Json], here: Options, place: str) -> Options:
    """The options of whoever saved, with the cache, the compiler and the checks of whoever loads."""
    mine = {name: getattr(here, name) for name in ("cache", "cache_dir", "compiler", "verify")}
    try:
        return Options.make({**saved, **mine})
    except InputError as bad:
        raise damaged(bad.message, place) from bad


class _Loader:
    """Makes what runs, of a file that is trusted."""

    def __init__(self, file: Container, facts: _Facts, options: Options, run: PhaseRecorder) -> None:
        self.file, self.facts, self.options, self.run = file, facts, options, run
        self.store = ContentStore(default_root(options))
        self.tensors = TensorReader(file, file.text("tensors"))
        self.routines = Routines(self._own)

    def _own(self) -> ProductCalls:
        """For the machine that the artifact is for, which may be a narrower one than this."""
        flags = preset(self.facts.machine_name).compiler_flags
        return ProductCalls(replace(host_target(), compiler_flags=flags), self.store, self.options)

    def way(self) -> LoadedWay:
        """All graphs."""
        for identity, section in self.facts.libraries.items():
            if not is_given(identity):
                give_library(identity, self._library(str(section)))
        try:
            graphs = [
                self._graph(str(row["name"]), cast("str | None", row["unit"])) for row in self.facts.rows
            ]
        except (BuildError, ValueError, AttributeError, OSError) as bad:  # what loading a library raises
            raise damaged(f"its machine code does not load: {bad}", self.file.place) from bad
        for graph in graphs:
            graph.trace = self.run.trace
        return LoadedWay(self.facts.title, graphs, f"{self.facts.origin}; its machine code runs")

    def _graph(self, name: str, unit: str | None) -> LoadedGraph:
        file, place = self.file, f"{self.file.place}, graph {name}"
        interface = self.run(
            "calls",
            lambda: read_interface(file.text(f"{name}.call"), self.tensors, self.routines, place),
            _nothing,
        )
        text = f"{name}.plan.{self.facts.machine_name}"
        plan, constants = self.run(
            "plan",
            lambda: read_plan(file.text(text), self.tensors, self.routines, place),
            lambda made: made[0],
        )
        built = None if unit is None else self.run("load", lambda: self._unit(unit), _nothing)
        _check_kernels(plan, 0 if built is None else built.kernels, place)
        native = partial(join, native=lambda: loop_function(self.store, self.options))
        executable = Executable(
            plan, constants, built, guards=Guards(False, interface.conditions), join=native
        )
        call = self.run("bind", lambda: ProgramCall(interface.form, executable), _nothing)
        reports = partial(read_reports, file, f"{name}.report")
        return LoadedGraph(interface, call, reports, partial(self._captured, name))

    def _captured(self, name: str) -> CapturedProgram:
        from tilewright.artifact.text.captured import read_captured

        return read_captured(self.file, name, self.tensors, self.options)

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
