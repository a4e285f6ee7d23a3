"""A net for wrong results: each kernel and call of a plan is held against its meaning as the plan runs.

A kernel's meaning are its ops under the interpreter, rounded as eager rounds, beside the same in float64; a call's is
what the program asked for, run again on copies of the operands in their own types and in float64, with the same random
numbers. A loop's body is a plan of its own, whose steps are looked at one by one; then all of them are held against the
program's own loop, and what runs without Python against them. The fp64 rule decides; of few elements eager's error may
be nothing, so that `VERIFICATION.max_rule_ratio` is allowed. Slow, and for finding faults only: the first step that
differs is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from tilewright import accuracy
from tilewright.errors import BrokenPromise, IndexOutOfRange, VerifyError, WrongResult
from tilewright.interp import FLOATS, REALS
from tilewright.interp.algebra import Algebra
from tilewright.interp.evaluate import TensorEvaluator
from tilewright.interp.graph import to_torch
from tilewright.ir.graph import LibraryCall, Op, Origin, Value
from tilewright.ir.kernel import Cover, Kernel, LibraryStep
from tilewright.ir.sizes.host import Number, size
from tilewright.ir.writes import PlaceFromData
from tilewright.plan.data import CallStep, Home, Launch, Launches, Plan
from tilewright.plan.verify import written_operands
from tilewright.tuning.search_limits import VERIFICATION

from .call_results import Act, Tensors
from .tensors import memory_range

Level = bool | str
UNWRITTEN = "unwritten"
"""The level at which kernels run on results that are no numbers, and nothing is compared."""
Sizes = Mapping[str, Number]
Look = Callable[[int, Tensors], Tensor]
"""The tensor of a buffer while a plan runs."""


@dataclass(frozen=True, eq=False)
class Checks:
    """What each step of a plan means. Without `values`, only the memory of what calls give is looked at. Before one of
    `kernels` runs, its results are no numbers: what it leaves unwritten is not right by chance."""

    values: bool
    device: str
    """Where the plan runs. The interpreter computes on the CPU; what a call means is found where the call runs."""

    kind: str
    """Which graph of a program it is: inference, forward, backward, or the body of a loop."""
    buffers: tuple[tuple[Home, int], ...]
    """Home and source of each buffer."""
    kernels: Mapping[Launch, Kernel]
    plain: Mapping[int, LibraryCall]
    """What stands behind a call, by the call's identity. A loop for which there is nothing is looked at by its steps
    alone."""
    origins: tuple[Origin, ...] = ()
    """What was captured, as ops number it."""
    blind: Callable[[], bool] = lambda: False
    """Whether nothing can be looked at now."""

    @property
    def each_kernel(self) -> bool:
        """Whether kernels are launched one by one."""
        return bool(self.kernels)

    def around_launch(self, launch: Launch, act: Act, look: Look, sizes: Sizes) -> list[Act]:
        """Run a kernel and check what it makes."""
        kernel = self.kernels.get(launch)
        if kernel is None:
            return [act]
        count = len(launch.params) - launch.stores

        lines = dict(kernel.lines)

        def made(tensors: Tensors, given: Sequence[Tensor]) -> list[Tensor | None]:
            shown: list[Tensor | None] = [look(b, tensors) for b in launch.params[count:]]
            for k, place in lines.items():
                line, index = shown[k], given[kernel.inputs.index(place.index)]
                assert line is not None
                shown[k] = _at_place(line, int(index), place, sizes)
            return shown

        def spoiled(tensors: Tensors) -> list[Tensor]:
            given = [look(b, tensors) for b in launch.params[:count]]
            _spoil([t for t in made(tensors, given) if t is not None], given)
            return given

        def unwritten(tensors: Tensors) -> None:
            if not self.blind():
                spoiled(tensors)

        if not self.values:
            return [unwritten, act]

        def checked(tensors: Tensors) -> None:
            if self.blind():
                act(tensors)
                return
            given = spoiled(tensors)
            try:
                eager, exact = (_meaning(kernel, given, sizes, algebra) for algebra in (FLOATS, REALS))
            except (IndexOutOfRange, ZeroDivisionError):
                act(tensors)  # which says the same
                return
            act(tensors)
            for v, t in zip(kernel.outputs, made(tensors, given), strict=True):
                names = " + ".join(op.name for op in kernel.ops)
                origin = next(op for op in kernel.ops if v in op.outputs)
                what = f"kernel {launch.kernel}: {names}"
                place = self._place(origin)
                if t is not None:
                    self.check(t, eager[v], exact[v], what, origin.name, place)

        return [checked]

    def around_call(self, step: CallStep, acts: Sequence[Act], run: Callable[[CallStep], Act]) -> list[Act]:
        """Run a call (the first of `acts`), look whose memory its results are, and check what comes of the rest."""
        call, *rest = acts

        def aliases(tensors: Tensors) -> None:
            self._check_memory(step, tensors)

        meant = self.plain.get(id(step.call), step.call if step.call.loop is None else None)
        if not self.values or meant is None or not _is_comparable(step):
            return [call, aliases, *rest]
        plain = replace(step, call=replace(meant, spare=None))
        again = run(plain)

        def checked(tensors: Tensors) -> None:
            if self.blind():
                for act in acts:
                    act(tensors)
                return
            with self._same_numbers():
                eager = _again(again, step, tensors, wide=False)
            with self._same_numbers():
                exact = _in_double(again, plain, tensors)
            call(tensors)
            aliases(tensors)
            for act in rest:
                act(tensors)
            for b, e, r in zip(step.outputs, eager, exact or eager, strict=True):
                t = tensors[b]
                if isinstance(t, Tensor) and isinstance(e, Tensor) and isinstance(r, Tensor):
                    exactly = r if r.dtype is torch.float64 else e
                    self.check(t, e, exactly, step.call.name, step.call.name, step.place)

        return [checked]

    def _check_memory(self, step: CallStep, tensors: Tensors) -> None:
        """Raise BrokenPromise where a result is memory that the plan takes for another's, or is not its operand's."""
        operands = {_storage(tensors[b]) for b in step.inputs} - {0}
        seen: set[int] = set()
        for k, b in enumerate(step.outputs):
            home, source = self.buffers[b]
            at = _storage(tensors[b])
            if home is not Home.LIBRARY or not at:
                continue
            if source >= 0 and at != _storage(tensors[source]):
                raise self._broken(step, f"result {k} is memory of its own, that of an operand was promised")
            if source < 0 and not step.guarded and at in operands | seen:
                raise self._broken(step, f"result {k} is memory of an operand or of another result")
            seen.add(at)

    def _same_numbers(self) -> AbstractContextManager[None]:
        """What is drawn meanwhile is drawn again behind it."""
        where = torch.device(self.device)
        mine = [where.index or 0] if where.type == "cuda" else []
        return torch.random.fork_rng(mine, device_type="cuda")

    def _broken(self, step: CallStep, what: str) -> BrokenPromise:
        return BrokenPromise(
            f"{what}, in the {self.kind} graph", phase="run", op=step.call.name, place=step.place,
            hint="its schema says otherwise",
        )  # fmt: skip

    def _place(self, op: Op) -> str:
        """Where the user's source says what an op computes, if that is known."""
        return self.origins[op.origin].place if 0 <= op.origin < len(self.origins) else ""

    def check(self, made: Tensor, eager: Tensor, exact: Tensor, op: str, name: str, place: str = "") -> None:
        """Raise WrongResult unless a result errs by rounding alone."""
        made, eager, exact = made.detach().cpu(), eager.detach().cpu().to(made.dtype), exact.detach().cpu()
        wide = exact.double() if made.is_floating_point() else exact
        verdict = accuracy.compare(made, eager, wide)
        if (
            verdict.passed
            or verdict.relative_k <= VERIFICATION.max_rule_ratio * verdict.k
            or _in_ulps(made, wide) <= VERIFICATION.max_roundings
        ):
            return
        what = f"{name} gave another result in the {self.kind} graph: {verdict}"
        hint = "a fault of Tilewright or of the library: the options of this compilation and the inputs reproduce it"
        raise WrongResult(what, phase="run", op=op, place=place, hint=hint)


