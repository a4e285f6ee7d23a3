"""One C++ translation unit for all kernels of a plan.

For program number k the unit defines `k<k>(context, begin, end, worker)`, which computes grid points begin .. end-1
(the last grid axis varies fastest), `k<k>_count(symbols)` and `k<k>_grain(symbols)`; the exported table `tw_kernels`
lists them, `tw_kernel_count` long. `native/kernel.h` holds the calling convention.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tilewright.ir.dims import symbols_of
from tilewright.ir.expr import Expr, Symbol, walk
from tilewright.ir.program import Buffer, Collapse, Load, Store, TileProgram, expressions
from tilewright.target import Target

from .cpp_block import Body, Special
from .cpp_collapse import Helpers, collapse
from .cpp_expr import Expressions
from .cpp_memory import Memory
from .cpp_scope import Binding, Lines, Style, Unit, bare
from .cpp_turn import Turn, turned_axis
from .source import Source

INCLUDE = Path(__file__).parent / "native"
"""The folder of the headers that generated code includes."""


def emit_unit(
    programs: Sequence[TileProgram], symbols: Sequence[str], target: Target, *, exact: bool = False
) -> Source:
    """Print `programs` for `target`. `symbols` is the plan's order of size symbols (those of `Context.symbols`).

    With `exact`, float elements are the exact type of `native/exact.h` and one element is computed at a time; loops,
    masks and pads stay those of the float build. Raises UnsupportedError for a program that C++ cannot express and
    KeyError for a symbol that `symbols` lacks."""
    style = Style(1 if exact else max(1, target.vector_bytes // 4), exact)
    helpers = Helpers(style)
    order = {name: k for k, name in enumerate(symbols)}
    kernels = [_Kernel(k, p, style, order, helpers).text() for k, p in enumerate(programs)]
    names = [f"k{k}" for k in range(len(programs))]
    lines = Lines()
    lines.put(f'#include "{"exact.h" if exact else "kernel.h"}"')
    lines.put("")
    lines.put("namespace tw {")
    parts = [lines.text(), helpers.text(), *kernels, "}  // namespace tw\n\n", _table(names)]
    return Source("cpp", "".join(parts), tuple(names))


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
        self, number: int, program: TileProgram, style: Style, order: dict[str, int], helpers: Helpers
    ) -> None:
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
        with self.lines.block(f"static i64 k{self.number}_{what}(const i64* symbols)"):
            if not any(symbols_of(e) for e in of):
                self.lines.put("(void)symbols;")
            printer = Expressions(self.style, self._symbols(of), self.lines)
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
        with lines.block(f"static void k{self.number}(void* state, i64 begin, i64 end, i64 worker)"):
            lines.put("const Context& context = *(const Context*)state;")
            lines.put("const i64* const symbols = context.symbols;")
            lines.put("(void)symbols, (void)worker;")
            printer = Expressions(self.style, self._symbols(found), lines)
            memory = Memory(printer, self._buffers(used, printer))
            special = Special(
                lambda b, s: collapse(b, s, self.helpers),
                lambda b, s, dims: turned_axis(b, s, dims) is not None,
                lambda b, s, dims: Turn(b, dims).run(s),
            )
            body = Body(program, printer, memory, special)
            self._grid(body)
            if memory.streams:
                lines.put("store_fence();")

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
                body.axes[g.axis] = Binding(name, 1)
            body.body(self.program.body)
            self._advance(names)
        printer.unit = Unit({})

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
