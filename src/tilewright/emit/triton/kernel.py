"""One Triton kernel per tile program, as the text of a Python file.

The file imports `triton`, `triton.language as tl` and perhaps `libdevice`, and defines one function under
`@triton.jit` (and helpers for reductions over tuples). Its grid is one-dimensional: `program_id(0)` counts grid points,
the last axis of the grid varies fastest. All its arguments are run-time arguments, in the order of `arguments`; those
of variants of a kernel differ only in the descriptors at the end. A listed variant takes a table in the place of
pointers: a row of addresses for each of the tensors that it runs on, whose grids follow each other.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

from tilewright.errors import VerifyError
from tilewright.ir.dtype import i64
from tilewright.ir.expr import Symbol
from tilewright.ir.program import Await, Buffer, Descriptor, TileProgram
from tilewright.ir.sizes.dims import symbols_of
from tilewright.lower.legalise.gpu import block_axes
from tilewright.lower.variants import ALIGNMENT, Variant, aligning, quotients, reached

from .expr import Expressions, count_reads
from .helpers import Helpers
from .index import Indices, index_values
from .scope import UNARY, Lines, Scope, Term, memory_name, memory_type
from .statements import Body, check_size, printed

ArgumentKind = Literal["pointer", "size", "error", "descriptor", "table"]
Dialect = Literal["triton", "gluon"]
"""Triton itself, or its dialect in which warps, layouts and buffers are explicit."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel. `name` in the text, `type` as in a Triton signature ("*fp16", "i64", ...).

    `index` is the number of the parameter (pointer) or of the symbol in the plan's order (size), 0 for the error word.
    `divisible` says that the build may, and a call must, take it for a multiple of 16. A `descriptor` is made by the
    launch, of parameter `index`; a table is one, too, of 64-bit addresses."""

    kind: ArgumentKind
    name: str
    type: str
    index: int
    divisible: bool
    descriptor: Descriptor | None = None


@dataclass(frozen=True, slots=True)
class TritonSource:
    """A Python file with one kernel: the function `entry`, of one `variant`, built with `warps` and `stages`. If it
    waits for the kernel in front, that may be one from `outside`."""

    text: str
    entry: str
    arguments: tuple[Argument, ...]
    warps: int
    stages: int
    variant: Variant
    contracted: bool = True
    outside: bool = False
    dialect: Dialect = "triton"
    persistent: bool = False
    """Whether a block goes through many grid points, so that no more are launched than run at once."""

    @property
    def signature(self) -> dict[str, str]:
        """Name -> type of every argument, in order."""
        return {a.name: a.type for a in self.arguments}

    @property
    def divisible(self) -> tuple[int, ...]:
        """Positions of the arguments that are multiples of 16."""
        return tuple(k for k, a in enumerate(self.arguments) if a.divisible)


def emit_triton(program: TileProgram, symbols: Sequence[str], variant: Variant, name: str) -> TritonSource:
    """Print a legalised `program` as the kernel `name`. `symbols` is the plan's order of size symbols.

    Raises UnsupportedError for what Triton cannot express, KeyError for a symbol that `symbols` lacks, and VerifyError
    for a program that is not made for a GPU (scratch memory), or that does not wait where it must."""
    if program.scratch:
        raise VerifyError("scratch memory in a program for a GPU", phase="emit")
    try:
        program.verify_order()
    except ValueError as error:
        raise VerifyError(str(error), phase="emit") from error
    arguments = (
        *plain_arguments(program, symbols, variant),
        *descriptor_arguments(program, reached(program, variant)),
    )
    helpers, lines = Helpers(), Lines()
    sizes = {symbols[a.index]: a.name for a in arguments if a.kind == "size"}
    indices = Indices(index_values(program))
    printer = Expressions(variant.wide, sizes, block_axes(program), lines, helpers, indices)
    printer.counts = count_reads(printed(program))
    pointers = {b.name: f"p{k}" for k, b in enumerate(program.params)}
    names = {(program.params[a.index].name, a.descriptor): a.name for a in arguments if a.descriptor}
    if variant.aligned:
        for quotient, divisor in quotients(program).items():
            printer.counts[quotient] = 0  # no name but the one below
            known = Term(f"tl.multiple_of({printer.term(quotient).text}, {divisor})")
            printer.scope.names[quotient, False] = printer.named(known, "i")
    persistent = program.persistent and not variant.listed
    # A block waits once for all its points: with a wait in the loop over them, Triton (3.9) loads nothing ahead.
    begin = [s for s in program.body if persistent and isinstance(s, Await)]
    rest = [s for s in program.body if not (persistent and isinstance(s, Await))]
    body = Body(program, printer, pointers, variant.aligned, names)
    body.body(begin)
    with (
        _every_point(program, printer)
        if persistent
        else nullcontext(_number(program, printer, variant)) as number
    ):
        print_grid(program, printer, number)
        body.body(rest)
    check_size(printer)
    head = _heading(program, arguments, helpers)
    text = f"{head}@triton.jit\ndef {name}({', '.join(a.name for a in arguments)}):\n{lines.text() or '    pass'}"
    outside = any(isinstance(s, Await) and s.outside for s in program.body)
    return TritonSource(
        text, name, arguments, program.warps, program.stages, variant, program.contracted, outside,
        persistent=persistent,
    )  # fmt: skip


def plain_arguments(program: TileProgram, symbols: Sequence[str], variant: Variant) -> tuple[Argument, ...]:
    """Pointers, or a table of them, the sizes that the text uses, and the error word."""
    found = [
        Argument("pointer", f"p{k}", f"*{memory_type(b.dtype)}", k, variant.aligned)
        for k, b in enumerate(program.params)
    ]
    if variant.listed:
        found = [Argument("table", "table", "*i64", 0, True)]
    used = {s.value.name for e in printed(program) for s in symbols_of(e) if isinstance(s.value, Symbol)}
    multiples = aligning(program) if variant.aligned else ()
    order = {name: k for k, name in enumerate(symbols)}
    for name, k in sorted(((name, order[name]) for name in used), key=lambda x: x[1]):
        found.append(Argument("size", f"n{k}", "i64" if variant.wide else "i32", k, name in multiples))
    return (*found, Argument("error", "error", "*i32", 0, False))


def descriptor_arguments(program: TileProgram, shown: Sequence[tuple[Buffer, Descriptor]]) -> list[Argument]:
    """One for each of some ways in which loads take blocks of a parameter."""
    order = {b.name: k for k, b in enumerate(program.params)}
    made: list[Argument] = []
    for k, (buffer, d) in enumerate(shown):
        kind = f"tensordesc<{memory_type(buffer.dtype)}[{','.join(map(str, d.tile))}]>"
        made.append(Argument("descriptor", f"d{k}", kind, order[buffer.name], False, d))
    return made


def _number(program: TileProgram, printer: Expressions, variant: Variant) -> str:
    """The number of a block's one grid point."""
    return _row(program, printer, variant) if variant.listed else "tl.program_id(0)"