def checks_of(cover: Cover, plan: Plan, level: Level, kind: str) -> Checks | None:
    """The checks of a plan at a level of the option `verify`, the graph of that `kind`. Raises VerifyError if plan
    and cover do not fit."""
    if not level:
        return None
    buffers, where = tuple((b.home, b.source) for b in plan.buffers), plan.device
    steps = [step for segment in plan.segments for step in segment.steps]
    if level is not True and level != UNWRITTEN:
        return (
            Checks(False, where, kind, buffers, {}, {})
            if any(isinstance(step, CallStep) for step in steps)
            else None
        )
    kernels = [step for step in cover.steps if isinstance(step, Kernel)]
    launches = [x for step in steps if isinstance(step, Launches) for x in step.launches]
    if len(kernels) != len(launches):
        raise VerifyError(f"{len(launches)} launches for {len(kernels)} kernels", phase="plan")
    by_launch = dict(zip(launches, kernels, strict=True))
    if level == UNWRITTEN:
        return Checks(False, where, kind, buffers, by_launch, {})
    calls = [step.op.call for step in cover.steps if isinstance(step, LibraryStep) and step.op.call]
    plain = {id(c): c.spare.call for c in calls if c.spare is not None and c.spare.call is not None}
    plain |= {id(c): meant for c in calls if (meant := _meant(c)) is not None}
    return Checks(True, where, kind, buffers, by_launch, plain, cover.graph.origins)


