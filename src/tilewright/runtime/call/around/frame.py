"""The function that torch enters to run a program, and what its variables hold in one call."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a function: its global names, its arguments by name, which a key knows, the variables of outer
    functions, and the functions themselves that may change."""

    globals: dict[str, Any]
    given: Mapping[str, object]
    cells: Mapping[str, types.CellType]
    functions: tuple[types.FunctionType, ...] = ()


def frame_of(
    target: Callable[..., object], around: types.FunctionType | None, args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> Frame | None:  # fmt: skip
    """The frame in which Dynamo traces a call of `target`, or of the function `around` it, which takes and hands on
    all arguments; None where that is no function of Python's."""
    if around is not None:
        return Frame(around.__globals__, {"args": args, "kwargs": kwargs, "target": target}, {})
    runs = target.forward if isinstance(target, torch.nn.Module) else target
    if isinstance(runs, types.MethodType):
        args, runs = (runs.__self__, *args), runs.__func__
    if not isinstance(runs, types.FunctionType):
        return None
    try:
        bound = inspect.Signature.from_callable(runs, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    cells = dict(zip(runs.__code__.co_freevars, runs.__closure__ or (), strict=True))
    return Frame(runs.__globals__, bound.arguments, cells, (runs,))
