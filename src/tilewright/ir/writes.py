"""What of a program's writes into its inputs is done where the inputs lie, and why the rest is copied there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from .expr import Expr
from .graph import Op, Value


class WriteCopied(Enum):
    """Why a write copies."""

    GIVEN = "its value is an input, a constant, or a view"
    CALL = "a library call makes its value"
    OTHER_BASE = "its value is another tensor with some elements replaced"
    SEVERAL = "its value or its input has another write"
    OVERLAPS = "elements of the input may share a place"
    LAYOUT = "its value lies in memory otherwise than the input"
    SHOWN = "an output shows the old value"
    VIEWED = "an output of free sizes is a view of the new value, whose place torch reads off it"
    READ_LATER = "a later step reads the old value"
    OTHER_ELEMENTS = "what stores it reads other elements of the old value"
    MAY_FAIL = "what makes it may find an index outside, or a divisor of 0, when some of it is stored"
    ORDER = "its loops may read an element after it was stored over"


@dataclass(frozen=True, slots=True)
class WriteVerdict:
    """Of the write into input number `input`: None where it is done in place, else the first condition that fails."""

    input: int
    reason: WriteCopied | None


@dataclass(frozen=True, slots=True)
class PlaceFromData:
    """Where a line lies in a memory of `size` elements: `step` times the one element of `index` behind its start. It
    has `count` places; negative numbers count from the end if they are `signed`."""

    index: Value
    step: Expr
    count: Expr
    size: Expr
    signed: bool


@dataclass(frozen=True, slots=True)
class StoredInInput:
    """A kernel's result lies in input number `input`, `starts` elements from its first along each dim, and where `at`
    says behind that. The kernel may load `over` elements of it: values that are memory of the input up to then."""

    input: int
    starts: tuple[Expr, ...]
    over: frozenset[Value] = frozenset()
    at: PlaceFromData | None = None


@dataclass(frozen=True, slots=True)
class DoneInPlace:
    """What is done where inputs lie: results of kernels, and steps of calls, by the number of their input. And results
    of kernels that lie where an operand lay which nobody reads any more (`successors`)."""

    verdicts: tuple[WriteVerdict, ...] = ()
    stored: Mapping[Value, StoredInInput] = field(default_factory=dict[Value, StoredInInput])
    calls: Mapping[Op, int] = field(default_factory=dict[Op, int])
    successors: Mapping[Value, Value] = field(default_factory=dict[Value, Value])


NOTHING_IN_PLACE = DoneInPlace()