def _spoil(results: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """No numbers in results that are not an operand's memory."""
    taken = [memory_range(t) for t in given]
    for t in results:
        start, end = memory_range(t)
        if t.is_floating_point() and all(end <= first or last <= start for first, last in taken):
            t.fill_(float("nan"))


def _at_place(line: Tensor, number: int, place: PlaceFromData, sizes: Sizes) -> Tensor | None:
    """The line that a kernel stores at place `number` of the memory at whose start `line` is; None outside."""
    count = int(size(place.count, sizes))
    if place.signed and number < 0:
        number += count
    if not 0 <= number < count:
        return None
    behind = number * int(size(place.step, sizes))
    return line.as_strided(line.shape, line.stride(), line.storage_offset() + behind)


def _meaning(kernel: Kernel, given: Sequence[Tensor], sizes: Sizes, algebra: Algebra) -> dict[Value, Tensor]:
    values = {v: algebra.load(t.cpu(), v.dtype) for v, t in zip(kernel.inputs, given, strict=True)}
    for op in kernel.ops:
        assert op.expr is not None
        operands = [values[v] for v in op.inputs]
        results = TensorEvaluator(op.expr, algebra, operands, dict(sizes)).run()
        values |= dict(zip(op.outputs, results, strict=True))
    found = {v: to_torch(np.asarray(values[v])) for v in kernel.outputs}
    return {v: t for v, t in found.items() if isinstance(t, Tensor)}


def _in_ulps(made: Tensor, exact: Tensor) -> float:
    if not made.is_floating_point() or made.shape != exact.shape or not made.numel():
        return float("inf")
    if not bool((made.isfinite() & exact.isfinite()).all()):
        return float("inf")
    unit = torch.finfo(made.dtype).eps * float(exact.abs().max())
    error = float((made.double() - exact).abs().max())
    return error / unit if unit else float("inf" if error else 0)


def _is_comparable(step: CallStep) -> bool:
    """Whether a call may be made twice: other processes do not take part, and storage is not addressed by place."""
    return not (step.call.is_collective or step.call.apart)


@runtime_checkable
class Meant(Protocol):
    """A function that knows what means the same in plain torch, if that is asked of it."""

    meaning: Callable[..., object] | None


def _meant(call: LibraryCall) -> LibraryCall | None:
    """The call of a loop in plain torch. How often a loop with a condition runs may hang on a rounding, and one that
    draws random numbers draws them in its own order: nothing is held against these."""
    if call.loop is None or call.loop.conditional or not call.pure or not isinstance(call.function, Meant):
        return None
    return None if call.function.meaning is None else replace(call, function=call.function.meaning)


def _again(again: Act, step: CallStep, tensors: Tensors, *, wide: bool) -> list[Tensor | None]:
    """The results of a call on copies of its operands."""
    copies = list(tensors)
    for b in set(step.inputs):
        t = tensors[b]
        if t is not None:
            copy = _copied(t)
            copies[b] = copy.double() if wide and t.is_floating_point() else copy
    again(copies)
    return [copies[b] for b in step.outputs]


def _copied(t: Tensor) -> Tensor:
    """The same numbers in the same layout, in memory of their own."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) if all(
        s or n < 2 for n, s in zip(t.shape, t.stride(), strict=True)
    ) else t.clone()  # fmt: skip


def _in_double(again: Act, step: CallStep, tensors: Tensors) -> list[Tensor | None] | None:
    """The same in float64; None where that is another function, or none."""
    function, widely = step.call.function, nullcontext()
    if step.call.loop is not None:
        widely = accuracy.float64_mode()
    elif not isinstance(function, OpOverload) or written_operands(step.call):
        return None
    elif torch.Tag.nondeterministic_seeded in function.tags or step.call.reason == "random":
        return None
    try:
        with widely:
            return _again(again, step, tensors, wide=True)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None


def _storage(t: object) -> int:
    return t.untyped_storage().data_ptr() if isinstance(t, Tensor) and t.numel() else 0
