"""What a user may know of a generated kernel, and of a call that none was generated for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.ir import dims
from tilewright.ir.expr import Expr, cost, walk
from tilewright.ir.graph import Op, Value
from tilewright.ir.host import size
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Scheduled
from tilewright.ir.program import TileProgram
from tilewright.ir.reduction import Reduction
from tilewright.partition.sites import site
from tilewright.plan.bind import names_in
from tilewright.plan.coverage import How, how

EXPONENTIALS = ("exp", "exp2", "expm1", "sigmoid")
"""Functions that take one exponential each."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelReport:
    """One launch. `ops` are the captured nodes in it, by name; `sizes` are those that the graph was traced with, and
    the figures are for them (None where a size comes from data).

    `bytes_moved` counts every operand and result once: what is read again comes from a core's own caches.
    `bytes_lower_bound` is the least that any kernel for the same region must move. `flops` counts scalar operations of
    the bodies in units of one addition (see `ir.expr.Scalar.cost`), `exps` exponentials, with those that a mask makes
    needless: how many are left out is known when it runs. `seconds` are what the model gives one call. A kernel whose
    library was found in the cache is scheduled and printed when `scheduled` or `source` is asked for.
    """

    name: str
    ops: tuple[str, ...]
    moved: Expr
    bound: Expr
    work: Expr
    exponentials: Expr
    sizes: Mapping[str, int]
    scheduled: Callable[[], Scheduled]
    printer: Callable[[TileProgram], str]
    site: Callable[[Op], str]

    @property
    def bytes_moved(self) -> int | None:
        """Bytes of one call."""
        return self._at(self.moved)

    @property
    def bytes_lower_bound(self) -> int | None:
        """Bytes that one call cannot avoid."""
        return self._at(self.bound)

    @property
    def flops(self) -> int | None:
        """Scalar operations of one call."""
        return self._at(self.work)

    @property
    def exps(self) -> int | None:
        """Exponentials of one call."""
        return self._at(self.exponentials)

    @property
    def seconds(self) -> float | None:
        """Modelled seconds of one call."""
        return self.scheduled().seconds

    def _at(self, e: Expr) -> int | None:
        return size(e, self.sizes) if self.sizes.keys() >= set(names_in((e,))) else None

    @property
    def schedule(self) -> str:
        """The decisions, in one line."""
        return str(self.scheduled().schedule)

    @property
    def program(self) -> TileProgram:
        """How it computes."""
        return self.scheduled().program

    @property
    def reason(self) -> str:
        """Why the kernel ends where it does, and what could not be had."""
        made = self.scheduled()
        notes = (note.shown(self.site) for note in made.notes)
        return "; ".join(filter(None, (made.kernel.reason, *notes)))

    @property
    def source(self) -> str:
        """The generated C++ text."""
        return self.printer(self.program)

    def __str__(self) -> str:
        figures = f"{self.moved} bytes ({self.bound} at least), {self.work} flops"
        return f"{self.name}: {', '.join(self.ops)}; {figures}"


@dataclass(frozen=True, slots=True)
class CallReport:
    """One call that no kernel was generated for: `ops` are the captured nodes that it does, by name; `how` says whose
    code it is ("own", or a library's by "choice" or "need"), `reason` why; `results` are what it makes."""

    name: str
    ops: tuple[str, ...]
    how: How
    reason: str
    results: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.how}, {self.reason}): {', '.join(self.ops)} -> {', '.join(self.results)}"


def calls_of(cover: Cover) -> tuple[CallReport, ...]:
    """The calls of a cover, in order."""
    found: list[CallReport] = []
    for step in cover.steps:
        if not isinstance(step, LibraryStep) or step.op.call is None:
            continue
        op, call = step.op, step.op.call
        origins = step.origins or ((op.origin,) if op.origin >= 0 else ())
        named = [cover.graph.origins[o] for o in origins]
        ops = tuple(o.name for o in named if not o.view) or (op.name,)
        made = tuple(f"{v.dtype}[{', '.join(map(repr, v.shape))}]" for v in op.outputs)
        found.append(CallReport(call.name, ops, how(step, call), call.reason, made))
    return tuple(found)


def _bytes(values: Sequence[Value]) -> Expr:
    return (
        dims.add(*(dims.mul(v.numel, dims.integer(v.dtype.bytes)) for v in values)) if values else dims.ZERO
    )


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
    flops = exps = dims.ZERO
    for op in kernel.ops:
        if op.origin >= 0 and not cover.graph.origins[op.origin].view:
            names[op.origin] = cover.graph.origins[op.origin].name
        if op.expr is not None:
            each = sum(cost(b) for b in op.expr.body) + _step(op.expr.reduction)
            flops = dims.add(flops, dims.mul(op.expr.points(), dims.integer(each)))
            powers = sum(x.op in EXPONENTIALS for b in op.expr.body for x in walk(b))
            exps = dims.add(exps, dims.mul(op.expr.points(), dims.integer(powers)))
    stored, origins = set(kernel.outputs), cover.graph.origins
    moved = _bytes((*kernel.inputs, *kernel.outputs))
    bound = _bytes((*[v for v in kernel.inputs if v not in stored], *kernel.outputs))
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
        site=lambda op: site(op, origins, sum(o.origin == op.origin for o in kernel.ops) == 1),
    )


def _step(reduction: Reduction | None) -> int:
    return 1 if reduction is not None else 0
