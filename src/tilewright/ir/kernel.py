"""Which ops become one launch, and the other steps of a cover: library calls and views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .expr import Expr, show
from .graph import Graph, Layout, Op, Value
from .identity import TOLD
from .program import TileProgram
from .writes import NOTHING_IN_PLACE, DoneInPlace, PlaceFromData

AS_THEY_LIE, PADDED, LAID = "as they lie", "padded", "laid"
PREPARATIONS = (AS_THEY_LIE, PADDED, LAID)
"""How a kernel that multiplies finds its operands: as others made them, with few channels padded, or with the weights
of windows laid as it reads them."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Ops that become one launch, in topological order, with the values it stores. Inputs are derived; convexity is
    not asked. `reason` says why its boundary is where it is, for people. `over` are pairs of an input and an output,
    by number, that may be one memory. `lines` are outputs, by number, that are stored at places that data name."""

    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    reason: str = field(default="", metadata=TOLD)
    over: tuple[tuple[int, int], ...] = ()
    lines: tuple[tuple[int, PlaceFromData], ...] = ()

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Values read and not made inside, in order of first use; places come last."""
        made = {v for op in self.ops for v in op.outputs}
        read = (v for op in self.ops for v in op.inputs if v not in made)
        return tuple(dict.fromkeys((*read, *(place.index for _, place in self.lines))))


Price = Callable[[Kernel, Mapping[Value, Layout]], float]
"""Modelled seconds of a kernel whose values lie so. Raises IllegalSchedule where it has no legal form."""


@dataclass(frozen=True, slots=True, eq=False)
class LibraryStep:
    """Run `op.call` on `op.inputs`; it makes `op.outputs`, with the strides that the call states.

    `choice` is True where a kernel could have been generated and the library was chosen for speed. `origins` are the
    captured nodes that the call stands for."""

    op: Op
    choice: bool
    origins: tuple[int, ...] = field(default=(), metadata=TOLD)


@dataclass(frozen=True, slots=True, eq=False)
class ViewStep:
    """`value` is the memory of `source` seen with other strides: no work. Offset and strides in elements."""

    value: Value
    source: Value
    layout: Layout
    offset: Expr


Step = Kernel | LibraryStep | ViewStep


def results_of(step: Step) -> tuple[Value, ...]:
    """The values that a step makes."""
    match step:
        case Kernel():
            return step.outputs
        case LibraryStep():
            return step.op.outputs
        case ViewStep():
            return (step.value,)


@dataclass(frozen=True, slots=True, eq=False)
class Cover:
    """The steps that compute a graph, in order, the layout of every value that is in memory, and what of the graph's
    writes is done where inputs lie. Kernels that follow each other and have one number in `lists` need nothing of each
    other and have one program: they may be one launch."""

    graph: Graph
    steps: tuple[Step, ...]
    layouts: Mapping[Value, Layout] = field(default_factory=dict)
    in_place: DoneInPlace = NOTHING_IN_PLACE
    lists: Mapping[Kernel, int] = field(default_factory=dict)

    def stored_lines(self) -> frozenset[Value]:
        """Lines that the kernels which make them put where they belong."""
        kernels = [step for step in self.steps if isinstance(step, Kernel)]
        return frozenset(kernel.outputs[b] for kernel in kernels for b, _ in kernel.lines)


@dataclass(frozen=True, slots=True)
class Note:
    """What could not be had in a kernel, in words: `text` with {0}, {1} and so on for `ops`."""

    text: str
    ops: tuple[Op, ...] = ()

    def shown(self, name: Callable[[Op], str]) -> str:
        """The words, with names of the ops."""
        return self.text.format(*map(name, self.ops))


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Another schedule of a kernel, its program for the same parameters, and the `condition` on sizes under which it is
    right and faster."""

    condition: Expr
    schedule: object
    program: TileProgram


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A kernel with its decisions and its tile program; `params[k]` is the value behind `program.params[k]` (inputs,
    then outputs). `schedule` prints as one line.

    The first of the `buckets` whose condition holds is taken, else `program`. `notes` say in words what could not be
    had, and which loops run over lists. `seconds` are those that the model gives one launch at typical sizes, if it was
    asked."""

    kernel: Kernel
    schedule: object
    program: TileProgram
    params: tuple[Value, ...]
    buckets: tuple[Bucket, ...] = ()
    notes: tuple[Note, ...] = ()
    seconds: float | None = None

    @property
    def programs(self) -> tuple[TileProgram, ...]:
        """The program for any sizes, and those of the buckets."""
        return (self.program, *(b.program for b in self.buckets))

    def show_schedules(self) -> str:
        """Every decision: the schedule in one line, and one line for each bucket before it in force."""
        lines = [f"if {show(b.condition)}: {b.schedule}" for b in self.buckets]
        return "\n".join([*lines, str(self.schedule)])
