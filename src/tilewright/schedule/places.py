"""Programs that store a line where data say.

    result[i]  becomes  result[i + place * step],  place = index[0] (+ count if negative)

and a place outside is reported and stores nothing."""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.runtime_checks import INDEX_ERROR
from tilewright.ir.dtype import bool_, i64
from tilewright.ir.expr import both, call, cast
from tilewright.ir.program import (
    Check,
    Compute,
    Load,
    Stmt,
    Store,
    TileProgram,
    Var,
    defines,
    rewrite_body,
    value_of,
)
from tilewright.ir.sizes import dims
from tilewright.ir.writes import PlaceFromData


def stored_at(program: TileProgram, result: int, index: int, place: PlaceFromData) -> TileProgram:
    """The program whose parameter number `result` is a memory in which the line that was the result lies at the
    `place` that the first element of parameter `index` names."""
    line, given = program.params[result], program.params[index]
    buffer = replace(line, size=place.size)
    fresh = 1 + max((v.id for s in program.statements() for v in defines(s)), default=-1)
    loaded, at, inside = Var(fresh, given.dtype), Var(fresh + 1, i64), Var(fresh + 2, bool_)
    number = value_of(loaded) if given.dtype is i64 else cast(value_of(loaded), i64)
    low = dims.mul(place.count, dims.integer(-1)) if place.signed else dims.ZERO
    within = call("and", call("ge", number, low), call("lt", number, place.count))
    counted = number
    if place.signed:
        counted = call("where", call("lt", number, dims.ZERO), call("add", number, place.count), number)

    def moved(s: Stmt) -> tuple[Stmt, ...] | None:
        if not isinstance(s, Store) or s.buffer != line:
            return None
        offset = dims.add(s.offset, dims.mul(value_of(at), place.step))
        return (replace(s, buffer=buffer, offset=offset, mask=both(value_of(inside), s.mask)),)

    head = (
        Load(loaded, given, dims.ZERO),
        Compute(inside, within),
        Check(value_of(inside), INDEX_ERROR),
        Compute(at, counted),
    )
    params = tuple(buffer if k == result else b for k, b in enumerate(program.params))
    body = rewrite_body(program.body, moved)
    made = replace(program, params=params, body=(*head, *body))
    made.verify()
    return made
