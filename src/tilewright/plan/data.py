"""The plan of a graph as plain frozen data: numbers instead of values, expressions over size symbols for sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tilewright.ir.dtype import DType
from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Precondition
from tilewright.ir.sizes.dims import ZERO, add


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor in memory: element type, shape and strides, both in elements."""

    dtype: DType
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]


class Home(Enum):
    """Who owns the memory of a buffer."""

    INPUT = "input"
    CONSTANT = "constant"
    OUTPUT = "output"
    """A tensor of its own, made at the start of its segment or where its segment says; the caller may get it."""
    ARENA = "arena"
    """A part of the segment's one allocation."""
    LIBRARY = "library"
    """Whatever tensor the library call returned (with `source`, it is the memory of that buffer)."""
    VIEW = "view"
    """The memory of another buffer."""
    NUMBER = "number"
    """No memory: a host scalar that a library call returned."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """`index` is the input or constant number; a view lies `offset` elements behind the start of buffer `source`.

    The buffer is needed from time `start` up to, and not including, `end` (steps of the cover). `segment` is where it
    is made. `version` says behind how many changes of its memory, by what is stored there, a buffer is what it stands
    for."""

    spec: Spec
    home: Home
    index: int = -1
    source: int = -1
    offset: Expr = ZERO
    start: int = 0
    end: int = 0
    segment: int = 0
    version: int = 0


class Part(Enum):
    """Where a host integer is read."""

    SCALAR = "scalar"
    SIZE = "size"
    STRIDE = "stride"


@dataclass(frozen=True, slots=True)
class Binding:
    """`symbol` is the solution of found == scale * symbol + shift, where found is a part of input `input` (a scalar
    itself, or its size or stride of `dim`). Scale and shift use only symbols bound before."""

    symbol: str
    input: int
    part: Part
    dim: int
    scale: Expr
    shift: Expr


@dataclass(frozen=True, slots=True)
class Measure:
    """After a library call: `symbol` is the size of `dim` of buffer `buffer`, or the number it holds if `dim` < 0."""

    symbol: str
    buffer: int
    dim: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Run generated kernel number `kernel` on these buffers, the last `stores` of which it makes; one core takes about
    `core_ns` nanoseconds (None: nobody knows). Neighbours with one number `list` (-1: none) may run at once."""

    kernel: int
    params: tuple[int, ...]
    core_ns: Expr | None = None
    stores: int = 0
    list: int = -1


@dataclass(frozen=True, slots=True)
class Launches:
    """Generated kernels one after the other, with nothing between."""

    launches: tuple[Launch, ...]

    def together(self) -> Sequence[Sequence[Launch]]:
        """The launches in order, each with those of its list."""
        found: list[list[Launch]] = []
        for x in self.launches:
            if found and x.list >= 0 and (found[-1][0].list, found[-1][0].kernel) == (x.list, x.kernel):
                found[-1].append(x)
            else:
                found.append([x])
        return found


@dataclass(frozen=True, slots=True)
class CallStep:
    """Run a library call on `inputs`; its results become `outputs`, tensors first.

    With `guarded`, it is not known whether a result may be the memory of an operand. One core takes
    about `core_ns` nanoseconds (None: nobody knows). `place` is the one in the user's source."""

    call: LibraryCall
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    guarded: bool = False
    core_ns: Expr | None = None
    place: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """Make the tensor of view buffer `buffer` (kernels address views without one)."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the elements of buffer `source` into buffer `target`, element by element."""

    target: int
    source: int


Step = Launches | CallStep | View | Copy


