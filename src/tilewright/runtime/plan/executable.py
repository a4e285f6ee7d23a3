"""The callable: checks what it is given, finds the sizes, runs the plan. Safe to call from several threads."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from tilewright.errors import InputError
from tilewright.ir.expr import Expr
from tilewright.ir.sizes.host import Number, number, size
from tilewright.plan.bind import names_in
from tilewright.plan.data import Binding, Home, Launches, Plan, Spec
from tilewright.runtime.cpu.native_call import Outside
from tilewright.runtime.stats import STATS
from tilewright.tuning.input_limits import KEPT_MEMORY

from .arguments import (
    Argument,
    check_apart,
    check_out,
    check_placed,
    check_real,
    check_surroundings,
    check_tensor,
    reader_of,
    solve,
    symbols_of_plan,
)
from .bound import BoundSegment, Workspace, check_preconditions
from .launch import Unit, raise_error
from .tensors import copy_into, lay_out, memory_range, same_layout, torch_dtype
from .verified import Checks

Result = Tensor | int | float | bool | None
Quick = Callable[[list[Argument]], list[Result] | None]
Join = Callable[[Workspace], None]
"""Makes of what a workspace does one native call, where it can."""


def _is_quick(plan: Plan) -> bool:
    steps = [step for segment in plan.segments for step in segment.steps]
    if (
        plan.placed
        or len(plan.segments) != 1
        or not all(isinstance(step, Launches) for step in steps)
        or plan.written
    ):
        return False
    if any(plan.segments[0].makes):
        return False
    outputs = [o for o in plan.outputs if isinstance(o, int) and plan.buffers[o].home is Home.OUTPUT]
    return len(set(outputs)) == len(plan.outputs) > 0


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether these are the strides of a tensor that torch calls contiguous, which is cheaper to ask."""
    dense = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return same_layout(shape, dense, strides)


def _never(args: list[Argument]) -> None:
    """The quick run of what has none."""


