"""The law of memory in plans, checked: every buffer that is read is there and holds the value that it is read as.

A buffer without a source owns memory; the others are views of one that does, or results of calls that are. What owns
memory has a version, which a write into it raises, a kernel's into the memory of an operand among them. A value is
the version that its buffer was made with: who reads a buffer whose memory has another version by now would get
another value. Kernels and copies make each buffer once, before any reader; nothing is touched before its memory is
taken or after it is given back; two buffers share a part of the arena only if one is done before the other begins;
and no arena leaves its plan. Launches of one list are one program, and none of them touches memory that another one
writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch._ops import OpOverload

from tilewright.errors import VerifyError
from tilewright.ir.graph import LibraryCall, Operand

from .data import CallStep, Copy, Home, Launch, Launches, Plan, PlanSegment, Step, View

_GIVEN = (Home.INPUT, Home.CONSTANT)


def check_memory(plan: Plan) -> None:
    """Raise VerifyError, with the step and the buffer, unless `plan` keeps the law of memory."""
    walk = _Walk(plan)
    for number, segment in enumerate(plan.segments):
        walk.segment(number, segment)
    walk.leave()


def written_operands(call: LibraryCall) -> tuple[int, ...]:
    """The operands, by number, whose memory a call writes into: as its schema says, else the one it reuses."""
    if call.function is call.over:
        return (0,)
    schema = getattr(call.function, "_schema", None) if isinstance(call.function, OpOverload) else None
    if schema is None:
        return (call.reuses,) if call.reuses is not None and call.reuses >= 0 else ()
    named = dict(call.kwargs)
    given = [
        call.args[k] if k < len(call.args) else named.get(a.name) for k, a in enumerate(schema.arguments)
    ]
    written = (
        x for a, x in zip(schema.arguments, given, strict=True) if a.alias_info and a.alias_info.is_write
    )
    return tuple(
        o.index
        for x in written
        for o in (x if isinstance(x, (list, tuple)) else (x,))
        if isinstance(o, Operand)
    )


class _Walk:
    """What is true of each buffer while a plan runs step by step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.buffers = plan.buffers
        self.roots: list[int] = []
        for k, b in enumerate(plan.buffers):
            if b.source >= k:
                self.fail(k, "is a view of what is not there yet")
            self.roots.append(k if b.source < 0 else self.roots[b.source])
        self.made = {k: 0 for k, b in enumerate(plan.buffers) if b.home in _GIVEN}
        """The version of its memory that each buffer was made with."""
        self.versions = [0] * len(plan.buffers)
        self.stored = [0] * len(plan.buffers)
        """How many of these are changes by what is stored where something lies."""
        self.taken: set[int] = {k for k, b in enumerate(plan.buffers) if b.home is not Home.OUTPUT}
        """What has memory: tensors of their own get theirs when they are made."""
        self.gone: set[int] = set()
        self.overwritten = {self.roots[b] for b in _stored_views(plan)}
        """Memories in which results of kernels lie behind what lay there before."""
        self.bare: set[int] = set()
        """Views that kernels filled and that have no tensor yet."""
        self.number = self.clock = 0
        self.step = ""

    def fail(self, b: int, what: str, place: str = "") -> None:
        home = self.plan.buffers[b].home.value
        raise VerifyError(
            f"buffer b{b} ({home}) {what}", phase="plan", op=getattr(self, "step", ""), place=place
        )

    # --- steps ---

    def segment(self, number: int, segment: PlanSegment) -> None:
        """Go through a segment."""
        self.number, self.clock = number, 0
        if not segment.makes:
            self.taken |= {k for k, b in enumerate(self.buffers) if b.segment == number}
        for k, step in enumerate(segment.steps):
            self.taken |= set(segment.makes[k]) if segment.makes else set()
            for part, reads, writes, makes in _accesses(step):
                self.step = part
                stores = isinstance(step, (Launches, Copy))
                self.access(reads, writes, makes, kernel=isinstance(step, Launches), stores=stores)
            if isinstance(step, Launches):
                self.lists(step)
            self.step = f"what step {k} gives back"
            self.gone |= set(segment.frees[k]) if segment.frees else set()
        for m in segment.measures:
            self.step = f"the size {m.symbol}"
            self.read(m.buffer, kernel=False)

    def access(
        self, reads: Iterable[int], writes: Iterable[int], makes: Iterable[int], *, kernel: bool, stores: bool
    ) -> None:
        """One kernel, call, view or copy: what it reads, into which of that it writes, and what it makes."""
        reads, makes = tuple(reads), tuple(makes)
        for b in reads:
            self.read(b, kernel=kernel)
        for b in (*reads, *makes):
            self.clock = max(self.clock, self.buffers[self.roots[b]].start if self.in_arena(b) else 0)
        for b in (*reads, *makes):
            if self.in_arena(b) and not self.clock < self.buffers[self.roots[b]].end:
                self.fail(b, "is used when its part of the arena is another's")
        for b in writes:
            self.versions[self.roots[b]] += 1
            self.stored[self.roots[b]] += self.buffers[self.roots[b]].home is Home.INPUT
        for b in makes:
            if stores:
                self.store(b)
            else:
                self.make(b)

    def lists(self, step: Launches) -> None:
        """Launches that run at once need nothing of each other, and nothing of the arena is another's meanwhile."""
        for launches in (x for x in step.together() if len(x) > 1):
            self.step = f"a list of {len(launches)} times kernel {launches[0].kernel}"
            touched: Counter[int] = Counter()
            for _, reads, _, makes in map(_launch, launches):
                touched.update({self.roots[b] for b in (*reads, *makes)})
            for _, _, _, makes in map(_launch, launches):
                for b in makes:
                    if touched[self.roots[b]] > 1:
                        self.fail(b, "is made in one launch of a list, and another one touches its memory")
            times = [self.buffers[b] for b in touched if self.in_arena(b)]
            if times and max(b.start for b in times) >= min(b.end for b in times):
                self.fail(next(iter(touched)), "is used when its part of the arena is another's")

    def in_arena(self, b: int) -> bool:
        return self.buffers[self.roots[b]].home is Home.ARENA

    def read(self, b: int, *, kernel: bool) -> None:
        """A value is read; kernels address views without a tensor of their own."""
        root = self.roots[b]
        of = root if kernel and self.buffers[b].home is Home.VIEW else b
        while kernel and self.buffers[of].home is Home.VIEW:
            of = self.buffers[of].source
        if of not in self.made or root not in self.made or (not kernel and b in self.bare):
            self.fail(b, "is read before it is made")
        if of in self.gone or root in self.gone and kernel:
            self.fail(b, "is read after its memory was given back")
        if self._is_shown(b):
            if self.buffers[b].version != self.versions[root]:
                self.fail(b, "is read when its memory holds another value")
        elif self.made[of] != self.versions[root]:
            self.fail(b, "is read after something else was written there")
        if self.in_arena(b) and self.buffers[root].segment != self.number:
            self.fail(b, "lies in the arena of another segment")

    def _is_shown(self, b: int) -> bool:
        """Whether a buffer is a view of an input's memory, or of another's in which results of kernels lie."""
        root = self.roots[b]
        changes = self.buffers[root].home is Home.INPUT or root in self.overwritten
        return self.buffers[b].home is Home.VIEW and changes

    def store(self, b: int) -> None:
        """A kernel or a copy fills a buffer: memory of its own, or some where another one lies."""
        if not self._is_shown(b):
            self.make(b)
            return
        root = self.roots[b]
        self.versions[root] += 1
        self.stored[root] += 1
        home = self.buffers[root].home
        if root not in self.made or root in self.gone:
            self.fail(
                b, "is stored where no input is" if home is Home.INPUT else "is stored where nothing is"
            )
        if home is Home.CONSTANT:
            self.fail(b, "is stored over a constant")
        if home is Home.INPUT and self.buffers[root].index not in self.plan.written:
            self.fail(b, "is stored into an input that the program does not write")
        if self.buffers[b].version != self.versions[root]:
            self.fail(b, "is stored in another order than the program's")
        if b not in self.made:
            self.bare.add(b)
        self.made[b] = self.versions[root]

    def make(self, b: int) -> None:
        """A value comes to be."""
        root, home = self.roots[b], self.buffers[b].home
        if home is Home.INPUT:
            self.versions[b] += 1
            return
        if b in self.made and b not in self.bare:
            self.fail(b, "is made twice")
        if b in self.bare:
            self.bare.discard(b)
            return
        if home is Home.CONSTANT:
            self.fail(b, "is written, and is a constant")
        if root not in self.taken:
            self.fail(b, "is made before it has memory")
        if root != b and root not in self.made:
            self.fail(b, "shows what is not made yet")
        if self.in_arena(b) and self.buffers[root].segment != self.number:
            self.fail(b, "lies in the arena of another segment")
        self.made[b] = self.versions[root]

    def leave(self) -> None:
        """What the caller gets."""
        for k, b in enumerate(self.plan.outputs):
            if not isinstance(b, int):
                continue
            self.step = f"output {k}"
            root = self.roots[b]
            if self.buffers[root].home is Home.ARENA:
                self.fail(b, "leaves the plan, and its memory does not")
            if b not in self.made or b in self.bare:
                self.fail(b, "leaves the plan and is never made")
            if b in self.gone:
                self.fail(b, "leaves the plan after its memory was given back")
            if self.buffers[b].version != self.stored[root]:
                self.fail(b, "leaves the plan and was stored over")
            if self.buffers[root].home is not Home.INPUT and self.made[b] != self.versions[root]:
                self.fail(b, "leaves the plan after something else was written there")


def _stored_views(plan: Plan) -> Iterator[int]:
    """What kernels store where another buffer lies."""
    steps = (step for segment in plan.segments for step in segment.steps)
    for x in (x for step in steps if isinstance(step, Launches) for x in step.launches):
        for b in x.params[len(x.params) - x.stores :]:
            if plan.buffers[b].home is Home.VIEW:
                yield b


_Access = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _accesses(step: Step) -> Iterator[_Access]:
    """The parts of a step in order: a name, what it reads, into which operands it writes, what it makes."""
    match step:
        case Launches():
            for x in step.launches:
                yield _launch(x)
        case CallStep():
            written = tuple(step.inputs[k] for k in written_operands(step.call) if k < len(step.inputs))
            yield f"{step.call.name} {step.place}".rstrip(), step.inputs, written, step.outputs
        case View():
            yield f"the view b{step.buffer}", (), (), (step.buffer,)
        case Copy():
            yield f"the copy of b{step.source}", (step.source,), (), (step.target,)


def _launch(x: Launch) -> _Access:
    loads = x.params[: len(x.params) - x.stores]
    return f"kernel {x.kernel}", loads, (), x.params[len(x.params) - x.stores :]
