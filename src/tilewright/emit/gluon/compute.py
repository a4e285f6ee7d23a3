"""The warps that compute: a strip of rows for each warp group, with the next product of scores under way while the last
one with values is, and while scores become weights."""

from __future__ import annotations

from collections.abc import Sequence

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
        put(f"nothing = {self._zeros()}")
        put("k_slot = gl.to_tensor(0)")
        put("k_phase = gl.to_tensor(0)")
        put("v_slot = gl.to_tensor(0)")
        put("v_phase = gl.to_tensor(0)")
        assert plan.query_ring.slots == plan.strips

    def _zeros(self) -> str:
        plan = self.printer.plan
        shape = self.printer.shape((plan.rows, plan.keys))
        return f"gl.full({shape}, 0.0, tl.float32, SCORES)"

    def body(self, statements: Sequence[Stmt]) -> None:
        """As the base class; what the other warp loads is waited for."""
        for s in statements:
            if s is self.printer.plan.query:
                self.lines.put(f"q = {_operand('q', 'STRIP', self.printer.plan.query_ring)}")
                self.lines.put("mbarrier.wait(q_full.index(STRIP), turn & 1)")
            elif isinstance(s, (Await, Release)):
                continue
            else:
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

    def loop(self, s: Loop) -> None:
        """A loop over keys begins its products before their turn."""
        found = self.printer.plan.loop_of(s)
        if found is None:
            super().loop(s)
            return
        printer = self.printer
        start = self._scalar(printer.offset(s.start))
        stop = self._scalar(printer.offset(s.stop))
        if found.sure:
            self._steps(found, start, stop)
        else:
            with self.lines.block(f"if {start.text} < {stop.text}"):
                self._steps(found, start, stop)
        if found is printer.plan.loops[-1]:
            self.lines.put("mbarrier.arrive(q_empty.index(STRIP), count=1)")

    def _scalar(self, term: Term) -> Term:
        """A number that is read several times, with a name."""
        return term if term.number or term.text.isidentifier() else self.printer.named(term, "i")

    def _steps(self, found: KeyLoop, start: Term, stop: Term) -> None:
        outer = self.printer.scope
        self.printer.scope = Scope(outer)
        self._first(found, start)
        if not found.single:
            self._others(found, start, stop)
        if found.results is not None:
            self._multiply_values(found)
            self._end_values(found)
        self.printer.scope = outer
        outer.forget(self.changed(found.loop.body))

    def _first(self, found: KeyLoop, start: Term) -> None:
        """The first step, but for its product with values."""
        self.bind(found.loop, start, self.fresh(found.loop.axis))
        self._multiply_keys(found)
        self._end_keys(found, under_way=0)
        self._between(found)

    def _others(self, found: KeyLoop, start: Term, stop: Term) -> None:
        """All others, each of which ends the product with values of the one before."""
        s, number = found.loop, self.fresh(found.loop.axis)
        second = str(int(start.text) + s.tile) if start.number else f"{start.text} + {s.tile}"
        outer = self.printer.scope
        self.printer.scope = Scope(outer)
        with self.lines.block(f"for b{number} in range({second}, {stop.text}, {s.tile})"):
            self.bind(s, Term(f"b{number}"), number)
            self._multiply_keys(found)
            if found.results is not None:
                self._multiply_values(found)
            self._end_keys(found, under_way=int(found.results is not None))
            self._between(found, ends=found.results is not None)
        self.printer.scope = outer

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
