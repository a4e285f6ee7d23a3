"""A plan whose input sizes are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

from torch import Tensor

from tilewright.ir.sizes.host import Number
from tilewright.plan.data import Home, Launches, Plan
from tilewright.runtime.cpu.native_call import Outside
from tilewright.runtime.objects.reading import Lies, table_of, table_reader
from tilewright.tuning.input_limits import KEPT_MEMORY

from .arguments import Argument
from .bound import BoundSegment, BuiltPlan, Workspace
from .launch import raise_error

Result = Tensor | int | float | bool | None
Quick = Callable[[list[Argument]], list[Result] | None]


class Shortest(NamedTuple):
    """The shortest `run` of calls of some sizes, which gives None where it does not serve them. As long as there is no
    shorter one, it is the same object. It looks itself whether the arguments `looked_at` are what they
    were: at the same address, of the same sizes, strides and type."""

    run: Quick
    looked_at: tuple[int, ...] = ()


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


def _runs(inputs: Sequence[Lies]) -> list[tuple[int, int, int]]:
    """Numbers of first argument and buffer, and how many follow each other: weights, as a rule, are one run."""
    found: list[tuple[int, int, int]] = []
    for i in inputs:
        if found and (i.place - found[-1][2], i.slot - found[-1][2]) == found[-1][:2]:
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((i.place, i.slot, 1))
    return found


def never(args: list[Argument]) -> None:
    """The quick run of what has none."""


class Bound:
    """A plan whose input sizes are known: what the inputs must look like, and the parts that do the work."""

    keep_bytes = KEPT_MEMORY.max_workspace_bytes

    def __init__(
        self,
        built: BuiltPlan,
        sizes: dict[str, Number],
        join: Join | None = None,
        before: Bound | None = None,
    ) -> None:
        """`before`: the plan under other sizes, of which is taken what has not changed."""
        self.built = built
        self.plan = plan = built.plan
        self.join = join
        self.sizes = sizes
        self.first = BoundSegment(built, 0, sizes, None if before is None else before.first)
        layouts = self.first.layouts
        if before is None:
            places = [(k, b) for k, b in enumerate(plan.arguments) if b >= 0]
            lies = [Lies(k, b, layouts.shapes[b], layouts.strides[b]) for k, b in places]
            self.table = table_of(lies)
            """How inputs must lie."""
            self._runs, self._numbers = _runs(lies), {b: n for n, (_, b) in enumerate(places)}
        else:
            self._runs, self._numbers = before._runs, before._numbers
            lies = list(before.table.inputs)
            changed = [n for b in layouts.changed if (n := self._numbers.get(b)) is not None]
            for n in changed:
                k, b = lies[n].place, lies[n].slot
                lies[n] = Lies(k, b, layouts.shapes[b], layouts.strides[b])
            self.table = table_of(lies, before.table, changed)
        self.read = table_reader(self.table)
        """Reads the addresses of all inputs, if they lie as compiled for."""
        self.free: list[Workspace] = []
        self.retains = False
        """Whether workspaces are kept for the next call: these are the sizes seen last, and they need little memory."""
        self.quick = (
            self.read is not None
            and built.checks is None
            and (_is_quick(plan) if before is None else before.quick)
        )
        """Whether kernels are all there is to run, and all results are tensors of their own."""
        self.order = before.order if before is not None else self._order() if self.quick else ()
        self.divided = False
        """Whether some kernel is worth a second thread, so that there is no native call."""
        self.run: Quick | None = (self.native_run(before) or self.quick_run()) if self.quick else None

    def _order(self) -> tuple[int, ...]:
        """Which of what is made each result is."""
        places = {b: k for k, (b, *_) in enumerate(self.first.outputs)}
        return tuple(places[o] for o in self.plan.outputs if isinstance(o, int))

    def is_divided_at(self, sizes: Mapping[str, Number]) -> bool:
        """Whether it is most likely `divided` under other sizes, none of which is smaller."""
        return self.divided and all(n >= self.sizes.get(name, n) for name, n in sizes.items())

    def place(self, tensors: list[Tensor | None], args: Sequence[Argument]) -> None:
        """Put the inputs among the tensors of a run."""
        for k, b, count in self._runs:
            tensors[b : b + count] = cast(Sequence[Tensor | None], args[k : k + count])

    def pool(self) -> list[Workspace]:
        """The workspaces that a call may take now, and where it puts back what it has used."""
        return self.free

    def shared(self) -> list[Workspace] | None:
        """The pool, if it is the same for all calls."""
        return self.free

    def workspace(self) -> Workspace:
        """One that nobody uses."""
        found = self.spare()
        if found is None:
            return self.fresh()
        pending, found.pending = found.pending, None
        if pending is not None:
            pending()
        return found

    def fresh(self) -> Workspace:
        """A new one."""
        return self._ready(Workspace(self.first))

    def _ready(self, made: Workspace) -> Workspace:
        if self.join is not None:
            self.join(made)
        return made.prepare()

    def spare(self) -> Workspace | None:
        """One that nobody uses, which other sizes may have; None where none is kept."""
        try:
            return self.pool().pop()
        except IndexError:
            return None

    def take_over(self, spare: Workspace) -> None:
        """Keep what other sizes had, if it fits."""
        if spare.resize(self.first):
            self.give_back(self._ready(spare))

    def give_back(self, workspace: Workspace) -> None:
        """What `workspace` gave is no longer used."""
        if self.retains:
            self.pool().append(workspace)

    def retain(self, keep: bool) -> None:
        """Whether to keep workspaces from now on, if they are small enough."""
        self.retains = keep and self.first.arena_bytes <= self.keep_bytes
        if not keep:
            self.free.clear()

    def native_run(self, before: Bound | None) -> Quick | None:
        """The whole run as one native function, if all of it is so short that it may keep other threads waiting. Who
        had none before for smaller sizes is not asked again."""
        if self.shared() is None or self.first.arena_bytes > KEPT_MEMORY.max_small_arena_bytes:
            return None
        if before is not None and before.is_divided_at(self.sizes):
            self.divided = True
            return None
        outputs = [(self.order.index(k), *made) for k, made in enumerate(self.first.outputs)]
        made = Workspace(self.first)
        found = made.native_call(Outside(self.table, outputs, self.first.make, raise_error))
        if found is None:
            self.divided = True
            self.free.append(self._ready(made))  # for the first run
        return cast(Quick | None, found)  # it takes what the plan says

    def quick_run(self) -> Quick:
        """The whole run where `quick`, as a function with everything at hand. It gives None if an input lies in memory
        in another way than compiled for."""
        outputs, order, pool, make = self.first.outputs, self.order, self.pool, self.first.make
        ordered = order == tuple(range(len(outputs)))

        shared, only = self.shared(), outputs[0] if len(outputs) == 1 else None

        read = self.read
        assert read is not None

        def run(args: list[Argument]) -> list[Result] | None:
            free = pool() if shared is None else shared
            try:
                workspace = free.pop()
            except IndexError:
                workspace = self.fresh()
            if not read(args, workspace.address):
                free.append(workspace)
                return None
            bases = workspace.bases
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
