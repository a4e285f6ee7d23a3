"""The file: a prefix, a header that lists the sections, and the sections, each aligned and with its SHA-256.

    magic, version, flags, bytes of the header, its SHA-256, seal | header | zeros | section | zeros | section ...

Nothing may overlap, be left out, or lie between sections but zeros: every byte of a file is checked when it is opened.
Sections are read into memory of ours before they are hashed, and never mapped: what was checked cannot change later.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tilewright.errors import ArtifactError, InputError
from tilewright.ir.text.values import Json
from tilewright.tuning.input_limits import ARTIFACTS

from . import weights
from .disk import regular, replacing
from .strict_json import CHANGED, damaged, dump, parse

MAGIC = b"\x93TILEWRT"
VERSION = 2
ALIGNMENT = 64
SUFFIX = ".tw"
OWN_FOLDER = "give a path in a folder that is yours"
_PREFIX = struct.Struct("<8sIIQ32s32s")
_SEAL = slice(_PREFIX.size - 32, _PREFIX.size)
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}")
_SHA = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.safetensors")
"""A file of weights: in no other folder, and not hidden."""


class SectionKind(Enum):
    """What a section is."""

    TEXT = "text"
    """JSON."""
    TENSOR = "tensor"
    """Elements."""
    LIBRARY = "library"
    """Machine code for a CPU."""
    SOURCE = "source"
    """Text that machine code was made from."""
    BINARY = "binary"
    """Machine code for a GPU."""


@dataclass(frozen=True, slots=True)
class Section:
    """One entry of the table."""

    kind: SectionKind
    name: str
    offset: int
    size: int
    sha256: str
    beside: bool = False
    """Whether it lies in the file of weights beside this one."""


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """An open file: what it says of itself, and its sections by name. `head` is what a seal covers."""

    place: str
    facts: Mapping[str, Json]
    sections: Mapping[str, Section]
    head: bytes
    seal: bytes
    data: Mapping[str, Tensor] = field(repr=False)

    def bytes_of(self, name: str, kind: SectionKind) -> bytes:
        """A section's bytes. Raises ArtifactError where there is none of that kind."""
        return self.tensor(name, kind).numpy().tobytes()

    def tensor(self, name: str, kind: SectionKind) -> Tensor:
        """A section's bytes, aligned, as they lie in memory."""
        found = self.sections.get(name)
        if found is None or found.kind is not kind:
            raise damaged(f"there is no section {name!r} of kind {kind.value}", self.place)
        return self.data[name]

    def text(self, name: str) -> Json:
        """A section that is JSON."""
        return parse(self.bytes_of(name, SectionKind.TEXT), f"{self.place}, section {name}")

    def named(self, kind: SectionKind) -> tuple[str, ...]:
        """The names of all sections of a kind."""
        return tuple(name for name, s in self.sections.items() if s.kind is kind)


Sealing = Callable[[bytes], bytes]
"""Gives the seal of a head: 32 bytes, zeros for none."""
NO_SEAL = bytes(32)


# --- writing -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class UnwrittenSection:
    """A section that is still to be written. `form` is the type and the shape of a dense tensor, for others to read."""

    kind: SectionKind
    name: str
    data: memoryview
    sha256: str
    form: tuple[str, tuple[int, ...]] | None = None


