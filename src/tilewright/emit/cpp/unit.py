"""One C++ translation unit for all kernels of a plan.

For program number k the unit defines `k<k>(context, begin, end, worker)`, which computes grid points begin .. end-1
(the last grid axis varies fastest), `k<k>_count(symbols)` and `k<k>_grain(symbols)`; the exported table `tw_kernels`
lists them, `tw_kernel_count` long. `native/kernel.h` holds the calling convention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.emit.source import Source
from tilewright.ir.expr import Expr, Symbol, walk
from tilewright.ir.program import Buffer, Collapse, Load, Store, TileProgram, expressions
from tilewright.ir.sizes.dims import symbols_of
from tilewright.target import Target
from tilewright.tuning.thresholds import CPP_TEXT

from .dot import dot
from .expr import Expressions
from .memory import MemoryPrinter
from .reduce import Helpers, begin, collapse, merge
from .scope import Lines, Style, VectorUnit, bare
from .statements import Body, Special
from .transpose import turn

INCLUDE = Path(__file__).parents[1] / "native"
"""The folder of the headers that generated code includes."""


def emit_unit(
    programs: Sequence[TileProgram], symbols: Sequence[str], target: Target, *, exact: bool = False
) -> Source:
    """Print `programs` for `target`. `symbols` is the plan's order of size symbols (those of `Context.symbols`).

    With `exact`, float elements are the exact type of `native/exact.h` and one element is computed at a time; loops,
    masks and pads stay those of the float build. Raises UnsupportedError for a program that C++ cannot express and
    KeyError for a symbol that `symbols` lacks."""
    return emit_units(programs, symbols, target, exact=exact, units=1)[0]


def emit_units(
    programs: Sequence[TileProgram],
    symbols: Sequence[str],
    target: Target,
    *,
    exact: bool = False,
    units: int | None = None,
) -> tuple[Source, ...]:
    """As `emit_unit`, as several units of about equal length, to be compiled side by side and linked into one library.

    `units` is how many (None: as many as the target has cores, if there are kernels enough). The first one holds the
    table of all kernels."""
    style = Style(1 if exact else max(1, target.vector_bytes // 4), exact)
    order = {name: k for k, name in enumerate(symbols)}
    count = units or max(1, min(target.cores, len(programs) // CPP_TEXT.min_kernels_per_unit))
    linkage = "static " if count == 1 else ""
    helpers = Helpers(style)
    kernels: list[_Printed] = []
    for k, p in enumerate(programs):
        text = _Kernel(k, p, style, order, helpers, linkage).text()
        kernels.append(_Printed(k, text, frozenset(helpers.asked)))
        helpers.asked.clear()
    parts: list[list[_Printed]] = [[] for _ in range(count)]
    for kernel in sorted(kernels, key=lambda t: -len(t.text)):
        min(parts, key=lambda part: sum(len(t.text) for t in part)).append(kernel)
    header = "exact.h" if exact else "kernel.h"
    return tuple(_unit(part, len(programs), header, helpers, first=n == 0) for n, part in enumerate(parts))


@dataclass(frozen=True, slots=True)
class _Printed:
    """The text of kernel `number`, and the numbers of the helpers that it calls."""

    number: int
    text: str
    helpers: frozenset[int]


def _unit(part: Sequence[_Printed], count: int, header: str, helpers: Helpers, *, first: bool) -> Source:
    """One unit with the kernels of `part`; the `first` one has the table of all."""
    own = sorted(part, key=lambda p: p.number)
    inside = {p.number for p in own}
    lines = Lines()
    lines.put(f'#include "{header}"')
    lines.put("")
    lines.put("namespace tw {")
    for k in [k for k in range(count) if first and k not in inside]:
        lines.put(f"void k{k}(void* state, i64 begin, i64 end, i64 worker);")
        lines.put(f"i64 k{k}_count(const i64* symbols);")
        lines.put(f"i64 k{k}_grain(const i64* symbols);")
    used = frozenset[int]().union(*(p.helpers for p in own))
    end = "}  // namespace tw\n" + ("\n" + _table([f"k{k}" for k in range(count)]) if first else "")
    text = "".join([lines.text(), helpers.text(used), *(p.text for p in own), end])
    return Source("cpp", text, tuple(f"k{p.number}" for p in own))


def _table(names: Sequence[str]) -> str:
    lines = Lines()
    with lines.block('extern "C"'):
        shown = '__attribute__((visibility("default"))) extern'
        lines.put(f"{shown} const tw::Kernel tw_kernels[];")
        lines.put(f"{shown} const tw::i64 tw_kernel_count;")
        rows = [f"{{tw::{n}, tw::{n}_count, tw::{n}_grain}}" for n in names]
        lines.put("const tw::Kernel tw_kernels[] = {")
        for row in rows or ["{nullptr, nullptr, nullptr}"]:
            lines.put(f"  {row},")
        lines.put("};")
        lines.put(f"const tw::i64 tw_kernel_count = {len(names)};")
    return lines.text()


class _Kernel:
    """Prints one program."""

    def __init__(
        self,
        number: int,
        program: TileProgram,
        style: Style,
        order: dict[str, int],
        helpers: Helpers,
        linkage: str,
    ) -> None:
        self.linkage = linkage
        self.number = number
        self.program = program
        self.style = style
        self.order = order
        self.helpers = helpers
        self.lines = Lines()

    def text(self) -> str:
        """The task and its two size functions."""
        self._task()
        self._size("count")
        self._size("grain")
        return self.lines.text()

    def _symbols(self, of: Sequence[Expr]) -> dict[str, str]:
        """Print a local for each symbol that `of` uses; their names."""
        found = {s.value.name for e in of for s in symbols_of(e) if isinstance(s.value, Symbol)}
        names = {name: f"n{self.order[name]}" for name in sorted(found, key=self.order.__getitem__)}
        for name, text in names.items():
            self.lines.put(f"const i64 {text} = symbols[{self.order[name]}];")
        return names

    def _size(self, what: str) -> None:
        """Print the function for the number of grid points, or how many are worth a task."""
        program = self.program
        of = [g.extent for g in program.grid] if what == "count" else [program.grain]
        with self.lines.block(f"{self.linkage}i64 k{self.number}_{what}(const i64* symbols)"):
            if not any(symbols_of(e) for e in of):
                self.lines.put("(void)symbols;")
            printer = Expressions(self.style, self._symbols(of), self.lines)
            printer.checked = False  # launches are prepared before anything runs
            texts = [bare(printer.scalar(e)) for e in of]
            if what == "grain":
                self.lines.put(f"return max(1, {texts[0]});")
                return
            for k, text in enumerate(texts):
                self.lines.put(f"const i64 e{k} = {text};")
            empty = " || ".join(f"e{k} <= 0" for k in range(len(texts)))
            product = " * ".join(f"e{k}" for k in range(len(texts))) or "1"
            self.lines.put(f"return {empty} ? 0 : {product};" if texts else "return 1;")

    def _used(self) -> tuple[set[str], list[Expr]]:
        """Names of the buffers and all expressions of the body."""
        program = self.program
        buffers = {s.buffer.name for s in program.statements() if isinstance(s, (Load, Store))}
        found = [e for s in program.statements() for e in expressions(s)]
        for s in program.statements():
            if isinstance(s, Collapse):
                found += [x for e in s.reduction.merge for x in walk(e)]
        sizes = [b.size for b in program.scratch if b.name in buffers]
        return buffers, [*found, *sizes, *(g.extent for g in program.grid)]

    def _task(self) -> None:
        lines, program = self.lines, self.program
        used, found = self._used()
        lines.put(f"// program {self.number}: {len(program.params)} buffers, {len(program.loops())} loops")
        with lines.block(f"{self.linkage}void k{self.number}(void* state, i64 begin, i64 end, i64 worker)"):
            lines.put("const Context& context = *(const Context*)state;")
            lines.put("const i64* const symbols = context.symbols;")
            lines.put("(void)symbols, (void)worker;")
            printer = Expressions(self.style, self._symbols(found), lines)
            printer.reciprocals = program.reciprocals
            memory = MemoryPrinter(printer, self._buffers(used, printer))
            special = Special(lambda b, s: collapse(b, s, self.helpers), begin, merge, turn, dot)
            body = Body(program, printer, memory, special)
            self._grid(body)
            if any(e.op == "const" for e in memory.streams):
                lines.put("store_fence();")
            elif memory.streams:
                lines.put(f"if ({bare(' | '.join(map(printer.scalar, memory.streams)))}) store_fence();")

    def _buffers(self, used: set[str], printer: Expressions) -> dict[str, str]:
        """Print the bases of all buffers in use; their names."""
        names: dict[str, str] = {}
        for k, b in enumerate(self.program.params):
            names[b.name] = f"b{k}"
            if b.name in used:
                kind = self.style.memory(b.dtype)
                self.lines.put(f"{kind}* const b{k} = ({kind}*)context.pointers[{k}];")
        scratch = [b for b in self.program.scratch if b.name in used]
        if not scratch:
            return names
        places: list[tuple[Buffer, str]] = []
        self.lines.put("i64 bytes = 0;")
        for k, b in enumerate(scratch):
            names[b.name] = f"s{k}"
            places.append((b, f"p{k}"))
            size = bare(printer.scalar(b.size))
            self.lines.put(f"const i64 p{k} = bytes;")
            self.lines.put(f"bytes += round_up(({size}) * i64(sizeof({self.style.memory(b.dtype)})), 64);")
        self.lines.put("char* const base = (char*)context.scratch(worker, bytes);")
        for k, (b, place) in enumerate(places):
            kind = self.style.memory(b.dtype)
            self.lines.put(f"{kind}* const s{k} = ({kind}*)(base + {place});")
        return names

    def _grid(self, body: Body) -> None:
        """Print the loop over grid points: divisions once, then counting in mixed radix."""
        lines, grid, printer = self.lines, self.program.grid, body.printer
        names = [body.axis_name(g.axis) for g in grid]
        for k, g in enumerate(grid):
            lines.put(f"const i64 e{k} = {bare(printer.scalar(g.extent))};")
        rest = "begin"
        for k in reversed(range(len(grid))):
            lines.put(f"i64 {names[k]} = {f'{rest} % e{k}' if k else rest};")
            rest = f"begin / {' / '.join(f'e{j}' for j in reversed(range(k, len(grid))))}"
        with lines.block("for (i64 point = begin; point < end; point++)"):
            for g, name in zip(grid, names, strict=True):
                body.axes[g.axis] = name
            body.body(self.program.body)
            self._advance(names)
        printer.unit = VectorUnit({})

    def _advance(self, names: Sequence[str]) -> None:
        if not names:
            return
        step = f"++{names[-1]}"
        for k in reversed(range(1, len(names))):
            self.lines.put(f"if ({step} == e{k}) {{")
            self.lines.depth += 1
            self.lines.put(f"{names[k]} = 0;")
            step = f"++{names[k - 1]}"
        self.lines.put(f"{step};")
        for _ in names[1:]:
            self.lines.depth -= 1
            self.lines.put("}")
