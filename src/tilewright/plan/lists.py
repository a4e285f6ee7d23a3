"""Which kernels of a cover are one launch: kernels of one program that need nothing of each other.

A step of an optimizer has a kernel for each of hundreds of tensors, and few of these kernels differ. Each costs a
launch, and at its beginning and its end most of the machine waits. So kernels that are alike come together: each is
moved up to the last of its like, unless a step between the two reads what it writes, or writes what it reads or writes.

What may be in one memory counts as one: views, what a call gives back of its operand, and an input with what is written
to it. Nothing moves past a call, nor past a kernel that may find a fault in its data or stores at places from data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from tilewright.analysis.size_hints import SizeHints
from tilewright.analysis.writes.law import may_fail, reused_operand
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Step, ViewStep, results_of
from tilewright.tuning.thresholds import LISTS


def with_lists(cover: Cover, alike: Callable[[Kernel], Hashable], hints: SizeHints) -> Cover:
    """The cover with its steps in an order in which kernels of a list follow each other. Kernels are `alike` where it
    gives equal keys; `hints` says how large what they make is."""
    kernels = [step for step in cover.steps if isinstance(step, Kernel)]
    if len(kernels) < LISTS.min_kernels:
        return cover
    keys = {kernel: alike(kernel) for kernel in kernels}
    counts = Counter(keys.values())
    keys = {kernel: key for kernel, key in keys.items() if counts[key] >= LISTS.min_kernels}
    if not keys:
        return cover
    slots = _Slots(cover, hints)
    for step in cover.steps:
        slots.put(step, keys.get(step) if isinstance(step, Kernel) else None)
    lists = {
        step: number
        for number, slot in enumerate(slots.slots)
        for step in slot.steps
        if isinstance(step, Kernel) and len(slot.steps) >= LISTS.min_kernels
    }
    return replace(cover, steps=tuple(step for slot in slots.slots for step in slot.steps), lists=lists)


@dataclass
class _Slot:
    """Steps of which none needs anything of another one, the parameters of their launch, and how many bytes they make
    that end with the plan."""

    steps: list[Step]
    params: int = 0
    made_bytes: int = 0


@dataclass
class _Slots:
    """The new order of a cover's steps, as far as it was looked at."""

    cover: Cover
    hints: SizeHints
    slots: list[_Slot] = field(default_factory=list[_Slot])

    def __post_init__(self) -> None:
        graph = self.cover.graph
        self.kept = graph.kept()
        self.owner: dict[Value, Value] = {}
        self.target = {w.value: graph.inputs[w.input] for w in graph.writes}
        self.read: dict[object, int] = {}
        """The last slot that reads a memory."""
        self.written: dict[object, int] = {}
        """The last slot that writes it."""
        self.open: dict[Hashable, int] = {}
        """The last list of each key."""
        self.first = 0
        """The first slot that a kernel may be moved to."""
        self.stores_lines = _stored_by_calls(self.cover)

    def put(self, step: Step, key: Hashable | None) -> None:
        """Put a step behind those before it, or, if it is a kernel with a `key`, among its like."""
        reads, writes = self._touched(step)
        fixed = isinstance(step, LibraryStep) or (isinstance(step, Kernel) and self._is_fixed(step))
        place = None if fixed or key is None else self._place(step, key, reads, writes)
        if place is None:
            place = len(self.slots)
            self.slots.append(_Slot([]))
            if key is not None and not fixed:
                self.open[key] = place
        slot = self.slots[place]
        slot.steps.append(step)
        if isinstance(step, Kernel):
            slot.params += _params(step)
            slot.made_bytes += self._made_bytes(step)
        if fixed:
            self.first = place + 1
        self.read |= {v: max(place, self.read.get(v, 0)) for v in reads}
        self.written |= {v: max(place, self.written.get(v, 0)) for v in writes}

    def _place(self, step: Step, key: Hashable, reads: set[object], writes: set[object]) -> int | None:
        """The list that a kernel can join."""
        place = self.open.get(key, -1)
        needed = [self.written.get(v, -1) for v in reads | writes] + [self.read.get(v, -1) for v in writes]
        if place < self.first or place <= max(needed, default=-1):
            return None
        slot = self.slots[place]
        assert isinstance(step, Kernel)
        if slot.params + _params(step) > LISTS.max_list_operands:
            return None
        more = self._made_bytes(step)
        return place if not more or slot.made_bytes + more <= LISTS.max_made_bytes else None

    def _is_fixed(self, kernel: Kernel) -> bool:
        """Whether a kernel stays where it is, and others on their side of it."""
        lines = bool(kernel.lines) or not self.stores_lines.isdisjoint(kernel.outputs)
        return lines or any(map(may_fail, kernel.ops))

    def _made_bytes(self, kernel: Kernel) -> int:
        """Bytes that a kernel makes and that lie in the arena until its list is done."""
        inner = [v for v in kernel.outputs if v not in self.kept and v not in self.target]
        return sum(self.hints.estimate(v.numel) * v.dtype.bytes for v in inner)

    def _touched(self, step: Step) -> tuple[set[object], set[object]]:
        """The memories that a step reads, and those that it writes."""
        shown: Value | None = None
        reads: tuple[Value, ...] = ()
        match step:
            case Kernel():
                reads = step.inputs
            case ViewStep():
                shown, reads = step.source, (step.source,)
            case LibraryStep():
                reads = step.op.inputs
                k = reused_operand(step.op.call) if step.op.call is not None else None
                shown = reads[k] if k is not None and 0 <= k < len(reads) else None
        made = results_of(step)
        if shown is not None:
            self.owner |= dict.fromkeys(made, self._memory(shown))
        writes: set[object] = {*map(self._memory, made)}
        writes |= {self._memory(v) for m in made if isinstance(v := self.target.get(m), Value)}
        return {*map(self._memory, reads)}, writes

    def _memory(self, v: Value) -> Value:
        return self.owner.get(v, v)


def _params(kernel: Kernel) -> int:
    return len(kernel.inputs) + len(kernel.outputs)


def _stored_by_calls(cover: Cover) -> set[Value]:
    """Values that calls put into a part of an input: their kernels may do it for them."""
    found: set[Value] = set()
    for op in (step.op for step in cover.steps if isinstance(step, LibraryStep)):
        if op.call is not None and (op.call.part is not None or op.call.line is not None):
            found |= set(op.inputs)
    return found