@contextmanager
def _every_point(program: TileProgram, printer: Expressions) -> Generator[str]:
    """Around what is done at each grid point of a block, whose number is given. Triton makes one loop of this one and
    the loop over steps inside, so that the loads of the next point begin while this one ends."""
    points = " * ".join(printer.term(g.extent).at(UNARY) for g in program.grid)
    with printer.lines.block(
        f"for number in tl.range(tl.program_id(0), {points}, tl.num_programs(0), flatten=True)"
    ):
        outer = printer.scope
        printer.scope = Scope(outer)
        yield "tl.to_tensor(number)" if printer.index_type is i64 else "number"
        printer.scope = outer


def _row(program: TileProgram, printer: Expressions, variant: Variant) -> str:
    """Print the row of a block's tensors, and their addresses; the block's number among those of its row."""
    put = printer.lines.put
    extents = [printer.term(g.extent).at(UNARY) for g in program.grid]
    if extents:
        put(f"points = {' * '.join(extents)}")
    put(f"row = tl.program_id(0){' // points' if extents else ''}")
    put(f"row = table + row * {len(program.params)}")
    for k, b in enumerate(program.params):
        address = f"tl.load(row + {k}).to(tl.pointer_type({memory_name(b.dtype)}))"
        put(f"p{k} = tl.multiple_of({address}, {ALIGNMENT})" if variant.aligned else f"p{k} = {address}")
    return "(tl.program_id(0) % points)" if extents else "0"


def print_grid(program: TileProgram, printer: Expressions, number: str) -> None:
    """Print the place of a grid point along each axis; `number` is its number."""
    point = f"{number}.to(tl.int64)" if printer.index_type is i64 else number
    names = [f"g{k}" for k in range(len(program.grid))]
    if len(names) > 1:
        printer.lines.put(f"point = {point}")
        point = "point"
    if program.order:
        _grouped(program, printer)
        return
    for k in reversed(range(len(names))):
        printer.axes[program.grid[k].axis] = Term(names[k])
        extent = printer.term(program.grid[k].extent).at(UNARY) if k else ""
        if not k or extent == "1":
            printer.lines.put(f"{names[k]} = {point if not k else 0}")
            continue
        printer.lines.put(f"{names[k]} = point % {extent}")
        if k > 1:
            printer.lines.put(f"point = point // {extent}")
        else:
            point = f"point // {extent}"


def _grouped(program: TileProgram, printer: Expressions) -> None:
    """Print the same where `program.order` rows of the last two axes are numbered together, column by column; the last
    group may have fewer rows."""
    *outer, rows, columns = range(len(program.grid))
    extents = [printer.term(g.extent).at(UNARY) for g in program.grid]
    put = printer.lines.put
    for k in (*outer, rows, columns):
        printer.axes[program.grid[k].axis] = Term(f"g{k}")
    for k, inside in zip(outer, (extents[k + 1 :] for k in outer), strict=True):
        put(f"g{k} = point // ({' * '.join(inside)})")
        put(f"point = point % ({' * '.join(inside)})")
    put(f"group = point // ({program.order} * {extents[columns]})")
    put(f"place = point % ({program.order} * {extents[columns]})")
    put(f"height = tl.minimum({extents[rows]} - {program.order} * group, {program.order})")
    put(f"g{rows} = {program.order} * group + place % height")
    put(f"g{columns} = place // height")


def _heading(program: TileProgram, arguments: Sequence[Argument], helpers: Helpers) -> str:
    """What stands before the kernel."""
    multiples = ", ".join(a.name for a in arguments if a.divisible)
    lines = [
        f"# {program.warps} warps, {program.stages} stages"
        + (f"; multiples of 16: {multiples}" if multiples else "")
    ]
    lines += ["import triton", "import triton.language as tl"]
    if helpers.libdevice:
        lines.append("from triton.language.extra import libdevice")
    return "\n".join(lines) + "\n\n\n" + "".join(f"{text}\n\n" for text in helpers.texts.values())
