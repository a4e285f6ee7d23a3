"""What a program comes to by name, and whether that leads to an object."""

# What torch's modules keep begins with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tilewright.tuning.input_limits import GRAPHS

OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))

_NOT_FOLLOWED = (type, types.ModuleType, types.BuiltinFunctionType, Tensor)
"""Objects that lead nearly everywhere, or hold no tensor that a program reads."""


def leads_to(roots: Iterable[object], wanted: frozenset[int], looked_at: Iterable[object]) -> bool:
    """Whether any of the `roots` is, or holds at any depth, an object with a wanted id. True where they hold too much
    to be looked at. Of a function's globals nothing is followed, nor what is `looked_at` elsewhere."""
    seen = set(map(id, looked_at))
    limit = len(seen) + GRAPHS.max_held_objects
    todo = list(roots)
    while todo:
        x = todo.pop()
        if id(x) in wanted:
            return True
        if id(x) in seen or not gc.is_tracked(x) or isinstance(x, _NOT_FOLLOWED):
            continue
        seen.add(id(x))
        if len(seen) > limit:
            return True
        if isinstance(x, types.FunctionType):
            todo += [x.__closure__, x.__defaults__, x.__kwdefaults__, vars(x)]
        else:
            todo += gc.get_referents(x)
    return False


def reached(target: object) -> list[torch.nn.Module | types.FunctionType]:
    """The modules and functions that `target` is or uses by name, each once. What torch defines is not followed."""
    found: dict[int, torch.nn.Module | types.FunctionType] = {}
    todo = [target]
    while todo:
        x = todo.pop()
        if id(x) in found:
            continue
        if isinstance(x, torch.nn.Module):
            found |= {id(m): m for m in x.modules()}
            methods = [m for c in dict.fromkeys(map(type, x.modules())) for m in methods_of(c)]
            todo += [vars(owner)[name] for owner, name in methods]
        elif isinstance(x, types.FunctionType) and not _is_torchs(x):
            found[id(x)] = x
            todo += [v for _, v in cells_of(x)] + [x.__globals__[n] for n in globals_of(x)]
    return list(found.values())


def methods_of(of: type) -> list[tuple[type, str]]:
    """The forward method of a class of modules, and those that it names, directly or not: the classes that define
    them, and their names. What torch defines is not followed."""
    found: dict[str, tuple[type, str]] = {}
    todo = ["forward"]
    while todo:
        name = todo.pop()
        owner = next((c for c in of.__mro__ if name in vars(c)), None)
        if name in found or owner is None:
            continue
        method = vars(owner)[name]
        if name == "forward" or (isinstance(method, types.FunctionType) and not _is_torchs(method)):
            found[name] = owner, name
        if isinstance(method, types.FunctionType) and not _is_torchs(method):
            todo += [n for code in _codes(method.__code__) for n in code.co_names]
    return list(found.values())


def _is_torchs(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


def cells_of(function: types.FunctionType) -> list[tuple[types.CellType, object]]:
    """The variables of outer functions, with what they hold, if anything yet."""
    held: list[tuple[types.CellType, object]] = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            held.append((cell, cell.cell_contents))
    return held


def globals_of(function: types.FunctionType) -> list[str]:
    """The global names that a function uses, or a function within it."""
    names = dict.fromkeys(n for code in _codes(function.__code__) for n in code.co_names)
    return [n for n in names if n in function.__globals__]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def global_hooks() -> tuple[Mapping[Any, object], ...]:
    """The hooks that torch runs around all modules."""
    held = vars(torch.nn.modules.module)
    return tuple(held[n] for n in ("_global_forward_hooks", "_global_forward_pre_hooks"))
