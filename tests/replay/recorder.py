"""Everything between a captured graph and its built kernels, as text. Nothing is built, and nothing runs.

For a GPU the same tensors, in the memory of the host, are compiled as for a machine by name: none is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from unittest import mock

from torch import Tensor, fx

from tests.support.cpp_harness import print_units
from tests.support.triton.harness import print_triton
from tilewright.ir.expr import Expr
from tilewright.ir.form import Form
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Scheduled, Step
from tilewright.ir.program import TileProgram
from tilewright.ir.schedule import Schedule
from tilewright.options import Options
from tilewright.pipeline import compiler
from tilewright.pipeline.build import KernelBuilder, Kernels, names_of
from tilewright.pipeline.compiler import Compiled, watch_compilations
from tilewright.pipeline.place import DevicePlace
from tilewright.runtime.call.fallback import Captured
from tilewright.runtime.cuda.kernels import usual
from tilewright.schedule import solver
from tilewright.target import Target, preset

Texts = dict[str, str]
"""Parts by name: `000.cover`, `000.01.form`, `.schedule`, `.program`, `.source`."""


class Recorder:
    """Takes the place of what builds kernels, and keeps what it is asked to build."""

    def __init__(self) -> None:
        self.texts: Texts = {}
        self.covers = 0
        self.forms: dict[int, tuple[TileProgram, str]] = {}

    def built(
        self, builder: KernelBuilder, covers: Sequence[Cover], symbols: Sequence[Expr], *, once: bool = False
    ) -> Kernels:
        """As `KernelBuilder.built`, without a unit."""
        steps = [(step, c.layouts) for c in covers for step in c.steps if isinstance(step, Kernel)]
        scheduled = builder.solved(steps)
        for cover in covers:
            self.cover(cover, scheduled, names_of(symbols), builder.solver.target)
        programs = list(dict.fromkeys(id(s.program) for s in scheduled))
        return Kernels(scheduled, None, [programs.index(id(s.program)) for s in scheduled], len(programs))

    def cover(
        self, cover: Cover, scheduled: Sequence[Scheduled], names: Sequence[str], target: Target
    ) -> None:
        """Keep a cover, and its kernels that are `scheduled`."""
        head = f"{self.covers:03}"
        self.covers += 1
        self.texts[f"{head}.cover"] = "\n".join([cover.graph.show(), *map(shown_step, cover.steps)]) + "\n"
        for k, s in enumerate(scheduled):
            programs = s.programs
            forms = [form for p in programs if (form := self.form_of(p)) is not None]
            conditions = [repr(b.condition) for b in s.buckets]
            name = f"{head}.{k:02}"
            self.texts[f"{name}.form"] = "\n\n".join(forms) + "\n"
            self.texts[f"{name}.schedule"] = "\n".join([shown(s.schedule), *conditions]) + "\n"
            self.texts[f"{name}.program"] = "\n\n".join(p.show() for p in programs) + "\n"
            self.texts[f"{name}.source"] = "\n".join(sources(programs, names, target)) + "\n"

    def form_of(self, program: TileProgram) -> str | None:
        """What a program was lowered from; one that may store over what it loads was another one then."""
        found = self.forms.get(id(program)) or next(
            (f for f in self.forms.values() if program.over and replace(program, over=()) == f[0]), None
        )
        return None if found is None else found[1]

    def lowered(self, form: Form, schedule: Schedule, *, plain: Callable[..., TileProgram]) -> TileProgram:
        """As `lower`; the form is kept with what became of it."""
        made = plain(form, schedule)
        self.forms[id(made)] = (made, form.show())
        return made


def sources(programs: Sequence[TileProgram], names: Sequence[str], target: Target) -> list[str]:
    """What is printed for one kernel."""
    if target.language == "triton":
        return [
            print_triton(p, names, target, v, f"k{n}").text for n, p in enumerate(programs) for v in usual(p)
        ]
    return [source.text for source in print_units(programs, names, target)]


def shown_step(step: Step) -> str:
    """One step of a cover."""
    if isinstance(step, Kernel):
        ops = ", ".join(f"%{v.id}" for op in step.ops for v in op.outputs)
        return f"kernel {ops} -> {list(step.outputs)}"
    if isinstance(step, LibraryStep):
        call = step.op.call
        return f"call {call.name if call else step.op.name} {list(step.op.inputs)} -> {list(step.op.outputs)}"
    return f"view {step.value} of {step.source} {step.layout} {step.offset}"


def shown(x: object) -> str:
    """A value with every field, one a line."""
    if not is_dataclass(x) or isinstance(x, type):
        return str(x)
    return "\n".join([str(x), *(f"  {f.name} = {getattr(x, f.name)!r}" for f in fields(x))])


def as_captured(
    gm: fx.GraphModule, frozen: Mapping[str, Tensor], done: Compiled, options: Options
) -> Compiled:
    """What runs of a step of training, so that its other pass is compiled as well."""
    return replace(done, executable=Captured(gm, frozen))


@contextmanager
def recording(machine: str) -> Generator[Recorder]:
    """Compile for a machine by its preset's name, and keep what is decided."""
    recorder = Recorder()
    target = preset(machine)

    def machine_of(place: DevicePlace, options: Options) -> Target:
        return target

    plain = solver.lower
    with (
        mock.patch.object(compiler, "machine_of", machine_of),
        mock.patch.object(
            KernelBuilder, "built", lambda self, *args, **given: recorder.built(self, *args, **given)
        ),
        mock.patch.object(solver, "lower", partial(recorder.lowered, plain=plain)),
        watch_compilations(as_captured),
    ):
        yield recorder


def digest(texts: Texts) -> str:
    """Of all parts."""
    whole = hashlib.sha256()
    for name in sorted(texts):
        whole.update(f"{name}\n{texts[name]}\n".encode())
    return whole.hexdigest()[:16]