class Bound:
    """A plan whose input sizes are known: what the inputs must look like, and the parts that do the work."""

    keep_bytes = KEPT_MEMORY.max_workspace_bytes

    def __init__(
        self, plan: Plan, sizes: dict[str, Number], unit: Unit | None, constants: Sequence[Tensor],
        checks: Checks | None = None, join: Join | None = None,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.join = join
        self.sizes = sizes
        self.constants = constants
        self.unit = unit
        self.first = BoundSegment(plan, plan.segments[0], 0, sizes, unit, checks)
        layouts = self.first.layouts
        self.inputs = tuple((k, b, layouts.strides[b]) for k, b in enumerate(plan.arguments) if b >= 0)
        self.free: list[Workspace] = []
        self.retains = False
        """Whether workspaces are kept for the next call: these are the sizes seen last, and they need little memory."""
        self.quick = _is_quick(plan) and checks is None
        """Whether kernels are all there is to run, and all results are tensors of their own."""
        places = {b: k for k, (b, *_) in enumerate(self.first.outputs)}
        self.order = tuple(places[o] for o in plan.outputs if isinstance(o, int)) if self.quick else ()
        self.run: Quick | None = (self.native_run() or self.quick_run()) if self.quick else None

    def pool(self) -> list[Workspace]:
        """The workspaces that a call may take now, and where it puts back what it has used."""
        return self.free

    def shared(self) -> list[Workspace] | None:
        """The pool, if it is the same for all calls."""
        return self.free

    def workspace(self) -> Workspace:
        """One that nobody uses."""
        try:
            return self.pool().pop()
        except IndexError:
            return self.fresh()

    def fresh(self) -> Workspace:
        """A new one."""
        made = Workspace(self.first, self.constants)
        if self.join is not None:
            self.join(made)
        return made

    def give_back(self, workspace: Workspace) -> None:
        """What `workspace` gave is no longer used."""
        if self.retains:
            self.pool().append(workspace)

    def retain(self, keep: bool) -> None:
        """Whether to keep workspaces from now on, if they are small enough."""
        self.retains = keep and self.first.arena_bytes <= self.keep_bytes
        if not keep:
            self.free.clear()

    def native_run(self) -> Quick | None:
        """The whole run as one native function, if all of it is so short that it may keep other threads waiting."""
        if self.shared() is None or self.first.arena_bytes > KEPT_MEMORY.max_small_arena_bytes:
            return None
        inputs = [(k, b, None if dense else strides) for k, b, strides, dense in self._lying()]
        outputs = [(self.order.index(k), *made) for k, made in enumerate(self.first.outputs)]
        found = self.fresh().native_call(Outside(inputs, outputs, self.first.make, raise_error))
        return cast(Quick | None, found)  # it takes what the plan says

    def _lying(self) -> list[tuple[int, int, tuple[int, ...], bool]]:
        """Place, buffer and strides of each input, and whether these are contiguous."""
        shapes = self.first.layouts.shapes
        return [(k, b, strides, _is_dense(shapes[b], strides)) for k, b, strides in self.inputs]

    def quick_run(self) -> Quick:
        """The whole run where `quick`, as a function with everything at hand. It gives None if an input lies in memory
        in another way than compiled for."""
        inputs = self._lying()
        outputs, order, pool, make = self.first.outputs, self.order, self.pool, self.first.make
        ordered = order == tuple(range(len(outputs)))

        shared, only = self.shared(), outputs[0] if len(outputs) == 1 else None

        def run(args: list[Argument]) -> list[Result] | None:
            free = pool() if shared is None else shared
            try:
                workspace = free.pop()
            except IndexError:
                workspace = self.fresh()
            bases = workspace.bases
            for k, b, strides, dense in inputs:
                t: Tensor = args[k]  # pyright: ignore[reportAssignmentType]  (a cast would be one more call)
                if not (t.is_contiguous() if dense else t.stride() == strides):
                    free.append(workspace)
                    return None
                bases[b] = t.data_ptr()
            if only is not None:
                b, shape, layout, dtype = only
                t = make(shape, layout, dtype)
                bases[b] = t.data_ptr()
                made: list[Result] = [t]
            else:
                made = []
                for b, shape, layout, dtype in outputs:
                    t = make(shape, layout, dtype)
                    bases[b] = t.data_ptr()
                    made.append(t)
            for launch in workspace.runs:
                if code := launch():
                    raise_error(code)
            args.clear()
            if self.retains:
                free.append(workspace)
            return made if ordered else [made[k] for k in order]

        return run


@dataclass(frozen=True, slots=True)
class Guards:
    """Who sees that inputs fit a plan: a `trusted` caller, who has checked their sizes, types and devices (Dynamo's
    guards, or our own), or the executable, for which sizes must also lie in the ranges of their symbols and fulfil
    `conditions`."""

    trusted: bool = False
    conditions: tuple[Expr, ...] = ()


TRUSTED = Guards(trusted=True)
CHECKED = Guards()


class Executable:
    """Runs `plan` with built kernels `unit` and frozen tensors `constants`."""

    _boxed_call = True  # torch's sign that the list of arguments may be emptied

    def __init__(
        self,
        plan: Plan,
        constants: Sequence[Tensor] = (),
        unit: Unit | None = None,
        *,
        guards: Guards = CHECKED,
        checks: Checks | None = None,
        join: Join | None = None,
    ) -> None:
        self.checks = checks
        self.join = join
        self.record: object = None
        self.plan = plan
        self.constants = tuple(constants)
        self.unit = unit
        self.guards = guards
        self._tables: OrderedDict[tuple[object, ...], Bound] = OrderedDict()
        self._lock = threading.Lock()
        self._recent: Bound | None = None
        self._readers = tuple(reader_of(b) for b in plan.bindings)
        self._fixed = guards.trusted and not self._readers
        self._tensors = tuple(k for k, s in enumerate(plan.inputs) if isinstance(s, Spec))
        self._template: list[Tensor | None] = [None] * len(plan.buffers)
        self._constants = tuple((k, b.index) for k, b in enumerate(plan.buffers) if b.home is Home.CONSTANT)
        self._single = len(plan.segments) == 1

    # --- calling ---

    @property
    def written(self) -> tuple[int, ...]:
        """The inputs that it writes into."""
        return self.plan.written

    def entry(self) -> Callable[[list[Argument]], list[Result]]:
        """`__call__` as a plain function, which Python calls faster than an object."""
        if not self._fixed:
            return self

        def first(args: list[Argument]) -> list[Result] | None:
            nonlocal quick
            quick = self._bind(args).run or _never  # there are no other sizes
            return quick(args)

        quick: Quick = first

        def run(args: list[Argument]) -> list[Result]:
            check_surroundings(args)
            made = quick(args)
            return self(args) if made is None else made

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    def __call__(self, args: list[Argument], out: Sequence[Tensor | None] | None = None) -> list[Result]:
        """Run on `args` (the plan's inputs in order); the list is emptied, so that the plan can free what it has read.

        `out` are tensors for the outputs that are tensors, in order (None: made here). Raises InputError for inputs
        that do not fit."""
        check_surroundings(args)
        bound = self._recent if self._fixed else None
        if bound is None:
            bound = self._bind(args)
        if bound.run is not None and out is None:
            made = bound.run(args)
            if made is not None:
                return made
        if self.plan.placed:
            check_placed(self.plan, bound.sizes, args)
        tensors = self._template[:]
        for k, b, _ in bound.inputs:
            tensors[b] = cast(Tensor | None, args[k])
        back = self._lay(bound, args, tensors)
        for b, index in self._constants:
            tensors[b] = self.constants[index]
        late = self._place_outputs(bound, tensors, out) if out is not None else ()
        args.clear()
        results = self._run(bound, tensors)
        for original, laid in back:
            copy_into(original, laid)
        for given, k in late:
            made = results[k]
            assert isinstance(made, Tensor)
            copy_into(given, made)
            results[k] = given
        return results

    def _run(self, bound: Bound, tensors: list[Tensor | None]) -> list[Result]:
        sizes = bound.sizes
        part = bound.first
        held: list[Workspace] = []
        for place, segment in enumerate(self.plan.segments):
            if place:
                part = BoundSegment(self.plan, segment, place, sizes, self.unit, self.checks)
                part.receive_measured(self.plan.segments[place - 1], tensors)
            workspace = bound.workspace() if not place else Workspace(part, self.constants)
            held.append(workspace)
            part.allocate_outputs(tensors)
            for b, view in workspace.views:
                tensors[b] = view
            for b in workspace.addressed:
                if b < len(tensors) and (t := tensors[b]) is not None:
                    workspace.bases[b] = t.data_ptr()
            for act in workspace.acts:
                act(tensors)
            if segment.measures:
                sizes = dict(sizes)
                for m in segment.measures:
                    found = tensors[m.buffer]
                    sizes[m.symbol] = found.shape[m.dim] if isinstance(found, Tensor) else found  # pyright: ignore[reportArgumentType]  (a number, as the plan says)
        results = [_result(o, tensors, sizes) for o in self.plan.outputs]
        bound.give_back(held[0])
        return results

    # --- sizes ---

    def _bind(self, args: Sequence[Argument]) -> Bound:
        if self.guards.trusted:
            key: tuple[object, ...] = tuple([read(args) for read in self._readers])
        else:
            try:
                key = tuple([
                    (a.shape, a.dtype, a.is_cpu or a.device, a.__class__) if isinstance(a, Tensor) else (type(a), a)
                    for a in args
                ])  # fmt: skip
            except TypeError as error:
                raise InputError(f"an input cannot be used: {error}", phase="input") from error
        bound = self._tables.get(key)
        if bound is None:
            return self._miss(key, args)
        if bound is not self._recent:
            self._use(bound)
        return bound

    def _use(self, bound: Bound) -> None:
        """Keep workspaces only of the sizes seen last."""
        recent, self._recent = self._recent, bound
        if recent is not None:
            recent.retain(False)
        bound.retain(True)

    def _miss(self, key: tuple[object, ...], args: Sequence[Argument]) -> Bound:
        check_real(args)  # once: Dynamo's guards and our keys know the class of each tensor
        sizes = solve(self.plan.bindings, args, self._readers) if self.guards.trusted else self._checked(args)
        bound = self.bound(sizes)
        STATS.plan_misses += 1
        with self._lock:
            self._tables[key] = bound
            while len(self._tables) > KEPT_MEMORY.max_size_tables:
                self._tables.popitem(last=False)
        self._use(bound)
        return bound

    def bound(self, sizes: dict[str, Number]) -> Bound:
        """The plan for exact sizes."""
        return Bound(self.plan, sizes, self.unit, self.constants, self.checks, self.join)

    def bound_for(self, args: Sequence[Argument]) -> Bound:
        """The plan for the sizes of `args`."""
        return self._bind(args)

    def rebound(self, bindings: Sequence[Binding]) -> Executable:
        """The same for callers that are trusted, with sizes found in another way."""
        return Executable(
            replace(self.plan, bindings=tuple(bindings)), self.constants, self.unit, guards=TRUSTED,
            checks=self.checks, join=self.join,
        )  # fmt: skip

    def _checked(self, args: Sequence[Argument]) -> dict[str, Number]:
        """The sizes that `args` determine. Raises InputError unless every input fits the plan."""
        plan = self.plan
        if len(args) != len(plan.inputs):
            raise InputError(f"{len(args)} inputs were given, {len(plan.inputs)} are needed", phase="input")
        for k, (spec, a) in enumerate(zip(plan.inputs, args, strict=True)):
            if isinstance(spec, Spec):
                check_tensor(k, spec, a, "cpu" if k in plan.host else plan.device)
            elif not isinstance(a, (bool, int, float)):
                raise InputError(f"input {k} must be a number, not {type(a).__name__}", phase="input")
        sizes = solve(plan.bindings, args, self._readers)
        for k, (spec, a) in enumerate(zip(plan.inputs, args, strict=True)):
            if isinstance(spec, Spec):
                assert isinstance(a, Tensor)
                wanted = tuple(size(e, sizes) for e in spec.shape)
                if wanted != tuple(a.shape):
                    raise InputError(
                        f"input {k} has the shape {tuple(a.shape)}, {wanted} fits the other inputs",
                        phase="input", place=f"input {k}", hint=f"it was compiled for {list(spec.shape)}",
                    )  # fmt: skip
        self._check_sizes(sizes)
        return sizes

    def _check_sizes(self, sizes: dict[str, Number]) -> None:
        for s in symbols_of_plan(self.plan):
            value = sizes.get(s.name)
            if value is not None and (value < s.low or (s.high is not None and value > s.high)):
                raise InputError(
                    f"a size is {value}, outside its range {s.low} .. {s.high}", phase="input", place=s.name
                )
        check_preconditions(self.plan.segments[0], sizes)
        for c in self.guards.conditions:
            if sizes.keys() >= set(names_in((c,))) and not number(c, sizes):
                raise InputError(
                    f"the sizes do not fulfil {c}", phase="input", hint="the program was traced with it"
                )

    def admits(self, args: Sequence[Argument]) -> bool:
        """Whether `args` fit the plan."""
        try:
            self._checked(args)
        except InputError:
            return False
        return True

    def _lay(
        self, bound: Bound, args: Sequence[Argument], tensors: list[Tensor | None]
    ) -> list[tuple[Tensor, Tensor]]:
        """Copy inputs whose strides differ from those compiled for; returns (input, copy) of those written to."""
        back: list[tuple[Tensor, Tensor]] = []
        for k, _, strides in bound.inputs:
            t = args[k]
            if not isinstance(t, Tensor):
                continue  # torch passes None for a token that only orders effects
            if len(t.shape) != len(strides):
                t = tensors[self.plan.arguments[k]] = self._as_promised(bound, k, t)
            if t.stride() == strides or same_layout(t.shape, t.stride(), strides):
                continue
            laid = tensors[self.plan.arguments[k]] = lay_out(t, strides)
            STATS.input_copies += 1
            if k in self.plan.written:
                back.append((t, laid))
        return back

    def _as_promised(self, bound: Bound, k: int, t: Tensor) -> Tensor:
        """Input `k` with the dims for which it was compiled. A kernel of torch may leave out dims of size 1 that its
        declaration keeps (`vector_norm` of torch 2.11, over a dim counted from the end): the elements are the same."""
        spec = self.plan.inputs[k]
        shape = [size(e, bound.sizes) for e in spec.shape] if isinstance(spec, Spec) else []
        if [n for n in shape if n != 1] != [n for n in t.shape if n != 1]:
            raise InputError(
                f"{len(t.shape)} dims, torch promised {len(shape)}", phase="input", place=f"input {k}",
                hint="a kernel of torch gives another shape than its declaration says",
            )  # fmt: skip
        return t.view(shape)

    # --- outputs of the caller ---

    def _place_outputs(
        self, bound: Bound, tensors: list[Tensor | None], out: Sequence[Tensor | None]
    ) -> list[tuple[Tensor, int]]:
        """Let the plan write into `out` where it can; returns those that must be copied to afterwards."""
        wanted = [(k, o) for k, o in enumerate(self.plan.outputs) if o is not None]
        if len(out) != len(wanted):
            raise InputError(f"out has {len(out)} tensors, there are {len(wanted)} outputs", phase="input")
        ranges = [
            (f"input {k}", memory_range(t)) for k, b, _ in bound.inputs if (t := tensors[b]) is not None
        ]
        late: list[tuple[Tensor, int]] = []
        layouts = bound.first.layouts
        for given, (k, b) in zip(out, wanted, strict=True):
            if given is None:
                continue
            if not isinstance(b, int):
                raise InputError("out= needs outputs that are tensors", phase="input", place=f"output {k}")
            buffer = self.plan.buffers[b]
            shape = layouts.shapes[b] if not buffer.segment else None
            check_out(k, given, torch_dtype(buffer.spec.dtype), self.plan.device, shape)
            check_apart(k, given, ranges)
            fits = buffer.segment == 0 and same_layout(given.shape, given.stride(), layouts.strides[b])
            if fits and buffer.home is Home.OUTPUT and tensors[b] is None and not given.is_neg():
                tensors[b] = given
            else:
                late.append((given, k))
        return late


def _result(o: int | Expr | None, tensors: Sequence[Tensor | None], sizes: dict[str, Number]) -> Result:
    if isinstance(o, int):
        return tensors[o]
    return None if o is None else number(o, sizes)