class Parts:
    """Sections that are still to be written. Equal ones of a kind become one; texts are found by name."""

    def __init__(self) -> None:
        self.rows: list[UnwrittenSection] = []
        self._known: dict[tuple[SectionKind, str], str] = {}

    def add(
        self,
        kind: SectionKind,
        name: str,
        data: bytes | memoryview,
        form: tuple[str, tuple[int, ...]] | None = None,
    ) -> str:
        """The name of a section that holds `data`: this one, or an equal one."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        sha = hashlib.sha256(view).hexdigest()
        key = (kind, name if kind is SectionKind.TEXT else sha)
        known = self._known.setdefault(key, name)
        if known == name:
            self.rows.append(UnwrittenSection(kind, name, view, sha, form))
        return known

    def text(self, name: str, value: Json) -> str:
        """A section that is JSON."""
        return self.add(SectionKind.TEXT, name, dump(value))


def write(
    path: Path, facts: Mapping[str, Json], parts: Parts, sealing: Sealing, *, beside: Path | None = None
) -> None:
    """Write a file, whole or not at all; with `beside`, the tensors go to that safetensors file in the same folder.
    What lies there stays as it is until both are whole."""
    apart = [p for p in parts.rows if p.kind is SectionKind.TENSOR] if beside is not None else []
    try:
        with nullcontext(list[int]()) if beside is None else weights.writing(beside, apart) as places:
            name = None if beside is None else beside.name
            made = packed({**facts, "beside": name}, parts, sealing, dict(zip(apart, places, strict=True)))
            with replacing(path) as file:
                file.write(made)
    except OSError as error:
        hint = "make room there" if error.errno == errno.ENOSPC else OWN_FOLDER
        raise _unwritable(path, error.strerror or str(error), hint) from error


def check_place(path: Path, beside: Path | None = None) -> None:
    """Raise InputError where a file, and one of weights `beside` it, cannot be written, before there is anything to
    write."""
    for place in filter(None, (path, beside)):
        if place.is_dir():
            raise _unwritable(place, "it is a folder")
    if not os.access(path.parent, os.W_OK):
        raise _unwritable(path, f"nothing can be written into {str(path.parent)!r}")


def _unwritable(path: Path, why: str, hint: str = OWN_FOLDER) -> InputError:
    return InputError(f"the artifact cannot be written: {why}", phase="save", place=str(path), hint=hint)


def packed(
    facts: Mapping[str, Json],
    parts: Parts,
    sealing: Sealing,
    apart: Mapping[UnwrittenSection, int] | None = None,
) -> bytes:
    """The bytes of a file. `apart` says where sections begin that lie in the file of weights."""
    outside = apart or {}
    inside = [p for p in parts.rows if p not in outside]
    table: list[Json] = []
    at = 0
    for part in inside:
        table.append(_row(part, at, False))
        at = _aligned(at + len(part.data))
    table += [_row(p, start, True) for p, start in outside.items()]
    header = dump({"facts": {"beside": None, **facts}, "sections": table})
    head = _PREFIX.pack(MAGIC, VERSION, 0, len(header), hashlib.sha256(header).digest(), NO_SEAL)
    made = bytearray(head[: _SEAL.start] + sealing(head[: _SEAL.start] + header) + header)
    for part in inside:
        made += bytes(-len(made) % ALIGNMENT)
        made += part.data
    return bytes(made)


def _row(part: UnwrittenSection, offset: int, beside: bool) -> Json:
    return [part.kind.value, part.name, offset, len(part.data), part.sha256, beside]


def _aligned(n: int) -> int:
    return n + -n % ALIGNMENT


# --- reading -----------------------------------------------------------------


def read(path: Path) -> Container:
    """An artifact whose every byte was checked. Raises ArtifactError for any other file."""
    place = str(path)
    try:
        with regular(path, follow=True) as file:
            return _read(file, place, path.parent)
    except OSError as error:
        raise ArtifactError(
            f"the artifact cannot be read: {error.strerror or error}",
            place=place,
            hint="give the path of a file that `tilewright compile MODEL -o FILE` made",
        ) from error


def _read(file: BinaryIO, place: str, folder: Path) -> Container:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise ArtifactError(
            "this is no artifact",
            place=place,
            hint="give a file that `tilewright compile MODEL -o FILE` made",
        )
    _, version, flags, length, sha, seal = _PREFIX.unpack(prefix)
    if version != VERSION or flags:
        raise ArtifactError(
            f"the artifact has format {version}, this Tilewright reads {VERSION}", place=place, hint=CHANGED
        )
    if not 0 < length <= min(ARTIFACTS.max_header_bytes, size - _PREFIX.size):
        raise damaged(f"its header has {length} bytes", place)
    header = file.read(length)
    if hashlib.sha256(header).digest() != sha:
        raise damaged("its header was changed after it was made", place)
    told = parse(header, place)
    if not isinstance(told, Mapping) or set(told) != {"facts", "sections"}:
        raise damaged("its header has other parts", place)
    facts = told["facts"]
    if not isinstance(facts, Mapping):
        raise damaged("its header has no facts", place)
    sections = _table(told["sections"], place)
    data = _inside(file, [s for s in sections if not s.beside], size, place)
    apart = [s for s in sections if s.beside]
    name = facts.get("beside")
    if apart or name is not None:
        data |= _beside(folder, name, apart, place)
    by_name = {s.name: s for s in sections}
    return Container(place, facts, by_name, prefix[: _SEAL.start] + header, seal, data)


def _table(rows: Json, place: str) -> list[Section]:
    """The sections that a header lists."""
    if not isinstance(rows, (list, tuple)) or len(rows) > ARTIFACTS.max_sections:
        raise damaged("its table of sections is none", place)
    found: list[Section] = []
    kinds = {k.value: k for k in SectionKind}
    for row in rows:
        match row:
            case [str(kind), str(name), int(offset), int(size), str(sha), bool(beside)] if kind in kinds:
                whole = type(offset) is int and type(size) is int and offset >= 0 and size >= 0
                if whole and _NAME.fullmatch(name) and _SHA.fullmatch(sha):
                    found.append(Section(kinds[kind], name, offset, size, sha, beside))
                    continue
            case _:
                pass
        raise damaged(f"its table has no such row: {str(row)[:80]}", place)
    if len({s.name for s in found}) < len(found):
        raise damaged("two sections have one name", place)
    return found


def _inside(file: BinaryIO, sections: Sequence[Section], size: int, place: str) -> dict[str, Tensor]:
    """The bytes of sections that follow the header, one behind the other with nothing but zeros between."""
    start, end = _aligned(file.tell()), file.tell()
    for s in sections:
        if s.offset % ALIGNMENT or start + s.offset != _aligned(end) or s.size > size:
            raise damaged(f"section {s.name} does not lie where the one before ends", place)
        end = start + s.offset + s.size
    if end != size:
        raise damaged(f"it has {size} bytes and not {end}", place)
    found: dict[str, Tensor] = {}
    for s in sections:
        if any(file.read(start + s.offset - file.tell())):
            raise damaged(f"bytes lie before section {s.name}", place)
        found[s.name] = _filled(file, s.size, place)
    _check_hashes(sections, found, place)
    return found


def _filled(file: BinaryIO, size: int, place: str) -> Tensor:
    """The next bytes of a file, in memory of ours."""
    made = torch.empty(size, dtype=torch.uint8)
    view = made.numpy().data
    done = 0
    while done < size:
        got = file.readinto(view[done:])  # pyright: ignore[reportAttributeAccessIssue]  (a raw file has it)
        if not got:
            raise damaged("it was cut off while it was read", place)
        done += got
    return made


def _check_hashes(sections: Sequence[Section], data: Mapping[str, Tensor], place: str) -> None:
    def fits(s: Section) -> bool:
        return hashlib.sha256(data[s.name].numpy().data).hexdigest() == s.sha256

    large = [s for s in sections if s.size > ARTIFACTS.hashed_at_once_bytes]
    small = [s for s in sections if s.size <= ARTIFACTS.hashed_at_once_bytes]
    results = [(s, fits(s)) for s in small]
    if len(large) > 1:
        with ThreadPoolExecutor(min(len(large), os.cpu_count() or 1)) as threads:
            results += zip(large, threads.map(fits, large), strict=True)
    else:
        results += [(s, fits(s)) for s in large]
    for s, good in results:
        if not good:
            raise damaged(f"section {s.name} was changed after it was made", place)


def _beside(folder: Path, name: Json, sections: Sequence[Section], place: str) -> dict[str, Tensor]:
    """The bytes of sections in a file of weights, which lies in the same folder and is no link."""
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise damaged(f"its weights lie in {str(name)[:80]!r}, which is no name of a file beside it", place)
    try:
        with regular(folder / name, follow=False) as file:
            size = os.fstat(file.fileno()).st_size
            found: dict[str, Tensor] = {}
            for s in sections:
                if s.kind is not SectionKind.TENSOR or s.offset + s.size > size:
                    raise damaged(f"section {s.name} does not lie in {name}", place)
                file.seek(s.offset)
                found[s.name] = _filled(file, s.size, place)
    except OSError as error:
        raise ArtifactError(
            f"its weights cannot be read: {error.strerror or error}",
            place=str(folder / name),
            hint="keep the file of weights beside the artifact",
        ) from error
    _check_hashes(sections, found, str(folder / name))
    return found
