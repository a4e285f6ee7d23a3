"""One kernel per tile program whose warps are specialised, as the text of a Python file.

It defines what the warp that loads does, what each strip of rows computes, and the kernel itself, which gives out
buffers and starts both. Arguments, grid and meaning are those of `emit.triton`; only the variant that descriptors serve
is printed so.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from tilewright.emit.triton.expr import Expressions, count_reads
from tilewright.emit.triton.helpers import Helpers
from tilewright.emit.triton.index import Indices, index_values
from tilewright.emit.triton.kernel import (
    Argument,
    TritonSource,
    descriptor_arguments,
    emit_triton,
    plain_arguments,
    print_grid,
)
from tilewright.emit.triton.scope import UNARY, Lines, Scope, Term
from tilewright.emit.triton.statements import check_size, printed
from tilewright.ir.program import Load, TileProgram
from tilewright.lower.specialise.analyse import SPECIAL, specialise
from tilewright.lower.specialise.plan import WARPS_PER_STRIP, CopiedStore, Ring, WarpPlan
from tilewright.lower.variants import Variant
from tilewright.tuning.search_limits import SPECIALISED

from .compute import Computer
from .layouts import LaidExpressions, layout_lines
from .load import Loader, Named

_HEAD = """import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
"""
_SHARED = '''
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def turns_of(points):
    """How many grid points this block goes through."""
    own, count = tl.program_id(0), tl.num_programs(0)
    whole = points // count
    last = tl.where(whole % 2 == 1, count - 1 - own, own)
    return whole + (last < points - whole * count).to(tl.int32)


@gluon.jit
def place_of(turn):
    """The number of a grid point. Blocks take turns, every second time in reverse: work may fall along the grid."""
    own, count = tl.program_id(0), tl.num_programs(0)
    return turn * count + tl.where(turn % 2 == 1, count - 1 - own, own)


@gluon.jit
def advanced(slot, phase, SLOTS: gl.constexpr):
    """The next buffer of a ring, and the phase of its barrier."""
    last = slot == SLOTS - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, each complete after so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made
'''
_PARTS = (
    "q_ring",
    "k_ring",
    "v_ring",
    "o_ring",
    "q_full",
    "q_empty",
    "k_full",
    "k_empty",
    "v_full",
    "v_empty",
)
"""What the kernel makes and its warps share."""


def emit_kernel(program: TileProgram, symbols: Sequence[str], variant: Variant, name: str) -> TritonSource:
    """Print a legalised `program` as the kernel `name`: in Gluon where its warps are specialised and calls of this
    variant permit it, else in Triton. See `emit_triton`."""
    if program.warp_specialised and variant == SPECIAL:
        return emit_gluon(program, symbols, name)
    return emit_triton(program, symbols, variant, name)


def emit_gluon(program: TileProgram, symbols: Sequence[str], name: str) -> TritonSource:
    """Print a legalised `program` in Gluon. Raises IllegalSchedule if its warps cannot be specialised, and what
    `emit_triton` raises."""
    plan = specialise(program)
    boxes = [(s.buffer, plan.box(s)) for s in _blocks(plan)]
    shown = descriptor_arguments(program, list(dict.fromkeys(boxes)))
    plain = plain_arguments(program, symbols, SPECIAL)
    names: Named = {(program.params[a.index].name, a.descriptor): a.name for a in shown if a.descriptor}
    sizes = {symbols[a.index]: a.name for a in plain if a.kind == "size"}
    helpers = Helpers("gl")
    load, compute = (
        _load(program, plan, sizes, names, helpers),
        _compute(program, plan, sizes, names, helpers),
    )
    numbers = [a.name for a in plain if a.kind == "size"]
    pointers = [a.name for a in plain if a.kind in ("pointer", "size")]
    if plan.copied is not None:
        pointers.append(names[plan.copied.store.buffer.name, plan.box(plan.copied.block)])
    arguments = (*plain, *shown)
    text = "\n\n".join([
        _heading(plan, arguments, helpers),
        f"@gluon.jit\ndef load({', '.join([*numbers, *(a.name for a in shown), 'parts'])}):\n{load}",
        f"@gluon.jit\ndef compute({', '.join([*pointers, 'parts', 'STRIP: gl.constexpr'])}):\n{compute}",
        f"@gluon.jit\ndef {name}({', '.join(a.name for a in arguments)}):\n"
        + _kernel(plan, numbers, pointers, names),
    ])  # fmt: skip
    return TritonSource(
        text,
        name,
        arguments,
        WARPS_PER_STRIP,
        program.stages,
        SPECIAL,
        program.contracted,
        False,
        "gluon",
        True,
    )


def _blocks(plan: WarpPlan) -> Iterator[Load]:
    """What descriptors show."""
    yield plan.query
    if plan.copied is not None:
        yield plan.copied.block
    for k in plan.loops:
        yield k.keys
        if k.values is not None:
            yield k.values


def _heading(plan: WarpPlan, arguments: Sequence[Argument], helpers: Helpers) -> str:
    """What stands before the functions of the kernel."""
    multiples = ", ".join(a.name for a in arguments if a.divisible)
    first = f"# {plan.strips} x {WARPS_PER_STRIP} warps compute, one loads; multiples of 16: {multiples}"
    lines = [first, _HEAD.rstrip("\n")]
    if helpers.libdevice:
        lines.append("from triton.language.extra import libdevice")
    lines += ["", *layout_lines(plan), _SHARED]
    return "\n".join(lines) + "".join(f"\n\n{text.rstrip()}\n" for text in helpers.texts.values())


def _load(program: TileProgram, plan: WarpPlan, sizes: dict[str, str], names: Named, helpers: Helpers) -> str:
    """The body of the function of the warp that loads."""
    lines = Lines()
    printer = Expressions(False, sizes, plan.tile, lines, helpers, Indices(index_values(program)))
    printer.counts = count_reads(printed(program))
    _unpack(lines)
    for letter in "kv":
        lines.put(f"{letter}_slot = gl.to_tensor(0)")
        lines.put(f"{letter}_phase = gl.to_tensor(1)  # the phase before the first counts as complete")
    with _turns(program, printer):
        Loader(plan, printer, names).body(program.body)
    return lines.text()


def _compute(
    program: TileProgram, plan: WarpPlan, sizes: dict[str, str], names: Named, helpers: Helpers
) -> str:
    """The body of the function of a strip of rows."""
    lines = Lines()
    printer = LaidExpressions(plan, sizes, lines, helpers, Indices(index_values(program)))
    printer.counts = count_reads(printed(program))
    pointers = {b.name: f"p{k}" for k, b in enumerate(program.params)}
    _unpack(lines)
    body = Computer(program, printer, pointers, True, names)
    body.start()
    with _turns(program, printer):
        body.body(program.body)
    body.end()
    check_size(printer)
    return lines.text()


@contextmanager
def _turns(program: TileProgram, printer: Expressions) -> Generator[None]:
    """Around what is done at each of the grid points of a block."""
    extents = [printer.term(g.extent).at(UNARY) for g in program.grid]
    points = printer.named(Term(" * ".join(extents) or "1"), "i")
    with printer.lines.block(f"for turn in range(turns_of({points.text}))"):
        outer = printer.scope
        printer.scope = Scope(outer)
        print_grid(program, printer, "place_of(turn)")
        yield
        printer.scope = outer


def _unpack(lines: Lines) -> None:
    lines.put(f"{', '.join(_PARTS)} = parts")


def _kernel(plan: WarpPlan, numbers: Sequence[str], pointers: Sequence[str], names: Named) -> str:
    """The body of the kernel."""
    lines = Lines()
    put, query = lines.put, plan.query
    first = next(k for k in plan.loops if k.values is not None)
    assert first.values is not None
    for letter, s, ring in (
        ("q", query, plan.query_ring),
        ("k", first.keys, plan.key_ring),
        ("v", first.values, plan.value_ring),
    ):
        put(_allocated(letter, names[s.buffer.name, plan.box(s)], ring))
    # Without a buffer for results, a name for none.
    put("o_ring = q_ring" if plan.copied is None else _result_ring(plan.copied, plan, names))
    put(f"q_full = barriers({plan.strips}, 1)")
    put(f"q_empty = barriers({plan.strips}, 1)")
    for letter, ring in (("k", plan.key_ring), ("v", plan.value_ring)):
        put(f"{letter}_full = barriers({ring.slots}, 1)")
        put(f"{letter}_empty = barriers({ring.slots}, {plan.strips})")
    put(f"parts = ({', '.join(_PARTS)})")
    shown = list(dict.fromkeys(names.values()))
    computed = [f"(compute, ({', '.join([*pointers, 'parts'])}, {k}))" for k in range(plan.strips)]
    loaded = f"(load, ({', '.join([*numbers, *shown, 'parts'])}))"
    warps = [WARPS_PER_STRIP] * (plan.strips - 1) + [1]
    registers = [SPECIALISED.computing_registers] * (plan.strips - 1) + [SPECIALISED.loading_registers]
    put(f"gl.warp_specialize([{', '.join([*computed, loaded])}], {warps}, {registers})")
    return lines.text()


def _result_ring(copied: CopiedStore, plan: WarpPlan, names: Named) -> str:
    return _allocated("o", names[copied.store.buffer.name, plan.box(copied.block)], copied.ring)


def _allocated(letter: str, name: str, ring: Ring) -> str:
    shape = [ring.slots, *ring.block]
    layout = f"gl.NVMMASharedLayout.get_default_for({list(ring.block)}, {name}.dtype)"
    return f"{letter}_ring = gl.allocate_shared_memory({name}.dtype, {shape}, {layout})"
