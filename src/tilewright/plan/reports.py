"""What a user may know of a generated kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.ir import dims
from tilewright.ir.expr import Expr, cost
from tilewright.ir.graph import Value
from tilewright.ir.host import size
from tilewright.ir.kernel import Cover, Scheduled
from tilewright.ir.program import TileProgram
from tilewright.ir.reduction import Reduction


@dataclass(frozen=True, slots=True, eq=False)
class KernelReport:
    """One launch. `ops` are the captured nodes in it, by name; sizes that are not static stay expressions.

    `bytes_moved` counts every operand and result once: what is read again comes from the core's own caches.
    `bytes_bound` is the least that any kernel for the same region must move. `flops` counts vector instructions of the
    bodies, each as one operation per element.
    """

    name: str
    ops: tuple[str, ...]
    bytes_moved: Expr
    bytes_bound: Expr
    flops: Expr
    schedule: str
    reason: str
    program: TileProgram
    printer: Callable[[TileProgram], str]

    @property
    def source(self) -> str:
        """The generated C++ text."""
        return self.printer(self.program)

    def at(self, **sizes: int) -> tuple[int, int, int]:
        """Bytes moved, bytes of the lower bound and operations for given sizes (all static: for none)."""
        return size(self.bytes_moved, sizes), size(self.bytes_bound, sizes), size(self.flops, sizes)

    def __str__(self) -> str:
        size = f"{self.bytes_moved} bytes ({self.bytes_bound} at least), {self.flops} flops"
        return f"{self.name}: {', '.join(self.ops)}; {size}"


def _bytes(values: Sequence[Value]) -> Expr:
    return (
        dims.add(*(dims.mul(v.numel, dims.integer(v.dtype.bytes)) for v in values)) if values else dims.ZERO
    )


def report_of(
    scheduled: Scheduled, cover: Cover, number: int, printer: Callable[[TileProgram], str]
) -> KernelReport:
    """The report of kernel `number`; `printer` makes source text of its program when asked."""
    kernel = scheduled.kernel
    names: dict[int, str] = {}
    flops = dims.ZERO
    for op in kernel.ops:
        if op.origin >= 0 and not cover.graph.origins[op.origin].view:
            names[op.origin] = cover.graph.origins[op.origin].name
        if op.expr is not None:
            each = sum(cost(b) for b in op.expr.body) + _step(op.expr.reduction)
            flops = dims.add(flops, dims.mul(op.expr.points(), dims.integer(each)))
    stored = set(kernel.outputs)
    moved = _bytes((*kernel.inputs, *kernel.outputs))
    bound = _bytes((*[v for v in kernel.inputs if v not in stored], *kernel.outputs))
    return KernelReport(
        f"k{number}", tuple(names.values()), moved, bound, flops, str(scheduled.schedule), kernel.reason,
        scheduled.program, printer,
    )  # fmt: skip


def _step(reduction: Reduction | None) -> int:
    return 1 if reduction is not None else 0
