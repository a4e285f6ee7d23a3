"""At which level each edge of a cover is.

    outside or another step   =>   DEVICE (HOST for an input that lies on the host)
    the same kernel           =>   REGISTER, or SHARED if the kernel keeps the value in scratch

What the schedule does not say is not claimed: a compiler behind us may bring a block through shared memory on its own
(operands of a matrix unit, sums over threads), and no edge is at L2 before two steps run at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from tilewright.errors import VerifyError
from tilewright.ir.graph import Op, Value
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Scheduled, Step
from tilewright.target import MemoryKind

from .edge import Edge, Node, TileGraph
from .scratch import kept_in_scratch

_Source = tuple[Value, Node | None, MemoryKind]
"""A value, who makes it, and where it lies."""


def connect(cover: Cover, schedules: Sequence[Scheduled], host: Collection[int] = ()) -> TileGraph:
    """The tile-graph of a cover whose kernels have these schedules; inputs numbered `host` lie on the host.

    Every value that a step reads or stores has an edge: one for each reader, and one without a reader where the caller
    gets it or nobody does; what a kernel makes and nobody reads has none. A loop is one call, whatever its steps. A
    value that its kernel both reads and stores has edges at both levels. Raises VerifyError for a kernel without a
    schedule."""
    known = {s.kernel: s for s in schedules}
    missing = [step for step in cover.steps if isinstance(step, Kernel) and step not in known]
    if missing:
        raise VerifyError(f"{len(missing)} kernels have no schedule", phase="tilegraph")
    producer = cover.graph.producer()
    nodes = [node for step in cover.steps for node in _nodes(step, producer)]
    afar = {v for k, v in enumerate(cover.graph.inputs) if isinstance(v, Value) and k in host}
    inside = {(v, node.step): node for node in nodes for v in node.op.outputs}
    stored = {v: node for (v, step), node in inside.items() if v in _stored(step)}
    in_scratch = {(v, s.kernel) for s in known.values() for v in kept_in_scratch(s)}
    readers: dict[_Source, list[Node | None]] = {}
    for v, node in stored.items():
        readers[v, node, MemoryKind.DEVICE] = []
    for node in nodes:
        for v in dict.fromkeys(node.op.inputs):
            beside = inside.get((v, node.step))
            if beside is None:
                source = v, stored.get(v), MemoryKind.HOST if v in afar else MemoryKind.DEVICE
            else:
                stays = (v, node.step) in in_scratch
                source = v, beside, MemoryKind.SHARED if stays else MemoryKind.REGISTER
            readers.setdefault(source, []).append(node)
    leaving = cover.graph.kept()
    for (v, node, level), found in readers.items():
        if not found or (v in leaving and node is not None and not level.core):
            found.append(None)
    place = {node: n for n, node in enumerate(nodes)}
    edges = [Edge(v, made, node, level) for (v, made, level), found in readers.items() for node in found]
    edges.sort(key=lambda e: -1 if e.producer is None else place[e.producer])
    return TileGraph(tuple(nodes), tuple(edges))


def _nodes(step: Step, producer: dict[Value, Op]) -> Iterator[Node]:
    match step:
        case Kernel():
            yield from (Node(op, step) for op in step.ops)
        case LibraryStep():
            yield Node(step.op, step)
        case _:
            yield Node(producer[step.value], step)


def _stored(step: Step) -> tuple[Value, ...]:
    """The values that a step leaves in memory."""
    match step:
        case Kernel():
            return step.outputs
        case LibraryStep():
            return step.op.outputs
        case _:
            return (step.value,)
