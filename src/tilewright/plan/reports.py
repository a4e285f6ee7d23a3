"""What a user may know of a generated kernel, and of a call that none was generated for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.analysis.reads import bytes_read
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Op
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Scheduled
from tilewright.ir.program import TileProgram
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.host import size
from tilewright.partition.provenance import site

from .bind import names_in
from .boundary import Boundary, boundary_of
from .coverage import How, executor_of, is_stored_line
from .work import bytes_of, done_by, ops_by_origin, origins_of, work_of


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What one launch or call does. `ops` are the captured nodes in it, by name; `sizes` are those that the graph was
    traced with, and the figures are for them (None where a size comes from data, or an op has no declaration).

    `bytes_moved` counts every operand and result once, of an operand the places that are asked for: what is read again
    comes from a core's own caches.
    `flops` counts scalar operations on data in units of one addition (see `ir.expr.Scalar.cost`), `exps`
    exponentials, with those that a mask makes needless: how many are left out is known when it runs."""

    name: str
    ops: tuple[str, ...]
    moved: Expr
    work: Expr | None
    exponentials: Expr | None
    sizes: Mapping[str, int]

    @property
    def bytes_moved(self) -> int | None:
        """Bytes of one call."""
        return self._at(self.moved)

    @property
    def flops(self) -> int | None:
        """Scalar operations of one call."""
        return self._at(self.work)

    @property
    def exps(self) -> int | None:
        """Exponentials of one call."""
        return self._at(self.exponentials)

    def _at(self, e: Expr | None) -> int | None:
        known = e is not None and self.sizes.keys() >= set(names_in((e,)))
        return size(e, self.sizes) if e is not None and known else None


@dataclass(frozen=True, slots=True, eq=False)
class KernelReport(Figures):
    """One launch. `bytes_lower_bound` is the least that any kernel for the same region must move, `seconds` are what
    the model gives one call at `sizes`. A kernel whose library was found in the cache is scheduled and printed when
    `scheduled` or `source` is asked for."""

    bound: Expr
    scheduled: Callable[[], Scheduled]
    printer: Callable[[TileProgram], str]
    site: Callable[[Op], str]
    ending: Callable[[], Boundary]
    modelled: Callable[[], float] | None = None
    """Seconds at `sizes`, where these are not the ones that kernels were decided at."""

    @property
    def bytes_lower_bound(self) -> int | None:
        """Bytes that one call cannot avoid."""
        return self._at(self.bound)

    @property
    def seconds(self) -> float | None:
        """Modelled seconds of one call."""
        return self.scheduled().seconds if self.modelled is None else self.modelled()

    @property
    def schedule(self) -> str:
        """The decisions, in one line; before it one for each bucket of sizes that has others."""
        return self.scheduled().show_schedules()

    @property
    def program(self) -> TileProgram:
        """How it computes."""
        return self.scheduled().program

    @property
    def boundary(self) -> Boundary:
        """Why the kernel ends where it does."""
        return self.ending()

    @property
    def reason(self) -> str:
        """The same in the words of whoever decided it, and what could not be had."""
        made = self.scheduled()
        notes = (note.shown(self.site) for note in made.notes)
        return "; ".join((made.kernel.reason or self.boundary.value, *notes))

    @property
    def source(self) -> str:
        """The generated C++ text."""
        return self.printer(self.program)

    def __str__(self) -> str:
        figures = f"{self.moved} bytes ({self.bound} at least), {self.work} flops"
        return f"{self.name}: {', '.join(self.ops)}; {figures}"


@dataclass(frozen=True, slots=True, eq=False)
class CallReport(Figures):
    """One call that no kernel was generated for: `how` says whose code it is ("own", or a library's by "choice" or
    "need"), `reason` why; `results` are what it makes. `seconds` are what the model gives it (None: no figure). Frozen
    weights that were packed into it are not among `bytes_moved`."""

    how: How
    reason: str
    results: tuple[str, ...]
    seconds: float | None = None
    refused: tuple[str, ...] = ()
    """Faster forms that failed while they were made, and why."""

    def __str__(self) -> str:
        text = f"{self.name} ({self.how}, {self.reason}): {', '.join(self.ops)} -> {', '.join(self.results)}"
        return "; ".join((text, *self.refused))


Price = Callable[[LibraryStep, Sequence[Op]], float | None]
"""Modelled seconds of a call that does some captured ops."""


def calls_of(
    cover: Cover, captured: Sequence[Op], sizes: Mapping[str, int], price: Price
) -> tuple[CallReport, ...]:
    """The calls of a cover, in order, but for lines that are stored where they belong. `captured` are the ops as they
    were before any was replaced by a call."""
    found: list[CallReport] = []
    by_origin, stored = ops_by_origin(captured), cover.stored_lines()
    for step in cover.steps:
        if not isinstance(step, LibraryStep) or step.op.call is None:
            continue
        op, call = step.op, step.op.call
        if op in cover.in_place.calls and (call.part is not None or is_stored_line(op, stored)):
            continue
        named = [cover.graph.origins[o] for o in origins_of(step)]
        done = done_by(step, by_origin)
        declared = bool(done) and all(o.expr is not None for o in done)
        work, powers = work_of(done) if declared else (None, None)
        report = CallReport(
            name=call.name,
            ops=tuple(o.name for o in named if not o.view) or (op.name,),
            moved=bytes_of((*dict.fromkeys(op.inputs), *op.outputs)),
            work=work,
            exponentials=powers,
            sizes=sizes,
            how=executor_of(step, call),
            reason=call.reason,
            results=tuple(f"{v.dtype}[{', '.join(map(repr, v.shape))}]" for v in op.outputs),
            seconds=price(step, done) if declared else None,
            refused=call.refused,
        )
        found.append(report)
    return tuple(found)


def report_of(
    kernel: Kernel,
    cover: Cover,
    number: int,
    sizes: Mapping[str, int],
    scheduled: Callable[[], Scheduled],
    printer: Callable[[TileProgram], str],
) -> KernelReport:
    """The report of `kernel`, number `number`; `printer` makes source text of its program when asked."""
    names: dict[int, str] = {}
    for op in kernel.ops:
        if op.origin >= 0 and not cover.graph.origins[op.origin].view:
            names[op.origin] = cover.graph.origins[op.origin].name
    flops, exps = work_of(kernel.ops)
    stored, origins = set(kernel.outputs), cover.graph.origins
    made = bytes_of(kernel.outputs)
    moved = dims.add(bytes_read(kernel.ops, kernel.inputs), made)
    bound = dims.add(bytes_read(kernel.ops, [v for v in kernel.inputs if v not in stored]), made)
    return KernelReport(
        name=f"k{number}",
        ops=tuple(names.values()),
        moved=moved,
        bound=bound,
        work=flops,
        exponentials=exps,
        sizes=sizes,
        scheduled=scheduled,
        printer=printer,
        ending=lambda: boundary_of(kernel, cover),
        site=lambda op: site(op, origins, sum(o.origin == op.origin for o in kernel.ops) == 1),
    )
