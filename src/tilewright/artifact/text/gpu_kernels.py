"""Built GPU kernels as text and machine code: what launches need of each, so that nothing is compiled again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tilewright.artifact.file.container import Container, Parts, SectionKind
from tilewright.artifact.file.strict_json import damaged
from tilewright.emit.triton.kernel import Argument, TritonSource
from tilewright.errors import BuildError
from tilewright.ir.dtype import DType
from tilewright.ir.expr import Expr
from tilewright.ir.program import Descriptor
from tilewright.ir.text.values import Json, Reader, Writer
from tilewright.lower.variants import LaunchNeeds, Variant
from tilewright.runtime.cuda.build import BuiltKernel
from tilewright.runtime.cuda.driver import Device
from tilewright.runtime.cuda.job import Box, KernelFacts
from tilewright.runtime.cuda.kernels import CudaUnit, VariantCompiler
from tilewright.runtime.store.cache import digest

from .calls import guarded
from .typed import check_types


@dataclass(frozen=True, slots=True)
class KeptVariant:
    """One built variant of a kernel (by number), whose machine code is the section `code`."""

    kernel: int
    variant: Variant
    entry: str
    arguments: tuple[Argument, ...]
    facts: KernelFacts
    code: str


@dataclass(frozen=True, slots=True)
class KeptUnit:
    """All kernels of a graph. `symbols` are the sizes in the order in which launches get them, `buckets` the kernels
    that stand for one where a condition holds."""

    needs: tuple[LaunchNeeds, ...]
    symbols: tuple[str, ...]
    variants: tuple[KeptVariant, ...]
    buckets: tuple[tuple[int, tuple[tuple[Expr, int], ...]], ...]


_CLASSES: Mapping[str, type] = {
    c.__name__: c
    for c in (Argument, Box, Descriptor, KernelFacts, KeptUnit, KeptVariant, LaunchNeeds, Variant)
}


def write_gpu_unit(unit: CudaUnit, parts: Parts, name: str) -> Json:
    """A unit in all variants of its kernels, those that are not built yet built now. Raises what building raises."""
    built = unit.every_variant()
    variants = tuple(
        KeptVariant(k, v, source.entry, source.arguments, kernel.facts,
                    parts.add(SectionKind.BINARY, f"{name}.code.{n}", kernel.code))
        for n, ((k, v), (source, kernel)) in enumerate(built.items())
    )  # fmt: skip
    buckets = tuple((k, tuple(rows)) for k, rows in unit.buckets.items())
    writer = Writer(_CLASSES, {DType: lambda t: {"type": t.name}}, _refuse)
    body = writer.write(KeptUnit(unit.needs, unit.symbols, variants, buckets))
    return {"unit": body, "expressions": writer.rows}


def read_gpu_unit(file: Container, section: str, device: Device) -> CudaUnit:
    """The unit that `write_gpu_unit` wrote, on a device. Raises ArtifactError for other data."""
    place = f"{file.place}, section {section}"
    match file.text(section):
        case {"unit": body, "expressions": [*rows]} as told if len(told) == 2:
            pass
        case _:
            raise damaged("its kernels have other parts", place)

    def read() -> KeptUnit:
        found = Reader(cast("Sequence[Sequence[Json]]", rows), _CLASSES, {}).read(body)
        check_types(found, KeptUnit)
        unit = cast(KeptUnit, found)
        _check(unit)
        return unit

    kept = guarded(read, place)
    known: dict[tuple[int, Variant], tuple[TritonSource, BuiltKernel]] = {}
    for v in kept.variants:
        code = file.bytes_of(v.code, SectionKind.BINARY)
        name = Path(digest(file.sections[v.code].sha256, v.facts.to_json()))
        source = TritonSource("", v.entry, v.arguments, 1, 1, v.variant)
        known[v.kernel, v.variant] = source, BuiltKernel(name, v.facts, code)
    return CudaUnit(
        kept.needs, kept.symbols, VariantCompiler(_no_text, _no_build), device, known, dict(kept.buckets)
    )


def _check(unit: KeptUnit) -> None:
    """Raise ValueError unless all numbers are those of something, and each variant that calls may need is there."""
    kernels, wanted = len(unit.needs), {(k, v) for k, n in enumerate(unit.needs) for v in n.variants}
    if {(v.kernel, v.variant) for v in unit.variants} != wanted:
        raise ValueError("not all variants of its kernels are there")
    if any(not 0 <= k < kernels for number, rows in unit.buckets for k in (number, *(k for _, k in rows))):
        raise ValueError("a kernel stands for one that is not there")
    for v in unit.variants:
        if v.facts.entry != v.entry or v.facts.threads < 1 or min(v.facts.shared, v.facts.hidden) < 0:
            raise ValueError(f"{v.entry} has other facts")
        params, described = len(unit.needs[v.kernel].elements), 0
        for a in v.arguments:
            described += a.descriptor is not None
            if (a.kind == "descriptor") != (a.descriptor is not None):
                raise ValueError(f"{a.name} is told otherwise")
            below = len(unit.symbols) if a.kind == "size" else 1 if a.kind == "error" else params
            if not 0 <= a.index < below:
                raise ValueError(f"{a.name} is of nothing that there is")
        if described != len(v.facts.boxes):
            raise ValueError(f"{v.entry} has other descriptors")


def _refuse(x: object) -> Json:
    raise TypeError(f"a {type(x).__name__} among what launches need")


def _no_text(kernel: int, variant: Variant) -> TritonSource:
    raise BuildError(f"kernel {kernel} is not in the artifact as {variant}", phase="run")


def _no_build(sources: Sequence[TritonSource]) -> Sequence[BuiltKernel]:
    raise BuildError("a loaded model builds no kernels", phase="run", op=_names(sources))


def _names(sources: Sequence[Any]) -> str:
    return ", ".join(s.entry for s in sources)
