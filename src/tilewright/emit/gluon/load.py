"""The warp that loads: it keeps the rings of the query, of keys and of values full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.emit.triton.expr import Expressions
from tilewright.emit.triton.scope import Scope
from tilewright.ir.expr import Axis
from tilewright.ir.program import Descriptor, Load, Loop, Stmt
from tilewright.lower.specialise.plan import STRIP_ROWS, KeyLoop, Ring, WarpPlan

Named = Mapping[tuple[str, Descriptor], str]
"""The names of descriptors, by the buffer that they show."""


class Loader:
    """Prints what the warp that loads does. Where blocks begin is all that it needs to know of their axes."""

    def __init__(self, plan: WarpPlan, printer: Expressions, names: Named) -> None:
        self.plan, self.printer, self.names = plan, printer, names
        self.lines = printer.lines
        self.firsts: dict[Axis, str] = {}
        self._number = 0

    def body(self, statements: Sequence[Stmt]) -> None:
        """Print what some statements load, in their order."""
        for s in statements:
            if s is self.plan.query:
                self._query(self.plan.query)
            elif isinstance(s, Loop):
                found = self.plan.loop_of(s)
                if found is None:
                    self._bind(s, self.printer.offset(s.start).text)
                    self.body(s.body)
                else:
                    self._keys(found)

    def _bind(self, s: Loop, first: str) -> None:
        self.firsts[s.axis] = first
        if s.tile == 1:
            self.printer.axes[s.axis] = self.printer.offset(s.start)

    def _query(self, s: Load) -> None:
        """Each strip gets its rows as soon as they are there."""
        ring = self.plan.query_ring
        first = self.firsts[self.plan.rows]
        with self.lines.block(f"for i in gl.static_range({ring.slots})"):
            self.lines.put("mbarrier.wait(q_empty.index(i), (turn & 1) ^ 1)")
            self.firsts[self.plan.rows] = f"{first} + {STRIP_ROWS} * i"
            self._start(s, "q", "i", ring)
        self.firsts[self.plan.rows] = first

    def _keys(self, found: KeyLoop) -> None:
        s, printer = found.loop, self.printer
        start, stop = printer.offset(s.start).text, printer.offset(s.stop).text
        self._number += 1
        base = f"k{self._number}"
        outer = printer.scope
        with self.lines.block(f"for {base} in range({start}, {stop}, {s.tile})"):
            printer.scope = Scope(outer)
            self.firsts[s.axis] = base
            self._next(found.keys, "k", self.plan.key_ring)
            if found.values is not None:
                self._next(found.values, "v", self.plan.value_ring)
        printer.scope = outer

    def _next(self, s: Load, letter: str, ring: Ring) -> None:
        """Load into the next buffer of a ring, once all strips have done with what is there."""
        slot, phase = f"{letter}_slot", f"{letter}_phase"
        self.lines.put(f"mbarrier.wait({letter}_empty.index({slot}), {phase})")
        self._start(s, letter, slot, ring)
        self.lines.put(f"{slot}, {phase} = advanced({slot}, {phase}, {ring.slots})")

    def _start(self, s: Load, letter: str, slot: str, ring: Ring) -> None:
        full = f"{letter}_full.index({slot})"
        size = ring.block[0] * ring.block[1] * s.buffer.dtype.bytes
        self.lines.put(f"mbarrier.expect({full}, {size})")
        name = self.names[s.buffer.name, self.plan.box(s)]
        self.lines.put(
            f"load_block({name}, [{', '.join(self._places(s))}], {full}, {letter}_ring.index({slot}))"
        )

    def _places(self, s: Load) -> list[str]:
        """The first element of a block along each dim."""
        d = self.plan.box(s)
        found: list[str] = []
        for place, length in zip(s.at, d.tile, strict=True):
            known = length > 1 and isinstance(place.value, Axis)
            found.append(self.firsts[place.value] if known else self.printer.term(place).text)  # pyright: ignore
        return found
