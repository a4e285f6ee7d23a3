"""Captured graphs of model files, kept in the store by the bytes of the file: a second process need not trace again."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.artifact.file import container
from tilewright.artifact.file.disk import regular
from tilewright.artifact.text.captured import read_captured, write_captured
from tilewright.artifact.text.program import Interface, read_interface, write_interface
from tilewright.artifact.text.routines import no_routines
from tilewright.artifact.text.tensors import TensorReader, TensorWriter
from tilewright.capture.described import Signature
from tilewright.errors import TilewrightError
from tilewright.ir.graph import Shares
from tilewright.options import Options
from tilewright.pipeline.compiler import Compiled, compile_graph, is_watched
from tilewright.pipeline.state import CapturedProgram
from tilewright.plan.coverage import Coverage
from tilewright.runtime.call.asked import reading
from tilewright.runtime.call.fast_path import Short
from tilewright.runtime.call.reports import ReportsOfParts
from tilewright.runtime.plan.call_form import ProgramCall
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.store.cache import ContentStore, default_root, digest
from tilewright.runtime.store.code_identity import code_identity
from tilewright.tuning.input_limits import ARTIFACTS

LOG = logging.getLogger("tilewright")
_FILE = "capture.tw"
OUTSIDE = b"location"
"""What stands in a model file that has weights in other files."""
_CAPTURING = ("ir", "capture", "artifact", "ways", "keep")
"""What decides what is captured, and how it is written."""


class CapturedWay(ReportsOfParts):
    """A graph that was captured by another process, compiled by this one."""

    def __init__(self, interface: Interface, built: Compiled) -> None:
        self.interface = interface
        self.built = built
        self.conditions = interface.conditions
        self.call = ProgramCall(interface.form, built.executable)  # pyright: ignore[reportArgumentType]

    @property
    def coverage(self) -> Coverage:
        """Of the graph."""
        return self.built.coverage

    def reporting(self) -> tuple[Compiled]:
        """What was built."""
        return (self.built,)

    def described(self, inputs: Sequence[str], outputs: Sequence[str]) -> Signature:
        """What it takes and gives; the names were those of the file."""
        del inputs, outputs
        return self.interface.signature

    def admits(self, leaves: Sequence[object]) -> bool:
        """As of `ProgramCall`."""
        return self.call.admits(leaves)

    def run(self, leaves: Sequence[object], out: Sequence[Tensor] | None) -> object:
        """As of `ProgramCall`."""
        return self.call.run(leaves, out)

    def direct(self, places: Sequence[int]) -> Short | None:
        """As of `ProgramCall`."""
        return self.call.direct(places)


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A file, and the SHA-256 that it had before it was read. What stands in it where it has parts in other files is
    `outside` (empty: it has none)."""

    path: str
    sha256: str
    outside: bytes

    @staticmethod
    def of(path: str, outside: bytes) -> FileBytes | None:
        """The file now; None where it cannot be read, is too large to be kept, or may have parts in other files."""
        found = _hash(path, outside)
        return None if found is None else FileBytes(path, found, outside)

    def unchanged(self) -> bool:
        """Whether the file has the same bytes still: what was read of it meanwhile was read of these."""
        return _hash(self.path, self.outside) == self.sha256


def _hash(path: str, outside: bytes) -> str | None:
    """Of a plain file; a pipe would wait for who writes into it."""
    try:
        if os.path.getsize(path) > ARTIFACTS.max_kept_capture_bytes:
            return None
        with regular(Path(path), follow=True) as file:
            data = file.read()
        return None if outside and outside in data else hashlib.sha256(data).hexdigest()
    except OSError:
        return None


class KeptGraphs:
    """The captured graphs of one file, each for what its `parts` say."""

    def __init__(self, file: FileBytes, options: Options) -> None:
        self._file = file
        self._options = options
        self._store = ContentStore(default_root(options))

    def _key(self, parts: Sequence[str]) -> str:
        setting = f"{torch.__version__} {torch.get_default_dtype()}"
        return digest("capture", self._file.sha256, setting, code_identity(_CAPTURING), *parts)

    def found(self, parts: Sequence[str]) -> CapturedWay | None:
        """The graph that was captured for such parts, compiled; None if none was kept."""
        if is_watched() or self._store.root is None:
            return None
        with reading():
            read = self._read(parts)
        if read is None:
            return None
        interface, program = read
        return CapturedWay(interface, compile_graph(program, interface.conditions))

    def _read(self, parts: Sequence[str]) -> tuple[Interface, CapturedProgram] | None:
        """What was kept for such parts."""
        folder = self._store.get(self._key(parts))
        if folder is None or not self._file.unchanged():
            return None
        try:
            file = container.read(folder / _FILE)
            tensors = TensorReader(file, file.text("tensors"))
            interface = read_interface(file.text("g0.call"), tensors, no_routines(), file.place)
            program = read_captured(file, "g0", tensors, self._options)
        except TilewrightError as error:
            LOG.info("no captured graph is taken from %s: %s", folder, error)
            return None
        return interface, program

    def keep(self, parts: Sequence[str], interface: Interface, built: Compiled) -> None:
        """Keep what was captured, unless it is of a kind that is not kept."""
        captured = built.compilation.captured
        if (
            captured is None
            or not _is_plain(captured)
            or not isinstance(built.executable, Executable)
            or built.executable.plan.device != "cpu"
            or self._store.root is None
            or not self._file.unchanged()
        ):
            return
        try:
            sections = container.Parts()
            tensors = TensorWriter(sections)
            sections.text("g0.call", write_interface(interface, tensors))
            graph = write_captured(captured, tensors)
            if graph is None:
                return
            sections.text("g0.graph", graph)
            sections.text("tensors", tensors.rows)
            data = container.packed({}, sections, lambda head: container.NO_SEAL)
            self._store.put(self._key(parts), {_FILE: data})
        except TilewrightError as error:
            LOG.info("the captured graph of %s is not kept: %s", self._file.path, error)


class KeptCaptures(KeptGraphs):
    """The captured graphs of one file of a model that is traced for inputs."""

    def __init__(
        self,
        file: FileBytes,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        dims: Sequence[Mapping[int, str]],
        options: Options,
    ) -> None:
        """`inputs` and `outputs` are their names, `dims` those of dims that may change."""
        super().__init__(file, options)
        self.inputs, self.outputs = inputs, outputs
        self._dims = dims

    def _shown(self, inputs: Sequence[Tensor]) -> list[str]:
        return [
            f"{list(t.shape)} {list(t.stride())} {t.dtype} {t.device} {sorted(dims.items())}"
            for t, dims in zip(inputs, self._dims, strict=True)
        ]

    def get(self, inputs: Sequence[Tensor]) -> CapturedWay | None:
        """The graph that was captured for such inputs, compiled; None if none was kept."""
        return self.found(self._shown(inputs))

    def put(self, inputs: Sequence[Tensor], interface: Interface, built: Compiled) -> None:
        """Keep what was captured, unless it is of a kind that is not kept."""
        self.keep(self._shown(inputs), interface, built)


def _is_plain(captured: CapturedProgram) -> bool:
    """Whether nothing of a graph is memory of something else."""
    graph = captured.graph
    alone = all(s.kind is Shares.NOTHING for s in captured.shares)
    return alone and not graph.writes and not graph.placed
