"""Loops of a plan in an artifact: the plans of their steps, in sections of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from tilewright.artifact.file.container import Container, Parts, SectionKind
from tilewright.artifact.file.strict_json import damaged
from tilewright.artifact.text.calls import guarded
from tilewright.artifact.text.program import read_plan, write_plan
from tilewright.artifact.text.routines import Routines
from tilewright.artifact.text.tensors import TensorReader, TensorWriter
from tilewright.artifact.text.typed import check_types
from tilewright.errors import UnsupportedError
from tilewright.ir.graph import Graph, LibraryCall, Loop, Value
from tilewright.ir.text.values import Json
from tilewright.plan.data import Plan, Spec
from tilewright.runtime.cpu.kernels import NativeUnit
from tilewright.runtime.loops.body import LoopBody
from tilewright.runtime.loops.call import LoopRunner
from tilewright.runtime.plan.executable import Executable


def loop_on_gpu(name: str) -> UnsupportedError:
    """What is said of loops that are for a GPU, whose steps are recorded where they run."""
    return UnsupportedError(
        "a loop on a GPU cannot be kept in an artifact yet", phase="save", op=name,
        hint="keep it for a CPU (--target), or compile the model where it runs (warm caches make that quick)",
    )  # fmt: skip


class LoopWriter:
    """Keeps the loops of one plan in sections under its `name`."""

    def __init__(self, parts: Parts, tensors: TensorWriter, name: str) -> None:
        self._parts, self._tensors, self._name = parts, tensors, name
        self._count = 0

    def keep(self, call: LibraryCall) -> str:
        """The section of what runs a loop, and of all that this needs. Raises UnsupportedError for loops on GPUs."""
        runner = call.function
        if not isinstance(runner, LoopRunner) or runner.native is None:
            raise loop_on_gpu(call.name)
        name = f"{self._name}.loop{self._count}"
        self._count += 1
        loop = runner.loop
        rows: Json = None
        if runner.rows is not None:
            count, each, part = runner.rows
            rows = [count, each, self._body(part.bodies[0], f"{name}.rows")]
        self._parts.text(
            name,
            {
                "counts": [loop.carried, loop.sliced, loop.stacked],
                "marks": [loop.conditional, loop.gated, loop.backwards],
                "body": self._body(runner.bodies[0], f"{name}.step"),
                "rows": rows,
            },
        )
        return name

    def _body(self, body: LoopBody, name: str) -> Json:
        runs = body.executable
        unit = None
        if isinstance(runs.unit, NativeUnit):
            unit = self._parts.add(SectionKind.LIBRARY, name, runs.unit.path.read_bytes())
        inner = LoopWriter(self._parts, self._tensors, name)
        plan = write_plan(runs.plan, runs.constants, self._tensors, inner.keep)
        return {"order": list(body.order), "plan": plan, "unit": unit}


class Making(Protocol):
    """What makes an executable of a plan whose section of kernels is named."""

    def __call__(
        self, plan: Plan, constants: tuple[Tensor, ...], unit: str | None, place: str
    ) -> Executable: ...


class LoopReader:
    """Makes what runs the loops that were kept, each once."""

    def __init__(
        self, file: Container, tensors: TensorReader, routines: Callable[[], Routines], make: Making,
        native: Callable[[], Callable[..., int]],
    ) -> None:  # fmt: skip
        self._file, self._tensors, self._routines = file, tensors, routines
        self._make, self._native = make, native
        self._found: dict[str, LoopRunner | None] = {}
        """None while it is made."""

    def read(self, name: str) -> LoopRunner:
        """What runs a loop. Raises ArtifactError for a section that `LoopWriter` did not write."""
        place = f"{self._file.place}, section {name}"
        if name not in self._found:
            self._found[name] = None
            self._found[name] = self._read(name, place)
        found = self._found[name]
        if found is None:
            raise damaged("a loop is inside itself", place)
        return found

    def _read(self, name: str, place: str) -> LoopRunner:
        match self._file.text(name):
            case {"counts": [*counts], "marks": [*marks], "body": body, "rows": rows} as told if (
                len(told) == 4
            ):
                pass
            case _:
                raise damaged("a loop has other parts", place)
        carried, sliced, stacked = _checked(counts, tuple[int, int, int], place)
        conditional, gated, backwards = _checked(marks, tuple[bool, bool, bool], place)
        if min(carried, sliced, stacked) < 0:
            raise damaged("a loop of fewer values than none", place)
        single = self._body(body, conditional + carried + stacked, place)
        made = _made(single, place)
        shown = Graph((), (), made)  # what a runner asks of a body that has a plan
        loop = Loop(shown, None, carried, sliced, stacked, conditional, gated, backwards)
        taken = single.executable.plan.inputs
        tensors = [s for s in taken if isinstance(s, Spec)]
        if len(tensors) < 1 + carried + sliced or list(taken[: len(tensors)]) != tensors:
            raise damaged("the steps of a loop take other operands", place)
        match rows:
            case None:
                return LoopRunner(loop, (single,), self._native())
            case [int(count), int(each), part] if count > 1 and each > 0:
                of_rows = self._body(part, len(made), place)
                runner = LoopRunner(loop, (of_rows,), self._native())
                return LoopRunner(loop, (single,), self._native(), rows=(count, each, runner))
            case _:
                raise damaged("the rows of a loop are parted otherwise", place)

    def _body(self, told: Json, results: int, place: str) -> LoopBody:
        match told:
            case {"order": [*order], "plan": text, "unit": None | str() as unit} if len(told) == 3:
                pass
            case _:
                raise damaged("the steps of a loop are told otherwise", place)
        plan, constants = read_plan(text, self._tensors, self._routines(), place)
        numbers = _checked(order, tuple[int, ...], place)
        if len(numbers) != results or not all(0 <= k < len(plan.outputs) for k in numbers):
            raise damaged("the steps of a loop give other results", place)
        return LoopBody(numbers, self._make(plan, constants, unit, place))


def _checked(given: Sequence[Json], of: object, place: str) -> Any:
    """What stands in a list, as a tuple of that type. Raises ArtifactError for others."""
    found = tuple(given)
    return guarded(lambda: check_types(found, of) or found, place)


def _made(body: LoopBody, place: str) -> tuple[Value, ...]:
    """What a step gives. Raises ArtifactError where that is no tensor."""
    plan = body.executable.plan
    buffers = [plan.outputs[k] for k in body.order]
    if not all(isinstance(b, int) for b in buffers):
        raise damaged("a step of a loop gives what is no tensor", place)
    specs = [plan.buffers[b].spec for b in buffers if isinstance(b, int)]
    return tuple(Value(k, s.shape, s.dtype) for k, s in enumerate(specs))
