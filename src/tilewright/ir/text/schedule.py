"""Schedules read back from their text: parse(str(s), axes, symbols) == s."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TypeVar

from tilewright.ir.dtype import bool_
from tilewright.ir.expr import SCALARS, Axis, Expr, Symbol, const, integer, make, symbol
from tilewright.ir.form import FormStep
from tilewright.ir.schedule import (
    ClassPlan,
    LaunchConfig,
    Math,
    Memory,
    Reductions,
    Role,
    Schedule,
    Sized,
    Tiling,
)

_PLAN = re.compile(r"(\S+):(grid|resident|streamed|scan)(?:/(-?\d+))?(?:x(-?\d+))?(-?)")
_INFIX: Mapping[type, str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.BitAnd: "and", ast.BitOr: "or", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
    ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip
T = TypeVar("T")
_TRUTHS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not")


def parse(text: str, axes: Iterable[Axis], symbols: Iterable[Symbol] = ()) -> Schedule:
    """The schedule that `text` shows, over `axes` and `symbols` by their names. Raises ValueError for what is none."""
    named, sizes = {a.name: a for a in axes}, {s.name: symbol(s.name, s.low, s.high) for s in symbols}
    classes: list[ClassPlan] = []
    given: dict[str, str] = {}
    for word in _words(text):
        plan = _PLAN.fullmatch(word)
        if plan is not None:
            name, role, chunk, tile, down = plan.groups()
            axis, step, run = _of(named, name), int(tile or 1), int(chunk or 0)
            if step < 1 or run < 0 or run % step or any(c.axis == axis for c in classes):
                raise ValueError(
                    f"{word!r} is no plan of another class: tiles are at least 1 and divide a chunk"
                )
            classes.append(ClassPlan(axis, Role(role), step, run, down == "-"))
            continue
        name, mark, value = word.partition("=")
        if name in given or (mark and not value):
            raise ValueError(f"{name} is given twice, or without a value")
        given[name] = value or "True"
    made = Schedule(Tiling(tuple(classes)))
    readers = _readers(named, sizes)
    kinds = {
        f.name: str(f.type)
        for r in (Tiling, Reductions, Memory, Math, LaunchConfig, Schedule)
        for f in fields(r)
    }
    for name in given:
        if name not in kinds or kinds[name] not in readers:
            raise ValueError(f"a schedule has no field {name!r}")
    return made.changed(**{name: readers[kinds[name]](value) for name, value in given.items()})


def check_text(text: str) -> None:
    """Raise ValueError for what is the schedule of no kernel, whatever its classes are."""
    plans = [found for word in _words(text) if (found := _PLAN.fullmatch(word)) is not None]
    axes = {name: Axis(name, integer(1)) for plan in plans if (name := plan[1])}
    parse(text, axes.values())


def form_steps(text: str) -> tuple[FormStep, ...]:
    """The changes of a form that the text of a schedule names: what its classes belong to. Raises ValueError for what
    is none."""
    found = [value for name, _, value in (w.partition("=") for w in _words(text)) if name == "form_steps"]
    return tuple(map(_step, _items(found[0]))) if found else ()


def _readers(axes: Mapping[str, Axis], sizes: Mapping[str, Expr]) -> Mapping[str, Callable[[str], object]]:
    """What reads a field, by its annotated type."""

    def each(read: Callable[[str], object]) -> Callable[[str], object]:
        return lambda text: tuple(read(x) for x in _items(text))

    def sized(text: str) -> Sized:
        param, _, when = text.partition(" if ")
        return Sized(_number(param), _condition(when, sizes))

    return {
        "bool": lambda text: _of({"True": True, "False": False}, text),
        "int": _number,
        "Axis | None": lambda text: _of(axes, text),
        "tuple[Axis, ...]": each(lambda text: _of(axes, text)),
        "tuple[int, ...]": each(_number),
        "tuple[str, ...]": each(str),
        "tuple[Sized, ...]": each(sized),
        "tuple[FormStep, ...]": each(_step),
    }


def _step(text: str) -> FormStep:
    match = re.fullmatch(r"(\w+)(?:\((.+)\))?", text)
    if match is None:
        raise ValueError(f"{text!r} is no step of a form")
    given = [x.split("=") for x in match[2].split(", ")] if match[2] else []
    if any(len(x) != 2 for x in given):
        raise ValueError(f"{text!r} gives no numbers for classes")
    return FormStep(match[1], tuple((c, _number(n)) for c, n in given))


def _of(known: Mapping[str, T], name: str) -> T:
    if name not in known:
        raise ValueError(f"{name!r} is none of {', '.join(known)}")
    return known[name]


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{text!r} is no number")
    return int(text)


def _words(text: str) -> Iterator[str]:
    """Parts between spaces that stand in no bracket."""
    return _parts(text, " ")


def _items(text: str) -> Iterator[str]:
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError(f"{text!r} is no list")
    items = [x.strip() for x in _parts(text[1:-1], ",")] if text != "[]" else []
    if not all(items):
        raise ValueError(f"{text!r} has an empty item")
    return iter(items)


def _parts(text: str, mark: str) -> Iterator[str]:
    depth, part = 0, ""
    for c in text:
        depth += (c in "([") - (c in ")]")
        if c == mark and depth == 0:
            if part or mark != " ":
                yield part
            part = ""
        else:
            part += c
    if depth != 0:
        raise ValueError(f"brackets of {text!r} do not match")
    if part or mark != " ":
        yield part


def _condition(text: str, sizes: Mapping[str, Expr]) -> Expr:
    """The expression that `ir.expr.show` wrote."""
    try:
        python = re.sub(r"\bnot\(", "not_(", text)  # Python's own binds less than &
        made = _expression(ast.parse(python, mode="eval").body, sizes)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no condition on sizes") from None
    if made.dtype is not bool_:
        raise ValueError(f"{text!r} is a number, and no condition")
    return made


def _expression(x: ast.expr, sizes: Mapping[str, Expr]) -> Expr:
    inner = lambda *parts: tuple(_expression(p, sizes) for p in parts)  # noqa: E731
    if isinstance(x, ast.Constant) and isinstance(x.value, (bool, int)):
        return const(x.value, bool_) if isinstance(x.value, bool) else integer(x.value)
    if isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub) and isinstance(x.operand, ast.Constant):
        return integer(-int(str(x.operand.value)))
    if isinstance(x, ast.Name):
        return _of(sizes, x.id)
    if isinstance(x, ast.BinOp) and type(x.op) in _INFIX:
        return _made(_INFIX[type(x.op)], inner(x.left, x.right))
    if isinstance(x, ast.Compare) and len(x.ops) == 1 and type(x.ops[0]) in _INFIX:
        return _made(_INFIX[type(x.ops[0])], inner(x.left, x.comparators[0]))
    if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and not x.keywords:
        return _made(x.func.id.removesuffix("_"), inner(*x.args))
    raise ValueError(f"{ast.unparse(x)!r} is no part of a condition on sizes")


def _made(op: str, args: tuple[Expr, ...]) -> Expr:
    if op not in SCALARS or SCALARS[op].arity != len(args):
        raise ValueError(f"{op} of {len(args)} is no operation")
    return make(op, args, bool_ if op in _TRUTHS else args[-1].dtype)
