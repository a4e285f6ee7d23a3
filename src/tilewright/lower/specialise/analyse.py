"""Whether the warps of a program can be specialised, and how.

What is understood: a streamed loop over keys (cut into ranges or not) in which a product of the query and a block of
keys gives scores, and mostly a product of what is made of the scores and a block of values is added to results. The
query, keys and values are blocks of descriptors; all else is computed of scores, of rows and of indices. Anything else
is refused in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewright.errors import IllegalSchedule
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, is_const, walk
from tilewright.ir.program import (
    Await,
    Collapse,
    Compute,
    Declare,
    Dot,
    Load,
    Loop,
    Release,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    defines,
    expressions,
    is_binding,
    uses,
    walk_statements,
)
from tilewright.ir.sizes import dims
from tilewright.lower.access.descriptors import NOWHERE, described
from tilewright.lower.variants import Variant, reached, variants
from tilewright.tuning.search_limits import SPECIALISED
from tilewright.tuning.thresholds import GPU_MATMUL

from .plan import STRIP_ROWS, WARPS_PER_STRIP, CopiedStore, KeyLoop, Ring, WarpPlan

SPECIAL = Variant(aligned=True, wide=False)
"""The variant in which descriptors can be used."""

_LAW = "the warps of a kernel are specialised where one loads for products of a loop over keys"


def specialise(program: TileProgram) -> WarpPlan:
    """What each warp of a program does. Raises IllegalSchedule, with the reason in words, where that is not known."""
    _check_kinds(program)
    found = [_key_loop(s) for s in program.loops() if any(isinstance(x, Dot) for x in s.body)]
    whole = next((k for k in found if k.results is not None), None)
    if whole is None or whole.values is None or whole.results is None:
        raise _refused("no loop has a product of scores and a product of what is made of them")
    query = _query(program, found)
    keys, rows = whole.loop.axis, _only(set(query.var.axes) & set(whole.scores.acc.axes))
    columns = _only(set(whole.results.acc.axes) - {rows})
    tiles = _tiles(program, rows, keys, columns)
    strips = tiles[rows] // STRIP_ROWS
    if tiles[rows] != strips * STRIP_ROWS or not 1 <= strips <= SPECIALISED.max_strips:
        raise _refused(
            f"a block of {tiles[rows]} rows is no {STRIP_ROWS} of each of {SPECIALISED.max_strips} warp groups"
        )
    if program.warps != strips * WARPS_PER_STRIP:
        raise _refused(f"{program.warps} warps for {strips} strips of rows")
    _check_values(program, found, query, (rows, keys, columns))
    _check_descriptors(program, [query, *(x for k in found for x in (k.keys, k.values) if x is not None)])
    return WarpPlan(
        strips, rows, keys, columns, tuple((tiles | {rows: STRIP_ROWS}).items()), query, tuple(found),
        tuple(_chains(program.body, found)),
        _ring(strips, [query], tiles | {rows: STRIP_ROWS}, rows),
        _ring(program.stages, [k.keys for k in found], tiles, _only(set(whole.keys.var.axes) - {keys})),
        _ring(program.stages, [k.values for k in found if k.values is not None], tiles, keys),
        _copied(program, tiles | {rows: STRIP_ROWS}, (rows, columns), strips),
    )  # fmt: skip


def _refused(why: str) -> IllegalSchedule:
    return IllegalSchedule(f"warps are not specialised: {why}", law=_LAW)


def _only(axes: set[Axis]) -> Axis:
    if len(axes) != 1:
        raise _refused("a product is not one of two matrices")
    return next(iter(axes))


# --- what a program may consist of -----------------------------------------------


def _check_kinds(program: TileProgram) -> None:
    """Refuse programs with other kinds of statements than those that are understood."""
    if program.scratch or program.over:
        raise _refused("it stores over what it loads, or in scratch memory")
    if SPECIAL not in variants(program):
        raise _refused("no call has aligned addresses within 32 bits")
    for s in program.statements():
        match s:
            case Loop():
                if any(v.op == "var" for e in (s.start, s.stop) for v in walk(e)):
                    raise _refused("a loop ends where data says")
                if not is_binding(s) and not any(isinstance(x, Dot) for x in s.body):
                    raise _refused(f"the loop over {s.axis.name} has no product")
            case Load() | Compute() | Declare() | Update() | Dot() | Await() | Release():
                pass
            case Store() if s.interleaved is None:
                pass
            case Collapse() if len(s.axes) == 1:
                pass
            case _:
                raise _refused(f"a statement of kind {type(s).__name__}")


def _tiles(program: TileProgram, rows: Axis, keys: Axis, columns: Axis) -> dict[Axis, int]:
    """The block axes with their tiles, in the order in which they are bound."""
    found: dict[Axis, int] = {}
    for s in program.loops():
        if s.tile > 1:
            found.setdefault(s.axis, s.tile)
    order = list(found)
    if not {rows, keys, columns} <= set(found) or len(found) > len({rows, keys, columns}) + 1:
        raise _refused(
            "its blocks have other axes than rows, keys, columns and what the first product sums over"
        )
    if order.index(rows) > min(order.index(keys), order.index(columns)):
        raise _refused("rows are not the first dimension of blocks")
    if max(found[keys], found[columns]) > GPU_MATMUL.max_warp_group_columns:
        raise _refused(f"a product of a warp group has at most {GPU_MATMUL.max_warp_group_columns} columns")
    return found


def _query(program: TileProgram, found: Sequence[KeyLoop]) -> Load:
    """The load of what all scores are made of."""
    sides = {v.id for k in found for v in (k.scores.a, k.scores.b) if v.id != k.keys.var.id}
    loads = [s for s in program.statements() if isinstance(s, Load) and s.var.id in sides]
    if len(loads) != 1 or len(sides) != 1:
        raise _refused("scores are made of several queries")
    inside = {id(x) for k in found for x in walk_statements(k.loop.body)}
    if id(loads[0]) in inside:
        raise _refused("the query is loaded in a loop over keys")
    return loads[0]


# --- one loop --------------------------------------------------------------------


def _key_loop(s: Loop) -> KeyLoop:
    """What a loop over keys does in a step."""
    dots = [x for x in s.body if isinstance(x, Dot)]
    loads = {x.var.id: x for x in s.body if isinstance(x, Load)}
    if any(isinstance(x, (Loop, Store)) for x in s.body) or len(dots) > 2:
        raise _refused(f"the loop over {s.axis.name} stores, has a loop inside, or more than two products")
    first = dots[0]
    keys = [loads[v.id] for v in (first.a, first.b) if v.id in loads]
    begun = [x for x in s.body if isinstance(x, Declare) and x.vars == (first.acc,)]
    if len(keys) != 1 or len(begun) != 1 or not is_const(begun[0].values[0], 0) or first.chain:
        raise _refused("a step's first product is no product of a query and keys alone")
    taken: list[Stmt] = [keys[0], begun[0], first]
    length = dims.sub(s.stop, s.start)
    sure, single = dims.at_least(length, 1), is_binding(s)
    values, rescale = None, ()
    if len(dots) == 2:
        values, rescale = _second_product(s, dots[1], loads)
        taken += [values, *rescale, dots[1]]
    between = tuple(x for x in s.body if not any(x is t for t in taken))
    if len(dots) == 1:
        return KeyLoop(s, keys[0], first, between, sure=sure, single=single)
    return KeyLoop(s, keys[0], first, between, rescale, values, dots[1], sure, single)


def _second_product(s: Loop, dot: Dot, loads: dict[int, Load]) -> tuple[Load, tuple[Stmt, ...]]:
    """The values of the second product of a step, and what is done to its sums before."""
    acc = dot.acc.id
    values = [loads[v.id] for v in (dot.a, dot.b) if v.id in loads]
    if len(values) != 1 or dot.chain:
        raise _refused("a step's second product is none of what is computed and what is loaded")
    touching = [x for x in s.body if x is not dot and acc in {*uses(x), *_changed(x)}]
    before = s.body[: next(k for k, x in enumerate(s.body) if x is dot)]
    states = {v for x in walk_statements(s.body) for v in _changed(x)} - {acc}
    for x in touching:
        alone = isinstance(x, Update) and _changed(x) == {acc} and x.mask is None
        if not alone or not any(x is y for y in before) or states & set(uses(x)):
            raise _refused(
                "sums of the second product are read, or changed otherwise than before the product"
            )
    return values[0], tuple(touching)


def _changed(s: Stmt) -> set[int]:
    """Numbers of the states that a statement changes."""
    return {v.id for v in s.vars} if isinstance(s, Update) else {s.acc.id} if isinstance(s, Dot) else set()


def _chains(body: Sequence[Stmt], found: Sequence[KeyLoop]) -> Iterator[tuple[KeyLoop, ...]]:
    """Loops over keys that follow each other, add to the same results, and have a step together."""
    chain: list[KeyLoop] = []
    for s in (*body, None):
        this = next((k for k in found if k.loop is s and k.results is not None), None)
        if this is not None and (not chain or _result(chain[0]) == _result(this)):
            chain.append(this)
            continue
        if any(k.sure for k in chain):
            yield tuple(chain)
        chain = [] if this is None else [this]
        if isinstance(s, Loop) and this is None:
            yield from _chains(s.body, found)


def _result(k: KeyLoop) -> Var | None:
    return None if k.results is None else k.results.acc


# --- values and layouts ----------------------------------------------------------


def _check_values(
    program: TileProgram, found: Sequence[KeyLoop], query: Load, axes: tuple[Axis, Axis, Axis]
) -> None:
    """Refuse values that lie neither as scores nor as results do, and products of other types."""
    rows, keys, columns = axes
    multiplied = {query.var.id, *(x.var.id for k in found for x in (k.keys, k.values) if x is not None)}
    known = ({rows, keys}, {rows, columns}, {rows}, {keys}, {columns}, set[Axis]())
    for s in program.statements():
        for v in defines(s):
            if v.id not in multiplied and set(v.axes) not in known:
                raise _refused(f"{v} lies neither as scores nor as results do")
        if not isinstance(s, Dot) and multiplied & set(uses(s)):
            raise _refused("what products read is read by something else, too")
    inside = {id(x) for k in found for x in walk_statements((k.loop,))}
    for s in program.statements():
        mentioned = {x.value for e in expressions(s) for x in walk(e) if isinstance(x.value, Axis)}
        if id(s) not in inside and keys in mentioned | {a for v in defines(s) for a in v.axes}:
            raise _refused("keys are known outside the loops over them")
        if isinstance(s, Collapse) and (
            s.axes != (keys,) or not all(set(p.axes) <= {rows, keys} for p in s.parts)
        ):
            raise _refused("a reduction over something else than keys")
    for dot in (d for k in found for d in (k.scores, k.results) if d is not None):
        if not dot.a.dtype.is_half or dot.a.dtype is not dot.b.dtype or dot.acc.dtype is not f32:
            raise _refused("a product that is none of fp16 or bf16")
        if rows not in dot.acc.axes or len(dot.acc.axes) != 2 or set(dot.a.axes) & set(dot.b.axes) != {dot.k}:
            raise _refused("a product is not one of two matrices")
    if any(k.loop.axis != keys or k.loop.tile != found[0].loop.tile for k in found):
        raise _refused("loops over several axes have products")


def _check_descriptors(program: TileProgram, loads: Sequence[Load]) -> None:
    """Refuse what no descriptor reaches."""
    usable = {(b.name, d) for b, d in reached(program, SPECIAL)}
    for s in loads:
        if s.descriptor is None or (s.buffer.name, s.descriptor) not in usable:
            raise _refused(f"no descriptor reaches a block of {s.buffer.name}")


def _ring(slots: int, loads: Sequence[Load], tiles: dict[Axis, int], first: Axis) -> Ring:
    """The ring of some loads, whose blocks have the axis `first` as rows where a product takes them."""
    orders = {tuple(_block_axes(s)) for s in loads}
    if len(orders) != 1:
        raise _refused("blocks of one operand lie in memory in several ways")
    (order,) = orders
    if len(order) != 2:
        raise _refused("an operand is no matrix")
    return Ring(slots, (tiles[order[0]], tiles[order[1]]), order[0] != first)


def _copied(
    program: TileProgram, tiles: dict[Axis, int], axes: tuple[Axis, Axis], strips: int
) -> CopiedStore | None:
    """The store of results, if a descriptor reaches its block, and shared memory has room for a buffer."""
    rows, columns = axes
    found = [s for s in program.statements() if isinstance(s, Store) and set(s.axes) == {rows, columns}]
    if (
        len(found) != 1
        or tiles[columns] > SPECIALISED.max_copied_columns
        or not found[0].buffer.dtype.is_half
    ):
        return None
    s = found[0]
    plain = Load(Var(NOWHERE, s.buffer.dtype, s.axes), s.buffer, s.offset, s.mask)
    block = described(plain, tiles)
    if block is None or tuple(_block_axes(block)) != (rows, columns):
        return None
    shown = reached(replace(program, body=(*program.body, block)), SPECIAL)
    if (s.buffer, block.descriptor) not in shown:
        return None
    return CopiedStore(s, block, Ring(strips, (tiles[rows], tiles[columns]), turned=False))


def _block_axes(s: Load) -> Iterator[Axis]:
    """The axes of a block as it lies in memory, the contiguous one last."""
    assert s.descriptor is not None
    for place, length in zip(s.at, s.descriptor.tile, strict=True):
        if length > 1 and isinstance(place.value, Axis):
            yield place.value


def weights_of(dot: Dot, rows: Axis) -> Var:
    """The side of a product that has the rows."""
    return dot.a if rows in dot.a.axes else dot.b
