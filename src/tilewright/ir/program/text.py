"""Statements as text, each with all that changes the code."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.expr import Axis, Expr, show

from .statements import (
    Await,
    Branch,
    Check,
    Collapse,
    Compute,
    Declare,
    Descriptor,
    Dot,
    Load,
    Loop,
    Nest,
    Prefix,
    Release,
    Stmt,
    Store,
    Update,
    Var,
)


def shown(x: object) -> str:
    """A decision of a program."""
    return show(x) if isinstance(x, Expr) else x.name if isinstance(x, Axis) else str(x)


def _names(axes: Sequence[Axis]) -> str:
    return ", ".join(a.name for a in axes)


def _defined(variables: Sequence[Var]) -> str:
    """Variables where they are defined, with their types."""
    return ", ".join(f"{v}:{v.dtype}" for v in variables)


def _block(s: Load) -> str:
    """The block that a descriptor reaches, and the tensor that it is a block of."""
    return "" if s.descriptor is None else f" as block {_described(s.descriptor, s.at)}"


def _stored_block(s: Store) -> str:
    """The same of a store."""
    if s.block is None:
        return ""
    pieces = f"{s.block.pieces} blocks from" if s.block.pieces > 1 else "block"
    return f" as {pieces} {_described(s.block.descriptor, s.block.at)}"


def _described(d: Descriptor, at: Sequence[Expr]) -> str:
    def of(es: Sequence[Expr]) -> str:
        return ", ".join(map(show, es))

    tensor = f"{show(d.start)} + [{of(d.extents)}] by [{of(d.strides)}]"
    return f"({of(at)}) of {' x '.join(map(str, d.tile))} in {tensor}"


def _told(selected: object) -> str:
    return "" if selected is None else f" {selected}"


def _runs(s: Load | Store) -> str:
    """What is told of how the elements of an access lie."""
    return f" in runs of {', '.join(map(str, s.runs))}" if s.runs else ""


def _interleaved(s: Store) -> str:
    """How the axes of a store take turns."""
    return "" if s.interleaved is None else f" interleaved: {s.interleaved}"


def _behind(s: Load | Store) -> str:
    return f", {s.behind} behind a shared address" if s.behind else ""


def _alike(s: Load) -> str:
    """Where neighbours are one element of memory."""
    copied = f", copied along {', '.join(a.name for a in s.copied)}" if s.copied else ""
    return (f", each for {', '.join(map(str, s.alike))}" if s.alike else "") + copied


def _nest(s: Nest) -> str:
    """The head of a nest."""
    over = f"by registers of {', '.join(map(str, s.loops))}" if s.loops else "in one register"
    keeps = f" keeping {', '.join(f'v{v}' for v in s.keeps)}" if s.keeps else ""
    return f"{over}{keeps}" + (f" until none has {show(s.until)}" if s.until is not None else "")


def _order(s: Await | Release) -> str:
    """What is said to the kernel in front, or behind."""
    if isinstance(s, Release):
        return "release the kernel behind"
    return f"await the kernel in front{', whosever it is' if s.outside else ''}"


def _suffix(mask: Expr | None) -> str:
    return "" if mask is None else f" if {show(mask)}"


def _unless_sure(condition: Expr) -> Expr | None:
    return None if condition.op == "const" and condition.value else condition


def _loaded(s: Load) -> str:
    """What a load reads, and how."""
    other = "" if s.other is None else f" else {show(s.other)}"
    ahead = "" if s.ahead is None else f" fetching [{show(s.ahead)}]"
    how = f"{' as stored' if s.as_stored else ''}{_told(s.access)}{_runs(s)}{_alike(s)}{_behind(s)}"
    return f"{s.buffer.name}[{show(s.offset)}]{_suffix(s.mask)}{other}{ahead}{_block(s)}{how}"


def show_body(body: Sequence[Stmt], depth: int, lines: list[str]) -> None:
    """Add the text of a body to `lines`, a statement a line."""
    pad = "  " * depth
    for s in body:
        match s:
            case Load():
                lines.append(f"{pad}{_defined([s.var])} = {_loaded(s)}")
            case Compute():
                lines.append(f"{pad}{_defined([s.var])} = {show(s.expr)}")
            case Store():
                past = "" if s.stream is None else f" past the caches{_suffix(_unless_sure(s.stream))}"
                how = f"{past}{_told(s.access)}{_runs(s)}{_interleaved(s)}{_behind(s)}"
                how += _stored_block(s)
                over = f"<{_names(s.axes)}>" if s.axes else ""
                lines.append(
                    f"{pad}{s.buffer.name}{over}[{show(s.offset)}] = {show(s.value)}{_suffix(s.mask)}{how}"
                )
            case Declare():
                values = f"{', '.join(map(show, s.values))}{' absorbed' if s.absorbed else ''}"
                lines.append(f"{pad}state {_defined(s.vars)} = {values}")
            case Update():
                values = f"{', '.join(map(show, s.values))}{_suffix(s.mask)}{'' if s.fused else ' rounding products'}"
                values += " absorbed" if s.absorbed else ""
                lines.append(f"{pad}{', '.join(map(repr, s.vars))} := {values}")
            case Collapse():
                of = ", ".join(map(repr, s.parts))
                order = (" pairwise" if s.pairwise else "") + (f" in blocks of {s.block}" if s.block else "")
                lines.append(
                    f"{pad}{_defined(s.vars)} = {s.reduction.name} of {of} over {_names(s.axes)}{order}"
                )
            case Prefix():
                of = ", ".join(map(repr, s.parts))
                lines.append(
                    f"{pad}{_defined(s.vars)} = running {s.reduction.name} of {of} along {s.axis.name}"
                )
            case Dot():
                sums = f" in sums of {s.chain}" if s.chain else ""
                lines.append(f"{pad}{s.acc} += dot({s.a}, {s.b}) over {s.k.name}{sums}{_told(s.method)}")
            case Check():
                over = f" over {_names(s.axes)}" if s.axes else ""
                lines.append(f"{pad}check {show(s.condition)}{_suffix(s.mask)} error {s.code}{over}")
            case Loop():
                step = f" step {s.tile}" if s.tile != 1 else ""
                how = (f" in {s.stages} stages" if s.stages != 1 else "") + ", a loop" * s.looped
                how += f", {s.unrolled} steps written out" if s.unrolled != 1 else ""
                lines.append(f"{pad}for {s.axis.name} in {show(s.start)} .. {show(s.stop)}{step}{how}")
                show_body(s.body, depth + 1, lines)
            case Nest():
                lines.append(f"{pad}{_nest(s)}")
                show_body(s.body, depth + 1, lines)
            case Branch():
                lines.append(f"{pad}if {show(s.condition)}")
                show_body(s.body, depth + 1, lines)
                if s.orelse:
                    lines.append(f"{pad}else")
                    show_body(s.orelse, depth + 1, lines)
            case Await() | Release():
                lines.append(pad + _order(s))
