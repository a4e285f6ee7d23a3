"""What is told of kernels and calls, as text: a loaded model answers as the one that was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from tilewright.artifact.file.container import Container, Parts, SectionKind
from tilewright.artifact.file.strict_json import damaged
from tilewright.ir.text.values import Json
from tilewright.plan.boundary import Boundary
from tilewright.plan.coverage import Coverage, Row
from tilewright.plan.reports import CallReport, KernelReport

from .typed import check_types


@dataclass(frozen=True, slots=True)
class SavedFigures:
    """Figures of one launch or call, for the sizes that the graph was traced with (see `plan.reports.Figures`)."""

    name: str
    ops: tuple[str, ...]
    bytes_moved: int | None
    flops: int | None
    exps: int | None
    seconds: float | None
    reason: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SavedKernel(SavedFigures):
    """One launch (see `plan.reports.KernelReport`)."""

    bytes_lower_bound: int | None
    schedule: str
    boundary: Boundary
    source: str

    def __str__(self) -> str:
        figures = f"{self.bytes_moved} bytes ({self.bytes_lower_bound} at least), {self.flops} flops"
        return f"{self.name}: {', '.join(self.ops)}; {figures}"


@dataclass(frozen=True, slots=True)
class SavedCall(SavedFigures):
    """One call that no kernel was generated for (see `plan.reports.CallReport`)."""

    how: Literal["own", "choice", "need"]
    results: tuple[str, ...]
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.name} ({self.how}, {self.reason}): {', '.join(self.ops)} -> {', '.join(self.results)}"
        return "; ".join((text, *self.refused))


@dataclass(frozen=True, slots=True)
class SavedReports:
    """All of one graph: as they were saved, or as they are of one that was built again."""

    coverage: Coverage
    kernels: tuple[SavedKernel | KernelReport, ...] = ()
    calls: tuple[SavedCall | CallReport, ...] = ()


class SavedStep(Protocol):
    """A compiled graph, as far as it tells of itself."""

    @property
    def coverage(self) -> Coverage: ...
    @property
    def kernels(self) -> Sequence[KernelReport]: ...
    @property
    def calls(self) -> Sequence[CallReport]: ...


def write_reports(made: SavedStep, parts: Parts, name: str) -> Json:
    """Reports as JSON; sources become sections."""
    return {
        "coverage": _coverage(made.coverage),
        "kernels": [_kernel(k, parts, f"{name}.source.{n}") for n, k in enumerate(made.kernels)],
        "calls": [_call(c) for c in made.calls],
    }


def _figures(r: KernelReport | CallReport) -> dict[str, Json]:
    return {
        "name": r.name, "ops": list(r.ops), "bytes_moved": r.bytes_moved, "flops": r.flops, "exps": r.exps,
        "seconds": r.seconds, "reason": r.reason, "sizes": dict(r.sizes),
    }  # fmt: skip


def _kernel(k: KernelReport, parts: Parts, section: str) -> Json:
    return {
        **_figures(k), "bytes_lower_bound": k.bytes_lower_bound, "schedule": k.schedule, "boundary": k.boundary.name,
        "source": parts.add(SectionKind.SOURCE, section, k.source.encode()),
    }  # fmt: skip


def _call(c: CallReport) -> Json:
    return {**_figures(c), "how": c.how, "results": list(c.results), "refused": list(c.refused)}


def _coverage(c: Coverage) -> Json:
    rows = {who: [[r.name, r.reason, r.count] for r in getattr(c, who)] for who in ("choice", "need", "own")}
    return {"ops": c.ops, "generated": c.generated, "kernels": c.kernels, **rows}


def read_reports(container: Container, section: str) -> SavedReports:
    """The reports of a section. Raises ArtifactError for other data."""
    told = cast("Mapping[str, Any]", container.text(section))
    try:
        covered: dict[str, Any] = dict(told["coverage"])
        choice, need, own = (tuple(Row(*r) for r in covered[who]) for who in ("choice", "need", "own"))
        made = SavedReports(
            Coverage(covered["ops"], covered["generated"], covered["kernels"], choice, need, own),
            tuple(_read_kernel(k, container) for k in told["kernels"]),
            tuple(SavedCall(**_tuples(c, "ops", "results", "refused")) for c in told["calls"]),
        )
        check_types(made, SavedReports)
    except (LookupError, TypeError, ValueError, AttributeError) as bad:
        raise damaged(
            f"{type(bad).__name__}: {str(bad)[:200]}", f"{container.place}, section {section}"
        ) from bad
    return made


def _read_kernel(told: Mapping[str, Any], container: Container) -> SavedKernel:
    fields = _tuples(told, "ops")
    source = container.bytes_of(str(fields["source"]), SectionKind.SOURCE).decode()
    fields |= {"boundary": Boundary[fields["boundary"]], "source": source}
    return SavedKernel(**fields)


def _tuples(told: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {k: tuple(cast("Sequence[str]", v)) if k in names else v for k, v in told.items()}
