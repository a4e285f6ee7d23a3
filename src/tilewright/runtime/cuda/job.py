"""What a build worker is asked and what it answers, as plain data in JSON. Needs neither torch nor Triton."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tilewright.errors import BuildError


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel to build: the Python text with its function `entry`, what its arguments are, and for which machine."""

    text: str
    entry: str
    signature: tuple[tuple[str, str], ...]
    """Name and Triton type of every argument, in order."""
    divisible: tuple[int, ...]
    """Positions of the arguments that are multiples of 16."""
    warps: int
    stages: int
    backend: str
    """`cuda` or `hip`."""
    arch: int | str
    """90 for sm_90; the name of an AMD processor."""
    lanes: int
    """Threads of a warp."""
    fusion: bool = True
    """Whether a * b + c may round once."""
    packing: bool = True
    """Whether LLVM may pack scalar operations into vectors (its SLP vectoriser, which dies over a few kernels)."""
    dialect: str = "triton"
    """`triton`, or `gluon`."""
    persistent: bool = False
    """Whether a block goes through many grid points."""
    max_spilled_bytes: int | None = None
    """Of a thread, beyond which a kernel is refused; None: it may be slow, and a clock may say so."""
    local_sums: bool = True
    """Whether Triton may keep a thread's part of a sum to itself until a loop ends (a pass that refuses a few
    kernels)."""

    def to_json(self) -> str:
        """One line; equal jobs give equal text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The job behind one line. Raises BuildError for anything else."""
        found = _fields(cls, text)
        try:
            found["signature"] = tuple((str(name), str(kind)) for name, kind in found["signature"])
            found["divisible"] = tuple(int(k) for k in found["divisible"])
            job = cls(**found)
        except (TypeError, ValueError, KeyError) as error:
            raise BuildError(f"not a build job: {error}", phase="build") from error
        if not job.entry.isidentifier():
            raise BuildError(f"not a kernel name: {job.entry!r}", phase="build")
        return job


@dataclass(frozen=True, slots=True)
class Box:
    """How a kernel takes blocks of a descriptor: the driver's numbers of the element type and of the order in which
    rows lie in shared memory, and the box of one copy (elements of each dim)."""

    type: int
    swizzle: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What is known of a built kernel. Bytes; None where the format does not tell."""

    entry: str
    shared: int
    """Shared memory of one block."""
    threads: int
    """Threads of one block."""
    hidden: int
    """Pointer arguments that the compiler added behind the declared ones; null is right for them."""
    registers: int | None
    """Of one thread, 32 bits each."""
    spills: int | None
    """Local memory of one thread (AMD: registers that went there)."""
    triton: str
    boxes: tuple[Box, ...] = ()
    """One for each descriptor among the arguments, in order."""
    early: bool = False
    """Whether its code waits for the end of the kernel in front before it touches memory."""
    releases_first: bool = False
    """Whether it lets the kernel behind begin before that."""
    persistent: bool = False
    """Whether a block goes through many grid points: one for each core is launched at most."""

    def to_json(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises BuildError for text that no builder wrote."""
        found = _fields(cls, text)
        try:
            found["boxes"] = tuple(
                Box(int(b["type"]), int(b["swizzle"]), tuple(map(int, b["shape"]))) for b in found["boxes"]
            )
            if not all(isinstance(found[name], bool) for name in ("early", "releases_first", "persistent")):
                raise TypeError("a fact that is true or false")
            return cls(**found)
        except (TypeError, ValueError, KeyError) as error:
            raise BuildError(f"not the facts of a kernel: {error}", phase="build") from error


def _fields(cls: type[Job] | type[KernelFacts], text: str) -> dict[str, Any]:
    try:
        found: object = json.loads(text)
    except ValueError as error:
        raise BuildError(f"not JSON: {error}", phase="build") from error
    names = {f.name for f in dataclasses.fields(cls)}
    if not isinstance(found, Mapping) or set(found) != names:  # pyright: ignore[reportUnknownArgumentType]
        raise BuildError(f"the fields {', '.join(sorted(names))} are needed", phase="build")
    return dict(found)  # pyright: ignore[reportUnknownArgumentType]
