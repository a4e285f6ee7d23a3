"""Products of blocks as C++: the micro-kernel, and the operands that it reads where they lie."""

from __future__ import annotations

from tilewright.ir.expr import Axis, Expr, axis, conjuncts
from tilewright.ir.program import Dot, Load
from tilewright.ir.selection import MicroKernel
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.products import bound_of, sides

from .scope import bare
from .statements import Body


class ProductPrinter:
    """Prints one product of blocks."""

    def __init__(self, body: Body, s: Dot, kernel: MicroKernel) -> None:
        self.body, self.s, self.kernel = body, s, kernel
        self.wide, self.narrow = sides(s, body.program.lane)
        self.row = next(a for a in self.narrow.axes if a != s.k)

    def run(self) -> None:
        """Print it."""
        body, lines, s, kernel = self.body, self.body.lines, self.s, self.kernel
        shape = body.blocks.dims(s.acc.axes)
        if kernel.start == "nothing" and body.place(s.acc, shape, array=True).array:
            body.declare_array(s.acc, shape)
            body.printer.states.add(s.acc.id)
        tiles = dict(body.blocks.dims((*s.acc.axes, s.k)))
        limits: dict[Axis, str] = {}
        load = body.in_place.get(self.narrow.id)
        if load is None:
            a, row_step, k_step = self._array()
        else:
            a, row_step, k_step = self._memory(load)
            for limit in (bound_of(term, load.var.axes) for term in conjuncts(load.mask)):
                assert limit is not None
                limits[limit[0]] = self._limit(limit[0], limit[1], tiles[limit[0]])
        width = body.blocks.registers(shape, shape[-1][0])
        rows, depth = limits.get(self.row, str(tiles[self.row])), limits.get(s.k, str(tiles[s.k]))
        acc, b = (self._first(v.id) for v in (s.acc, self.wide))
        if self.row in limits and kernel.start == "nothing":
            lines.put(f"clear({acc} + {rows} * {width}, ({tiles[self.row]} - {rows}) * {width});")
        factor = f"decltype({acc})(nullptr)" if kernel.factor is None else self._first(kernel.factor)
        steps = f"{a}, {row_step}, {k_step}, {b}, {factor}, {depth}"
        chain = f", {s.chain}" if s.chain else ""
        of = f"{kernel.rows}, {kernel.registers}, Start::{kernel.start}{chain}"
        lines.put(f"dot<{of}>({acc}, {rows}, {width}, {steps});")

    def _first(self, value: int) -> str:
        place = self.body.printer.places[value]
        first = "[0]" * len(self.body.blocks.counts(place.dims)) if place.array else ""
        return f"&{place.name}{first}"

    def _limit(self, a: Axis, bound: Expr, tile: int) -> str:
        name = self.body.printer.fresh()
        left = bare(self.body.printer.scalar(dims.sub(bound, axis(a))))
        self.body.lines.put(f"const i64 {name} = min({tile}, {left});")
        return name

    def _memory(self, load: Load) -> tuple[str, str, str]:
        printer = self.body.printer
        steps = [dims.coefficient(load.offset, axis(x)) for x in (self.row, self.s.k)]
        row, k = (bare(printer.scalar(e)) for e in steps if e is not None)
        return self.body.memory.address(load.buffer, load.offset).pointer, row, k

    def _array(self) -> tuple[str, str, str]:
        shape = self.body.blocks.counts(self.body.printer.places[self.narrow.id].dims)
        (_, _), (last, length) = shape
        steps = {last: 1, next(x for x, _ in shape if x != last): length}
        return self._first(self.narrow.id), str(steps[self.row]), str(steps[self.s.k])


def dot(body: Body, s: Dot, kernel: MicroKernel) -> None:
    """Print a product of blocks."""
    ProductPrinter(body, s, kernel).run()
