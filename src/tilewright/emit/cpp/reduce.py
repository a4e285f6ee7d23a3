"""Merging the states of a block over one axis, in a fixed order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tilewright.ir.expr import Axis
from tilewright.ir.program import Collapse, Var, value_of
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes.dims import ONE

from .expr import INFIX, TRUTH, Expressions, typed
from .scope import Lines, RegisterPlace, Scope, Style, VectorUnit, bare, count_uses
from .statements import Body

ACROSS = {"add": "reduce_add", "mul": "reduce_mul", "maximum": "reduce_max", "minimum": "reduce_min"}
TRUTHS = {"or": "any", "maximum": "any", "add": "any", "and": "all", "minimum": "all", "mul": "all"}


def along(s: Collapse) -> Axis:
    """The axis of a merge: one thread has a whole block, and merges along one axis at a time."""
    (only,) = s.axes
    return only


def collapse(body: Body, s: Collapse, helpers: Helpers) -> None:
    """Print `s`: registers first (pairwise, or in order for tuples), then the lanes of the last one."""
    printer = body.printer
    dims = body.blocks.dims(s.vars[0].axes)
    across = along(s) == body.program.lane and body.blocks.lanes(body.blocks.dims(s.axes)) > 1
    for v in s.vars:
        if body.place(v, dims, array=True).array:
            body.declare_array(v, dims)
    with body.nest(dims):
        if across:
            _across_lanes(body, s, helpers)
        else:
            _in_order(body, s)
    printer.scope.forget(printer.states)


def _registers(body: Body, s: Collapse, part: Var) -> list[str]:
    """The registers of one state along the collapsed axis, for the open unit."""
    count = body.blocks.registers(body.printer.places[part.id].dims, along(s))
    outer = body.printer.unit
    found: list[str] = []
    for k in range(count):
        index = {**outer.index, along(s): str(k)} if count > 1 else outer.index
        body.printer.unit = VectorUnit(outer.values, outer.lane, outer.lanes, index)
        found.append(body.printer.access(part.id))
    body.printer.unit = outer
    return found


def _across_lanes(body: Body, s: Collapse, helpers: Helpers) -> None:
    op, truth = s.reduction.combiner, s.vars[0].dtype.name == "bool"
    registers = [_registers(body, s, part) for part in s.parts]
    if s.pairwise and op is not None:
        function = (TRUTHS if truth else ACROSS)[op]
        body.define(s.vars[0], f"{function}({bare(_tree(op, truth, registers[0]))})")
        return
    helper = helpers.number(s.reduction)
    names = [body.printer.fresh() for _ in s.parts]
    lanes = str(body.blocks.lanes(body.blocks.dims(s.axes)))
    for name, part, own in zip(names, s.parts, registers, strict=True):
        body.lines.put(f"{body.printer.style.vector(part.dtype, lanes)} {name} = {own[0]};")
    for k in range(1, len(registers[0])):
        body.lines.put(f"merge{helper}({', '.join(names + [own[k] for own in registers])});")
    results = [body.printer.access(v.id) for v in s.vars]
    for v in s.vars:
        if not body.printer.places[v.id].array:
            body.lines.put(f"{typed(v, body.printer.style, body.printer.unit)} v{v.id};")
    body.lines.put(f"lanes{helper}({', '.join(names + results)});")


def _tree(op: str, truth: bool, terms: list[str]) -> str:
    if len(terms) == 1:
        return terms[0]
    half = (len(terms) + 1) // 2
    return _join(op, truth, _tree(op, truth, terms[:half]), _tree(op, truth, terms[half:]))


def _join(op: str, truth: bool, a: str, b: str) -> str:
    if truth and op in TRUTH:
        return TRUTH[op].format(a=a, b=b, n="~")
    return f"({a} {INFIX[op]} {b})" if op in INFIX else f"{op}({bare(a)}, {bare(b)})"


def _in_order(body: Body, s: Collapse) -> None:
    """Merge along an axis that is not vectorised: loops over its index. In blocks, each adds up its own first."""
    count = body.blocks.registers(body.printer.places[s.parts[0].id].dims, along(s))
    u = f"u{body.axis_name(along(s))[1:]}"
    for v, part in zip(s.vars, s.parts, strict=True):
        body.define(v, _part(body, s, part, "0" if count > 1 else ""), mutable=True)
    first = min(s.block or count, count)
    if first > 1:
        with body.lines.block(f"for (i64 {u} = 1; {u} < {first}; {u}++)"):
            _merge_part(body, s, u)
    if first == count:
        return
    w = f"w{s.vars[0].id}"
    sums = Var(-1 - s.vars[0].id, s.vars[0].dtype, s.vars[0].axes)
    with body.lines.block(f"for (i64 {w} = {s.block}; {w} < {count}; {w} += {s.block})"):
        body.printer.places[sums.id] = RegisterPlace(
            f"s{s.vars[0].id}", sums, body.blocks.dims(sums.axes), array=False
        )
        body.define(sums, _part(body, s, s.parts[0], w), mutable=True)
        end = f"{w} + {s.block}" if count % s.block == 0 else f"minimum({w} + {s.block}, {count})"
        with body.lines.block(f"for (i64 {u} = {w} + 1; {u} < {end}; {u}++)"):
            _merge_part(body, replace(s, vars=(sums,)), u)
        _merge_part(body, replace(s, parts=(sums,)), w)


def _part(body: Body, s: Collapse, part: Var, index: str) -> str:
    """The part of this unit at one place of the merged axis; everywhere the same without an index."""
    printer, unit = body.printer, body.printer.unit
    if index:
        printer.unit = VectorUnit(unit.values, unit.lane, unit.lanes, {**unit.index, along(s): index})
    found = printer.access(part.id)
    printer.unit = unit
    return found


def _merge_part(body: Body, s: Collapse, index: str) -> None:
    """Print the merge of the part at one place of the axis, in a scope of its own."""
    printer, unit = body.printer, body.printer.unit
    outer = printer.scope
    printer.scope = Scope(outer)
    printer.unit = VectorUnit(unit.values, unit.lane, unit.lanes, {**unit.index, along(s): index})
    _merge(body, s)
    printer.scope, printer.unit = outer, unit


def begin(body: Body, s: Collapse) -> None:
    """Print the states in which a run merges the values of `s` as it makes them, with nothing merged yet."""
    dims = body.blocks.dims(s.vars[0].axes)
    for v in s.vars:
        if body.place(v, dims, array=True).array:
            body.declare_array(v, dims)
    sums = Var(-1 - s.vars[0].id, s.vars[0].dtype, s.vars[0].axes) if s.block else None
    if sums is not None:
        body.printer.places[sums.id] = RegisterPlace(
            f"w{s.vars[0].id}", sums, dims, bool(body.blocks.counts(dims))
        )
        sizes = "".join(f"[{n}]" for _, n in body.blocks.counts(dims))
        body.lines.put(f"{typed(sums, body.printer.style, body.unit(dims))} w{s.vars[0].id}{sizes};")
    with body.nest(dims):
        for v, e in zip(s.vars, s.reduction.identity, strict=True):
            body.define(v, body.value(e, v), mutable=True)
            if sums is not None:
                body.lines.put(f"{body.printer.access(sums.id)} = {body.value(e, sums)};")
    body.printer.states |= {v.id for v in (*s.vars, *((sums,) if sums is not None else ()))}


def merge(body: Body, s: Collapse) -> None:
    """Print the merge of this unit's parts of `s` into its results so far; in blocks, into the sum of the block."""
    if not s.block:
        _merge(body, s)
        return
    sums = body.printer.places[-1 - s.vars[0].id]
    _merge(body, replace(s, vars=(sums.var,)))
    index = body.printer.unit.index[along(s)]
    count = body.blocks.registers(body.blocks.dims(s.parts[0].axes), along(s))
    last = "" if count % s.block == 0 else f" || {index} == {count - 1}"
    with body.lines.block(f"if ({index} % {s.block} == {s.block - 1}{last})"):
        _merge(body, replace(s, parts=(sums.var,)))
        body.lines.put(
            f"{body.printer.access(sums.var.id)} = {body.value(s.reduction.identity[0], sums.var)};"
        )