@dataclass(frozen=True, slots=True)
class PlanSegment:
    """Steps whose sizes are all known once `measures` of the segments before have been taken.

    `frees[i]` are the buffers that nothing needs after step i and whose memory is then given back."""

    steps: tuple[Step, ...]
    measures: tuple[Measure, ...] = ()
    frees: tuple[tuple[int, ...], ...] = ()
    preconditions: tuple[Precondition, ...] = ()
    """What must hold of the sizes that are new here."""
    makes: tuple[tuple[int, ...], ...] = ()
    """`makes[i]` are the tensors of their own that are made in front of step i; empty: all are made first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything needed to run a graph but its kernels and its constants.

    `inputs` in calling order: a tensor's spec or the expression of a host scalar. `arguments[i]` is the buffer of input
    i (-1: a scalar). `outputs`: a buffer, a host scalar, or None. `written` are inputs that the plan writes to.
    """

    inputs: tuple[Spec | Expr, ...]
    arguments: tuple[int, ...]
    bindings: tuple[Binding, ...]
    buffers: tuple[Buffer, ...]
    segments: tuple[PlanSegment, ...]
    outputs: tuple[int | Expr | None, ...]
    written: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    """Those of them that kernels store into: torch does not see these writes and must be told of them."""
    writes: tuple[tuple[int, str], ...] = ()
    """Each write: the input, and why its value is copied there (empty: it is made where the input lies)."""
    symbols: tuple[str, ...] = ()
    """Size symbols in the order in which generated code receives them."""
    device: str = "cpu"
    """Where all buffers are."""
    placed: tuple[tuple[int, Expr], ...] = ()
    """Inputs whose storage is addressed by place, and the offset that they must have there."""
    host: tuple[int, ...] = ()
    """Inputs that come as CPU tensors without dims, and are brought to the device."""
    alone_ns: int = 0
    """What takes one core no longer than so many nanoseconds is left to the caller's thread."""
    handover_ns: int = 0
    """What takes one core no longer than so many nanoseconds is not shared with threads that watch for it."""

    def on(self, device: str, host: Sequence[int] = ()) -> Plan:
        """The same with all buffers on a device, to which the inputs numbered `host` are brought."""
        return replace(self, device=device, host=tuple(host))

    def show(self) -> str:
        """The plan as text."""
        lines = [f"bind {b.symbol} from {b.part.value} {b.dim} of input {b.input}" for b in self.bindings]
        for k, b in enumerate(self.buffers):
            where = (
                f"of b{b.source} + {b.offset}"
                if b.home is Home.VIEW
                else f"{b.index}"
                if b.index >= 0
                else ""
            )
            lines.append(
                f"b{k}: {b.spec.dtype}{list(b.spec.shape)} strides {list(b.spec.strides)} {b.home.value} {where}"
            )
        for segment in self.segments:
            lines.append("segment")
            lines += [f"  {_show(step)}" for step in segment.steps]
            lines += [f"  measure {m.symbol} from b{m.buffer}" for m in segment.measures]
        lines += [f"input {k} is written by a copy: {why}" for k, why in self.writes if why]
        lines.append("return " + ", ".join(f"b{o}" if isinstance(o, int) else repr(o) for o in self.outputs))
        return "\n".join(lines)


def core_ns_of(launches: Sequence[Launch]) -> Expr | None:
    """Nanoseconds that launches take one core together; None where nobody knows."""
    known = [x.core_ns for x in launches if x.core_ns is not None]
    return add(*known) if len(known) == len(launches) else None


def lists_of(plan: Plan) -> list[tuple[int, int]]:
    """The number of a kernel that one launch runs several times, and how often, for each such launch in order."""
    steps = [step for segment in plan.segments for step in segment.steps if isinstance(step, Launches)]
    return [(x[0].kernel, len(x)) for step in steps for x in step.together() if len(x) > 1]


def _show(step: Step) -> str:
    match step:
        case Launches():
            return "launch " + "; ".join(
                " + ".join(f"k{x.kernel}({', '.join(f'b{p}' for p in x.params)})" for x in together)
                for together in step.together()
            )
        case CallStep():
            made = ", ".join(f"b{o}" for o in step.outputs)
            return f"{made} = {step.call.name}({', '.join(f'b{i}' for i in step.inputs)})"
        case View():
            return f"view b{step.buffer}"
        case Copy():
            return f"b{step.target} <- b{step.source}"
