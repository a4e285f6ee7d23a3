"""Files of exported programs (`torch.export.save`), whose captured graphs are kept by the bytes of the file."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from tilewright.artifact.text.program import Interface
from tilewright.capture.described import Signature
from tilewright.capture.exported import Exported
from tilewright.keep.captures import CapturedWay, FileBytes, KeptGraphs
from tilewright.options import Options
from tilewright.pipeline.compiler import Compiled
from tilewright.plan.coverage import Coverage
from tilewright.runtime.call.exported import ProgramWay
from tilewright.runtime.call.fast_path import Short
from tilewright.runtime.call.reports import Reports, ReportsOfParts

SUFFIX = ".pt2"


class _Loader(Protocol):
    """The functions of `program_loader`, which brings torch's loader and with it Dynamo: a second of imports that other
    files do without."""

    def load_program(self, path: str) -> torch.export.ExportedProgram: ...
    def captured_program(self, program: torch.export.ExportedProgram, path: str) -> Exported: ...
    def check_as_given(self, program: torch.export.ExportedProgram, path: str) -> None: ...


def program_loader() -> _Loader:
    """See there."""
    return cast(_Loader, importlib.import_module("tilewright.ways.program_loader"))


class ProgramFileWay(ReportsOfParts):
    """An exported program of a file: traced by this process, or by an earlier one."""

    def __init__(self, inner: ProgramWay | CapturedWay, path: str) -> None:
        self.inner = inner
        self.place = path
        self.title = os.path.basename(path)
        self.device: torch.device | None = None
        self.source = None

    @property
    def coverage(self) -> Coverage:
        """Of the program."""
        return self.inner.coverage

    @property
    def done(self) -> Coverage:
        """Of the program."""
        return self.inner.coverage

    @property
    def signature(self) -> Signature:
        """What it takes and gives."""
        return self.inner.described((), ())

    def reporting(self) -> tuple[Reports]:
        """What was built."""
        return (self.inner,)

    def interface(self) -> Interface:
        """How it is called."""
        return interface_of(self.inner)

    def unchanged(self) -> bool:
        """A file's weights are its own."""
        return True

    def copied(self, memo: dict[int, object]) -> ProgramFileWay:
        """Itself, as of `ProgramWay`."""
        if isinstance(self.inner, ProgramWay):
            self.inner.copied(memo)
        return self

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Nothing is left to compile; arguments that do not fit are refused."""
        self.inner.call.form.flatten(args, kwargs)

    def __call__(
        self, args: tuple[object, ...], kwargs: dict[str, object], out: Sequence[Tensor] | None
    ) -> tuple[object, Short | None]:
        """The result."""
        return self.inner.run(self.inner.call.form.flatten(args, kwargs), out), None


def interface_of(way: ProgramWay | CapturedWay) -> Interface:
    """How a program is called."""
    if isinstance(way, CapturedWay):
        return way.interface
    return Interface(way.call.form, way.program.inputs, way.signature, way.conditions)


class KeptProgram(KeptGraphs):
    """The captured graph of one file of a program."""

    def __init__(self, file: FileBytes, options: Options) -> None:
        super().__init__(file, options)
        self._parts = ("program", f"freeze {options.freeze is not False}")

    def get(self) -> CapturedWay | None:
        """The graph that another process captured, compiled; None if none was kept."""
        return self.found(self._parts)

    def put(self, way: ProgramWay) -> None:
        """Keep what was captured, unless it is of a kind that is not kept."""
        if isinstance(way.built, Compiled):
            self.keep(self._parts, interface_of(way), way.built)
