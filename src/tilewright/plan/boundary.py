"""Why a kernel ends where it does: one of a closed list, whatever words whoever decided it left."""

from __future__ import annotations

from enum import Enum

from tilewright.ir.graph import Value
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Step, ViewStep
from tilewright.tuning.thresholds import PARTITION


class Boundary(Enum):
    """What keeps a kernel from taking up what comes after it."""

    REGION = "chosen with its region"
    UNFUSED = "nothing is fused by choice"
    LAW = "no legal kernel does both"
    BETWEEN = "another kernel or call stands between"
    OPERANDS = "too many operands together"
    LIMIT = "a limit of the search"
    LARGE = "as many ops as a kernel may have"
    PRICE = "separate kernels are faster"
    CALL = "a call reads its result"
    RESULT = "its result is an output"
    READERS = "several kernels read its result"
    READER = "the kernel that reads it stays apart"
    NOBODY = "nobody reads it"


_BEGINNINGS = (
    ("chosen with", Boundary.REGION),
    ("nothing is fused", Boundary.UNFUSED),
    ("another kernel or library call", Boundary.BETWEEN),
    ("together they have more", Boundary.OPERANDS),
    ("further apart", Boundary.LIMIT),
    ("[schedule] not priced", Boundary.LIMIT),
    ("separate kernels", Boundary.PRICE),
)


def boundary_of(kernel: Kernel, cover: Cover) -> Boundary:
    """What keeps a kernel apart from who reads its results: a choice, what was noted for the one kernel that does, or
    what follows from who they are."""
    noted = _noted(kernel)
    if noted in (Boundary.REGION, Boundary.UNFUSED):
        return noted
    readers = _readers(kernel, cover)
    kernels = [step for step in readers if isinstance(step, Kernel)]
    if any(isinstance(step, LibraryStep) for step in readers):
        return Boundary.CALL
    if len(kernels) > 1:
        return Boundary.READERS
    if kernels:
        together = len(kernel.ops) + len(kernels[0].ops)
        large = Boundary.LARGE if together > PARTITION.max_kernel_ops else Boundary.READER
        return _noted(kernels[0]) or noted or large
    outputs = {v for v in cover.graph.outputs if isinstance(v, Value)}
    return Boundary.RESULT if outputs & _with_views(kernel, cover) else Boundary.NOBODY


def _noted(kernel: Kernel) -> Boundary | None:
    """What was said when it did not grow: the words of a law are those of whoever refused."""
    text = kernel.reason
    known = next((found for start, found in _BEGINNINGS if text.startswith(start)), None)
    if known is None and "[law:" in text:
        return Boundary.LAW
    return known


def _with_views(kernel: Kernel, cover: Cover) -> set[Value]:
    """The results, and what is a view of them."""
    found = set(kernel.outputs)
    for step in cover.steps:
        if isinstance(step, ViewStep) and step.source in found:
            found.add(step.value)
    return found


def _readers(kernel: Kernel, cover: Cover) -> list[Step]:
    """The other kernels, and the calls, that read its results."""
    made = _with_views(kernel, cover)
    found: list[Step] = []
    for step in cover.steps:
        read = (
            step.inputs
            if isinstance(step, Kernel)
            else step.op.inputs
            if isinstance(step, LibraryStep)
            else ()
        )
        if step is not kernel and made.intersection(read):
            found.append(step)
    return found
