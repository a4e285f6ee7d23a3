"""The warps that compute: a strip of rows for each warp group, with the next product of scores under way while the last
one with values is, and while scores become weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from tilewright.emit.triton.scope import ATOM, SUM, Scope, Term
from tilewright.emit.triton.statements import Body
from tilewright.ir.expr import Axis
from tilewright.ir.program import Await, Load, Loop, Release, Stmt, Store
from tilewright.lower.specialise.analyse import weights_of
from tilewright.lower.specialise.plan import STRIP_ROWS, KeyLoop, Ring

from .layouts import LaidExpressions


class Computer(Body):
    """Prints what a strip of rows computes; `STRIP` is its number in the text."""

    printer: LaidExpressions

    def start(self) -> None:
        """Print what is known before anything is loaded."""
        plan, put = self.printer.plan, self.lines.put
        self.split = False  # addresses are few, and within 32 bits
        put(f"nothing = gl.full({self.printer.shape((plan.rows, plan.keys))}, 0.0, tl.float32, SCORES)")
        put("k_slot = gl.to_tensor(0)")
        put("k_phase = gl.to_tensor(0)")
        put("v_slot = gl.to_tensor(0)")
        put("v_phase = gl.to_tensor(0)")

    def body(self, statements: Sequence[Stmt]) -> None:
        """As the base class; what the other warp loads is waited for."""
        plan, left = self.printer.plan, list(statements)
        while left:
            s = left.pop(0)
            chain = plan.chain_of(s)
            if chain:
                del left[: len(chain) - 1]
                self._chain(chain)
                self._done(chain[-1])
            elif s is plan.query:
                self.lines.put(f"q = {_operand('q', 'STRIP', plan.query_ring)}")
                self.lines.put("mbarrier.wait(q_full.index(STRIP), turn & 1)")
            elif not isinstance(s, (Await, Release)):
                super().body((s,))

    def bind(self, s: Loop, start: Term, number: str) -> None:
        """As the base class; a strip has its own part of the rows."""
        plan, printer = self.printer.plan, self.printer
        if s.axis not in printer.position or s.tile == 1:
            printer.axes[s.axis] = printer.spread(start, (), printer.index_type)
            return
        if s.axis not in (plan.rows, plan.keys, plan.columns):
            return  # what the first product sums over
        if s.axis == plan.rows:
            start = printer.infix("+", SUM, [start, Term(f"{STRIP_ROWS} * STRIP", SUM + 1)])
        self.firsts[s.axis] = start
        lanes = Term(f"gl.arange(0, {printer.tiles[s.axis]}, {printer.layout((s.axis,))})", ATOM, (s.axis,))
        term = lanes if start.number and start.text == "0" else printer.infix("+", SUM, [start, lanes])
        self.lines.put(f"a{number} = {term.text}")
        printer.axes[s.axis] = Term(f"a{number}", ATOM, term.dims)

    def told(self, s: Load | Store, offset: Term, wanted: tuple[object, ...]) -> Term:  # pyright: ignore
        """Layouts say how elements lie: nothing needs to be told."""
        return offset

    # --- loops over keys -----------------------------------------------------------

    def loop(self, s: Loop) -> None:
        """A loop over keys that is in no chain stands for itself."""
        found = self.printer.plan.loop_of(s)
        if found is None:
            super().loop(s)
            return
        if found.sure:
            self._chain((found,))
        else:
            start, stop = self._bounds(found)
            with self.lines.block(f"if {start.text} < {stop.text}"):
                self._chain((found,))
        self._done(found)

    def _done(self, found: KeyLoop) -> None:
        """Behind the last loop, whether it had a step or not, the query may be written over."""
        if found is self.printer.plan.loops[-1]:
            self.lines.put("mbarrier.arrive(q_empty.index(STRIP), count=1)")

    def _chain(self, chain: Sequence[KeyLoop]) -> None:
        """The first step, of the first loop that has one, and all others: each begins the product of the one before
        with its values behind its own first product."""
        printer, outer = self.printer, self.printer.scope
        bounds = [self._bounds(k) for k in chain]
        printer.scope = Scope(outer)
        # The first loop that has a step whatever the bounds are; of a loop that stands for itself this is known.
        sure = next((n for n, k in enumerate(chain) if k.sure), 0)
        has_step = [f"{start.text} < {stop.text}" for start, stop in bounds[:sure]]
        for n in range(sure + 1):
            self._alone(chain[n], bounds[n][0], _branch(has_step, n))
        for n, k in enumerate(chain):
            start, stop = bounds[n]
            if n <= sure:
                start = self._second(k, start, has_step[:n])
            if not (k.single and n == sure == 0):
                self._others(k, start, stop)
        if chain[-1].results is not None:
            self._multiply_values(chain[-1])
            self._end_values(chain[-1])
        printer.scope = outer
        outer.forget({v for k in chain for v in self.changed(k.loop.body)})

    def _bounds(self, found: KeyLoop) -> tuple[Term, Term]:
        """Where a loop begins and ends: numbers that are read several times, with names."""
        terms = [self.printer.offset(e) for e in (found.loop.start, found.loop.stop)]
        start, stop = (t if t.number or t.text.isidentifier() else self.printer.named(t, "i") for t in terms)
        return start, stop

    def _second(self, found: KeyLoop, start: Term, before: Sequence[str]) -> Term:
        """Where the steps of a loop begin that are not the first of all; conditions say of the loops `before` whether
        they have that."""
        tile = found.loop.tile
        second = Term(str(int(start.text) + tile), number=True) if start.number else None
        second = second or self.printer.infix("+", SUM, [start, Term(str(tile), number=True)])
        if not before:
            return second
        some = " | ".join(f"({c})" for c in before)
        return self.printer.named(Term(f"tl.where({some}, {start.text}, {second.text})"), "i")

    def _alone(self, found: KeyLoop, start: Term, head: str) -> None:
        """The first step of all, but for its product with values; under a condition if there is a `head`."""
        printer, outer = self.printer, self.printer.scope
        with self.lines.block(head) if head else nullcontext():
            printer.scope = Scope(outer)
            self.bind(found.loop, start, self.fresh(found.loop.axis))
            self._multiply_keys(found)
            self._end_keys(found, under_way=0)
            self._between(found)
        printer.scope = outer

    def _others(self, found: KeyLoop, start: Term, stop: Term) -> None:
        """Steps behind the first of all, each of which ends the product with values of the one before."""
        s, number = found.loop, self.fresh(found.loop.axis)
        printer, outer = self.printer, self.printer.scope
        with self.lines.block(f"for b{number} in range({start.text}, {stop.text}, {s.tile})"):
            printer.scope = Scope(outer)
            self.bind(s, Term(f"b{number}"), number)
            self._multiply_keys(found)
            if found.results is not None:
                self._multiply_values(found)
            self._end_keys(found, under_way=int(found.results is not None))
            self._between(found, ends=found.results is not None)
        printer.scope = outer

    def _between(self, found: KeyLoop, *, ends: bool = False) -> None:
        """What is made of scores; where a product with values is under way, it `ends` before its sums are touched."""
        self.body(found.between)
        if found.results is None:
            return
        if ends:
            self._end_values(found)
        self.body(found.rescale)
        weights = self._operand(weights_of(found.results, self.printer.plan.rows))
        self.lines.put(f"w = gl.convert_layout({weights.text}, WEIGHTS)")

    # --- results -----------------------------------------------------------------

    def store(self, s: Store) -> None:
        """As the base class; a block that is copied goes through its buffer."""
        copied, printer = self.printer.plan.copied, self.printer
        if copied is None or s is not copied.store:
            super().store(s)
            return
        value = self.stored(printer.value(s.unrounded), s.unrounded.dtype, s.buffer.dtype)
        value = self.named_block(value, s)
        box = printer.plan.box(copied.block)
        places = [
            self.firsts[p.value].text if n > 1 and isinstance(p.value, Axis) else printer.term(p).text
            for p, n in zip(copied.block.at, box.tile, strict=True)
        ]
        self.lines.put("tma.store_wait(0)  # the copy before has read the buffer")
        self.lines.put(f"o_ring.index(STRIP).store({value})")
        self.lines.put("fence_async_shared()")
        name = self.descriptors[s.buffer.name, box]
        self.lines.put(f"store_block({name}, [{', '.join(places)}], o_ring.index(STRIP))")

    def named_block(self, value: Term, s: Store) -> str:
        """A block of results, whole."""
        plan = self.printer.plan
        return self.printer.spread(value, (plan.rows, plan.columns), s.buffer.dtype).text

    def end(self) -> None:
        """Print what is done behind the last grid point."""
        if self.printer.plan.copied is not None:
            self.lines.put("tma.store_wait(0)")

    # --- products ----------------------------------------------------------------

    def _multiply_keys(self, found: KeyLoop) -> None:
        """Begin the product of the query and the next keys."""
        acc, ring = found.scores.acc, self.printer.plan.key_ring
        self.lines.put("mbarrier.wait(k_full.index(k_slot), k_phase)")
        keys = _operand("k", "k_slot", ring)
        self.lines.put(f"v{acc.id} = warpgroup_mma(q, {keys}, nothing, use_acc=False, is_async=True)")

    def _end_keys(self, found: KeyLoop, *, under_way: int) -> None:
        """Wait for scores, with so many later products under way; the keys may be written over."""
        acc, ring = found.scores.acc, self.printer.plan.key_ring
        self.lines.put(f"v{acc.id} = warpgroup_mma_wait({under_way}, deps=(v{acc.id},))")
        self._release("k", ring)
        self.printer.values[acc.id] = Term(f"v{acc.id}", ATOM, self.printer.ordered(acc.axes))

    def _multiply_values(self, found: KeyLoop) -> None:
        """Begin the product of the last weights and their values."""
        assert found.results is not None
        acc, ring = found.results.acc, self.printer.plan.value_ring
        self.lines.put("mbarrier.wait(v_full.index(v_slot), v_phase)")
        values = _operand("v", "v_slot", ring)
        self.lines.put(f"v{acc.id} = warpgroup_mma(w, {values}, v{acc.id}, is_async=True)")

    def _end_values(self, found: KeyLoop) -> None:
        """Wait for results; the values may be written over."""
        assert found.results is not None
        acc = found.results.acc
        self.lines.put(f"v{acc.id}, w = warpgroup_mma_wait(0, deps=(v{acc.id}, w))")
        self._release("v", self.printer.plan.value_ring)

    def _release(self, letter: str, ring: Ring) -> None:
        slot, phase = f"{letter}_slot", f"{letter}_phase"
        self.lines.put(f"mbarrier.arrive({letter}_empty.index({slot}), count=1)")
        self.lines.put(f"{slot}, {phase} = advanced({slot}, {phase}, {ring.slots})")


def _operand(letter: str, slot: str, ring: Ring) -> str:
    """A buffer of a ring as a product takes it."""
    return f"{letter}_ring.index({slot})" + (".permute((1, 0))" if ring.turned else "")


def _branch(conditions: Sequence[str], number: int) -> str:
    """What stands before the code of a case: each but the last has its condition."""
    if not conditions:
        return ""
    if number == len(conditions):
        return "else"
    return f"{'elif' if number else 'if'} {conditions[number]}"
