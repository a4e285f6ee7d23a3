"""The law of results that lie where an operand lay: memory between steps that nobody reads any more is not kept beside
what is made of it.

A kernel may store a result over an operand of as many elements of the same type if a kernel or a call has made that
operand's memory for the program alone, no later step, output or write reads it, and no other operand of the kernel lies
in it. That its loops load each element before they store over it is seen in its programs (`order`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.graph import Op, Value
from tilewright.ir.kernel import Cover, Kernel, LibraryStep
from tilewright.ir.ops.strided import nested
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import MEMORY

from .law import MemoryReads, reused_operand

Successors = Mapping[Value, Value]
"""Results of kernels, each with the operand where it lies."""


def find_successors(
    cover: Cover, stored: Collection[Value], changed: Collection[Op], hints: SizeHints
) -> Successors:
    """The large results that may lie where an operand lay, by the law of the cover alone. `stored` lie in inputs, and
    the calls `changed` write there."""
    if cover.graph.found_by_calls():
        return {}  # memory ends where sizes become known
    law = _Law(cover, stored, changed)
    found: dict[Value, Value] = {}
    for time, step in enumerate(cover.steps):
        if not isinstance(step, Kernel) or step in cover.lists:
            continue
        taken: set[Value] = set()
        for made in step.outputs:
            if hints.estimate(made.numel) * made.dtype.bytes < MEMORY.min_reused_bytes:
                continue
            for old in step.inputs:
                owner = law.reads.owner(old)
                if owner not in taken and law.allows(step, time, old, made):
                    found[made] = old
                    taken.add(owner)
                    break
    return found


class _Law:
    """What holds of a cover."""

    def __init__(self, cover: Cover, stored: Collection[Value], changed: Collection[Op]) -> None:
        self.reads = MemoryReads(cover)
        self.stored, self.changed = stored, changed
        self.kept = {*self.reads.shown, *self.reads.copied, *cover.graph.kept()}

    def allows(self, kernel: Kernel, time: int, old: Value, made: Value) -> bool:
        """Whether a kernel's result may lie where an operand lies."""
        if kernel.lines or made in self.stored or self.reads.owner(made) in self.kept:
            return False
        owner = self.reads.owner(old)
        return (
            self._lie_alike(old, made)
            and not _multiplies(kernel)
            and self._is_own(owner)
            and [v for v in kernel.inputs if self.reads.owner(v) is owner] == [old]
            and self._is_last(owner, time)
        )

    def _lie_alike(self, old: Value, made: Value) -> bool:
        """Whether both are one type, and fill as many elements without a gap."""
        dense = all(_fills(v, self.reads) for v in (old, made))
        return old.dtype is made.dtype and dense and dims.equal(old.numel, made.numel)

    def _is_own(self, owner: Value) -> bool:
        """Whether a kernel, or a call that gives nothing else's memory, has made a value for the program alone."""
        step = self.reads.maker.get(owner, (-1, None))[1]
        if owner in self.kept or owner in self.stored:
            return False
        if isinstance(step, Kernel):
            return step not in self.reads.cover.lists
        if not isinstance(step, LibraryStep) or step.op.call is None or step.op in self.changed:
            return False
        call = step.op.call
        plain = not call.is_collective and call.loop is None and call.spare is None and call.line is None
        return plain and reused_operand(call) == -1

    def _is_last(self, owner: Value, time: int) -> bool:
        """Whether all other reads of a memory come before, and are over by then; nor does a call write there."""
        for when, step, _ in self.reads.of.get(owner, ()):
            if when > time:
                return False
            if isinstance(step, LibraryStep):
                call = step.op.call
                if call is None or call.starts or step.op in self.changed or reused_operand(call) != -1:
                    return False
        return True


def _multiplies(kernel: Kernel) -> bool:
    """Whether a kernel sums products of operands: it reads rows and columns again and again."""
    return any(op.expr is not None and op.expr.reduce and len(op.inputs) > 1 for op in kernel.ops)


def _fills(v: Value, reads: MemoryReads) -> bool:
    """Whether the elements of a value lie side by side, none of them twice."""
    strides = reads.strides(v)
    order = nested(v.shape, strides)
    if order is None or len(order) < sum(n is not dims.ONE for n in v.shape):
        return False
    reach = (dims.mul(dims.sub(n, dims.ONE), s) for n, s in zip(v.shape, strides, strict=True))
    return dims.equal(dims.add(dims.ONE, *reach), v.numel)
