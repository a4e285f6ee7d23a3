"""A call like one before it, served by one native function: what it brings is held against what that one brought, what
the program reads besides is asked for, and the plan runs."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reading, standing
from .reading import Maker, Torch

SOURCE = Path(__file__).parents[1] / "native" / "known_call.cpp"
"""Stands behind `standing.SOURCE` in the text of a library."""

TOGETHER, ARRANGED = -1, -2


class _Brought(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("type", ctypes.c_void_p),
        ("wants_gradient", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("sizes", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("facts", ctypes.c_int32 * len(Torch.FACTS)),
        ("keys", ctypes.c_uint64),
    )


class _AskedRow(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("argument", ctypes.c_void_p), ("answer", ctypes.c_void_p))


class _Given(ctypes.Structure):
    _fields_ = (("leaf", ctypes.c_int64), ("held", ctypes.c_void_p))


class _KnownCall(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("positional", ctypes.c_int64),
        ("brought", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("asks", ctypes.c_int64),
        ("asked", ctypes.c_void_p),
        ("arguments", ctypes.c_int64),
        ("given", ctypes.c_void_p),
        ("run", ctypes.c_void_p),
        ("arrange", ctypes.c_void_p),
        ("alone", ctypes.c_int64),
        ("otherwise", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("all_but", ctypes.c_uint64),
    )


class Question(NamedTuple):
    """A `function`, called without arguments, or with one, and the very object that it must return."""

    function: Callable[..., object]
    answer: object = True
    argument: tuple[object] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KnownCall:
    """What makes a call a known one, and what it does."""

    args: tuple[object, ...]
    """What it brought by position: another one brings tensors alike, and of all else the very same objects."""
    kwargs: dict[str, object]
    """The same by name."""
    asked: Sequence[Question]
    """What must hold of all else."""
    given: Sequence[tuple[int, object]]
    """Of each argument of `run` its number among what is brought, or -1 and itself."""
    run: Callable[[list[Any]], list[Any] | None]
    """Results for the list of arguments; None, and nothing has run, where it does not serve them."""
    alone: int
    """The number of the result that is returned; `TOGETHER`: all of them as a tuple; `ARRANGED`: what `arrange` makes
    of them."""
    arrange: Callable[[list[Any]], object]
    otherwise: object
    """Returned, and nothing has run, where this is another call."""


_makers: list[Maker] = []


def attach(library: ctypes.CDLL) -> None:
    """Let `library` serve calls. It has been attached to by `reading`."""
    _makers[:] = [reading.maker(library.tw_known_call_of)]


_GRADIENT = "requires_grad"
_place = id  # what is meant is the object itself, which the function keeps


def native_call_of(call: KnownCall) -> Callable[..., object] | None:
    """The native function that serves calls like this one. None where there is no native side that looks at words of
    tensors, where no tensor is brought, or one that is not plain or not real, or a tuple, whose items may be other
    tensors in another call."""
    brought = (*call.args, *call.kwargs.values())
    tensors = [x for x in brought if isinstance(x, Tensor)]
    if not (_makers and standing.is_at_hand()) or not tensors or not all(map(_is_plain, tensors)):
        return None
    if any(isinstance(x, (tuple, list, dict)) for x in brought):
        return None
    rows, kept = (_Brought * len(brought))(), list[object]()
    for row, x in zip(rows, brought, strict=True):
        if isinstance(x, Tensor):
            _fill(row, x, kept)
        else:
            row.value = _place(x)
    names = (ctypes.c_void_p * max(1, len(call.kwargs)))(*map(_place, call.kwargs))
    asked = (_AskedRow * max(1, len(call.asked)))(
        *(
            (_place(a.function), _place(a.argument[0]) if a.argument else None, _place(a.answer))
            for a in call.asked
        )
    )
    given = (_Given * max(1, len(call.given)))(*((k, None if k >= 0 else _place(x)) for k, x in call.given))
    at = ctypes.addressof
    table = _KnownCall(
        len(brought), len(call.args), at(rows), at(names), len(call.asked), at(asked), len(call.given), at(given),
        _place(call.run), _place(call.arrange), call.alone, _place(call.otherwise), _place(_GRADIENT), _of_inference(),
    )  # fmt: skip
    values = [x for x in brought if not isinstance(x, Tensor)]
    fixed = [x for k, x in call.given if k < 0]
    parts = (tuple(call.kwargs), tuple(call.asked), call.run, call.arrange, call.otherwise)
    return _makers[0]((at(table), table, (rows, kept, names, asked, given), (values, fixed), parts))


def _is_plain(t: Tensor) -> bool:
    return type(t) in Torch.TYPES and t.layout is torch.strided and not t.is_complex() and not t.is_neg()


@cache
def _of_inference() -> int:
    """The ways in which tensors made under `torch.inference_mode` are kept otherwise: programs do not see them."""
    with torch.inference_mode():
        inside = torch.empty(0)
    with torch.inference_mode(mode=False):
        return reading.keys_of(torch.empty(0)) ^ reading.keys_of(inside)


def _fill(row: _Brought, t: Tensor, kept: list[object]) -> None:
    sizes, strides = array("q", t.shape or (0,)), array("q", t.stride() or (0,))
    row.type, row.wants_gradient, row.rank = _place(type(t)), _place(t.requires_grad), t.dim()
    row.sizes, row.strides = sizes.buffer_info()[0], strides.buffer_info()[0]
    row.facts, row.keys = reading.facts_of(t), reading.keys_of(t) & ~_of_inference()
    kept += (sizes, strides)


class OutputRow(ctypes.Structure):
    """A result that a call makes: its number, where its address goes, and how it lies."""

    _fields_ = (
        ("place", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("dtype", ctypes.c_void_p),
    )


Output = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def output_rows(outputs: Sequence[Output]) -> ctypes.Array[OutputRow]:
    """The same of several. Who uses them keeps `outputs`."""
    rows = (OutputRow * max(1, len(outputs)))()
    for row, (k, slot, shape, strides, dtype) in zip(rows, outputs, strict=False):
        row.place, row.slot = k, slot
        row.shape, row.strides, row.dtype = _place(shape), _place(strides), _place(dtype)
    return rows