def _merge(body: Body, s: Collapse) -> None:
    printer, unit, counts = body.printer, body.printer.unit, body.printer.counts
    merged = s.reduction.merged([value_of(v) for v in s.vars], [value_of(p) for p in s.parts])
    printer.counts = count_uses(merged)
    printer.states |= {v.id for v in s.vars}
    texts = [body.value(e, v) for e, v in zip(merged, s.vars, strict=True)]
    names = [printer.fresh() for _ in texts] if len(texts) > 1 else []
    for v, name, text in zip(s.vars, names, texts, strict=False):
        body.lines.put(f"const {typed(v, printer.style, unit)} {name} = {bare(text)};")
    for v, text in zip(s.vars, names or texts, strict=True):
        body.lines.put(f"{printer.access(v.id)} = {bare(text)};")
    printer.counts = counts


class Helpers:
    """Functions that merge tuple states, printed once in each translation unit that uses them."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self.numbers: dict[Reduction, int] = {}
        self.asked: set[int] = set()
        """Numbers given out since somebody last emptied this."""

    def number(self, reduction: Reduction) -> int:
        """The number of the functions `merge<n>` and `lanes<n>` of a reduction."""
        found = self.numbers.setdefault(reduction, len(self.numbers))
        self.asked.add(found)
        return found

    def text(self, numbers: Collection[int]) -> str:
        """The functions of these numbers."""
        return "".join(self._functions(n, r) for r, n in self.numbers.items() if n in numbers)

    def _functions(self, number: int, reduction: Reduction) -> str:
        lines = Lines()
        printer = Expressions(self.style, {}, lines)
        lane = Axis("lane", ONE)
        printer.unit = VectorUnit({}, lane, "L")
        sides: dict[str, list[Var]] = {"a": [], "b": []}
        for side in sides:
            for k, dtype in enumerate(reduction.state):
                var = Var(len(printer.places), dtype, (lane,))
                printer.places[var.id] = RegisterPlace(f"{side}{k}", var, ((lane, 2),), False)
                sides[side].append(var)
        kinds = [self.style.vector(d, "L") for d in reduction.state]
        scalars = [self.style.scalar(d) for d in reduction.state]
        into = ", ".join(f"{t}& a{k}" for k, t in enumerate(kinds))
        new = ", ".join(f"{t} b{k}" for k, t in enumerate(kinds))
        with lines.block(f"template <int L> TW_INLINE void merge{number}({into}, {new})"):
            merged = reduction.merged([value_of(v) for v in sides["a"]], [value_of(v) for v in sides["b"]])
            printer.counts = count_uses(merged)
            for k, e in enumerate(merged):
                lines.put(f"const {kinds[k]} r{k} = {bare(printer.vector(e))};")
            for k in range(len(merged)):
                lines.put(f"a{k} = r{k};")
        _lanes_function(lines, number, kinds, scalars)
        return lines.text()


def _lanes_function(lines: Lines, number: int, kinds: Sequence[str], scalars: Sequence[str]) -> None:
    count = range(len(kinds))
    values = ", ".join(f"{t} a{k}" for k, t in enumerate(kinds))
    out = ", ".join(f"{t}& o{k}" for k, t in enumerate(scalars))
    with lines.block(f"template <int L> TW_INLINE void lanes{number}({values}, {out})"):
        with lines.block("if constexpr (L == 1)", "} else {"):
            for k in count:
                lines.put(f"o{k} = first(a{k});")
        lines.depth += 1
        for k in count:
            lines.put(f"auto h{k} = lo(a{k});")
        lines.put(f"merge{number}({', '.join([*(f'h{k}' for k in count), *(f'hi(a{k})' for k in count)])});")
        lines.put(f"lanes{number}({', '.join([*(f'h{k}' for k in count), *(f'o{k}' for k in count)])});")
        lines.depth -= 1
        lines.put("}")
