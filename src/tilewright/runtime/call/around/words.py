"""Where an object keeps a reference that Python shows under a name: what a variable of an outer function holds, and the
order in which a class is searched. A native function then compares words in place of asking Python. What a Python does
is tried when this module is loaded; where it does otherwise, Python is asked."""

from __future__ import annotations

import ctypes
from abc import ABCMeta
from dataclasses import dataclass
from types import CellType

WORD = ctypes.sizeof(ctypes.c_void_p)
HEAD = 2 * WORD
"""Bytes of what all objects begin with: the number of references, and the type."""


@dataclass(frozen=True, slots=True)
class Word:
    """`of` refers to `value` at the address `at`."""

    of: object
    at: int
    value: object


def word_of_cell(cell: CellType, value: object) -> Word | None:
    """That of a variable of an outer function; None where it does not stand in one word."""
    return _word(cell, CELL_AT, value)


def word_of_attribute(of: object, name: str, value: object) -> Word | None:
    """That of an attribute; None where it may not stand in one word."""
    # Another type of classes may give what it likes under that name.
    plain = name == "__mro__" and type(of) in (type, ABCMeta)
    return _word(of, MRO_AT, value) if plain else None


def _word(of: object, at: int, value: object) -> Word | None:
    return Word(of, id(of) + at, value) if at and _is_at(of, at, value) else None


def _is_at(of: object, at: int, value: object) -> bool:
    return ctypes.c_uint64.from_address(id(of) + at).value == id(value)


def _cell_at() -> int:
    """Bytes from the start of a variable to the reference to what it holds; 0 where that is not found."""
    first, second = object(), object()
    cell = CellType(first)
    for at in range(HEAD, cell.__sizeof__(), WORD):
        seen = list[bool]()
        for value in (first, second, first):
            cell.cell_contents = value
            seen.append(_is_at(cell, at, value))
        if all(seen):
            return at
    return 0


def _mro_at() -> int:
    """Bytes from the start of a class to the reference to the classes that are searched; 0 where that is not found."""

    class First:
        pass

    class Second:
        pass

    class Sample(First):
        pass

    size: int = type.__basicsize__  # pyright: ignore[reportAssignmentType]  (of the class `type` itself)
    for at in range(HEAD, size, WORD):
        seen = list[bool]()
        for base in (First, Second, First):
            Sample.__bases__ = (base,)
            seen.append(_is_at(Sample, at, Sample.__mro__))
        if all(seen):
            return at
    return 0


CELL_AT, MRO_AT = _cell_at(), _mro_at()
