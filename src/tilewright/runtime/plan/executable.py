"""The callable: checks what it is given, finds the sizes, runs the plan. Safe to call from several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from tilewright.errors import InputError
from tilewright.ir.expr import Expr
from tilewright.ir.sizes.dims import ONE, ZERO
from tilewright.ir.sizes.host import Number, number, size
from tilewright.ir.sizes.repeats import same_repeats
from tilewright.plan.bind import names_in
from tilewright.plan.data import Binding, Home, Plan, Spec
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
    told_of_writes,
)
from .bound import BoundSegment, BuiltPlan, Workspace, check_preconditions
from .known_sizes import Bound, Join, Quick, Result, Shortest, never
from .launch import BuiltUnit
from .tensors import copy_into, lay_out, memory_range, same_layout, torch_dtype
from .verified import Checks


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
        unit: BuiltUnit | None = None,
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
        self.built = BuiltPlan(plan, unit, self.constants, checks)
        self.guards = guards
        self._tables: OrderedDict[tuple[object, ...], Bound] = OrderedDict()
        self._lock = threading.Lock()
        self._recent: Bound | None = None
        self._readers = tuple(reader_of(b) for b in plan.bindings)
        self._symbols = tuple(b.symbol for b in plan.bindings)
        self._are_sizes = all(b.scale is ONE and b.shift is ZERO for b in plan.bindings)
        """Whether what inputs tell are the sizes themselves."""
        self._fixed = guards.trusted and not self._readers
        self._tensors = tuple(k for k, s in enumerate(plan.inputs) if isinstance(s, Spec))
        self._template: list[Tensor | None] = [
            self.constants[b.index] if b.home is Home.CONSTANT else None for b in plan.buffers
        ]
        self._told = told_of_writes(plan)
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
            quick = self._bind(args).run or never  # there are no other sizes
            return quick(args)

        quick: Quick = first

        def run(args: list[Argument]) -> list[Result]:
            check_surroundings(args)
            made = quick(args)
            return self(args) if made is None else made

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    def shortest(self, args: Sequence[Argument]) -> Shortest | None:
        """The shortest way to run calls of the sizes of `args`: itself. None where there may be a much shorter one
        soon."""
        return Shortest(self)

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
        bound.place(tensors, args)
        workspace = bound.workspace()
        read = bound.read is not None and bound.read(args, workspace.address)
        back = () if read else self._lay(bound, args, tensors)
        late = self._place_outputs(bound, tensors, out) if out is not None else ()
        if self._told is not None:
            self._told(args)
        args.clear()
        results = self._run(bound, tensors, workspace, read=read)
        for original, laid in back:
            copy_into(original, laid)
        for given, k in late:
            made = results[k]
            assert isinstance(made, Tensor)
            copy_into(given, made)
            results[k] = given
        return results

    def _run(
        self, bound: Bound, tensors: list[Tensor | None], first: Workspace, *, read: bool
    ) -> list[Result]:
        """`read`: the first workspace knows where the inputs lie."""
        sizes = bound.sizes
        part = bound.first
        held: list[Workspace] = []
        for place, segment in enumerate(self.plan.segments):
            if place:
                part = BoundSegment(self.built, place, sizes, bound.first)
                part.receive_measured(self.plan.segments[place - 1], tensors)
            workspace = first if not place else Workspace(part)
            held.append(workspace)
            part.allocate_outputs(tensors)
            acts = workspace.acts
            for b, view in workspace.views:
                tensors[b] = view
            workspace.point(tensors, read=read and not place)
            for act in acts:
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
        """Keep workspaces only of the sizes seen last: they take over what those before had."""
        recent, self._recent = self._recent, bound
        spare = None
        if recent is not None:
            spare = recent.spare()
            recent.retain(False)
        bound.retain(True)
        if spare is not None:
            bound.take_over(spare)

    def _miss(self, key: tuple[object, ...], args: Sequence[Argument]) -> Bound:
        check_real(args)  # once: Dynamo's guards and our keys know the class of each tensor
        if not self.guards.trusted:
            sizes = self._checked(args)
        elif self._are_sizes:
            sizes = dict(zip(self._symbols, cast(tuple[Number, ...], key), strict=True))
        else:
            sizes = solve(self.plan.bindings, args, self._readers)
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
        return Bound(self.built, sizes, self.join, self._recent)

    def bound_for(self, args: Sequence[Argument]) -> Bound:
        """The plan for the sizes of `args`."""
        return self._bind(args)

    def sizes_of(self, args: Sequence[Argument]) -> dict[str, Number]:
        """The sizes that `args` determine, for which the plan need not be right: it is not run."""
        return solve(self.plan.bindings, args, self._readers)

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
        for k, strides in ((i.place, i.strides) for i in bound.table.inputs):
            t = args[k]
            if not isinstance(t, Tensor):
                continue  # torch passes None for a token that only orders effects
            if len(t.shape) != len(strides):
                t = tensors[self.plan.arguments[k]] = self._as_promised(bound, k, t)
            if t.stride() == strides or same_layout(t.shape, t.stride(), strides):
                continue
            if not same_repeats(t.shape, t.stride(), strides):
                raise InputError(
                    f"input {k} was compiled for elements that share places, strides {tuple(strides)}", phase="input",
                    place=f"input {k}", hint="compile with an example that is not expanded",
                )  # fmt: skip
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
            hint = "give a tensor for each output"
            raise InputError(
                f"out has {len(out)} tensors, there are {len(wanted)} outputs", phase="input", hint=hint
            )
        ranges = [
            (f"input {i.place}", memory_range(t))
            for i in bound.table.inputs
            if (t := tensors[i.slot]) is not None
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
