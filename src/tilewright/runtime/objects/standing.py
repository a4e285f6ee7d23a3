"""Whether tensors are what they were when somebody looked at them: at the same address, of the same sizes, strides,
type and device, not written since. One native function reads some words of each. Nothing of torch tells that one of
them has changed (`t.data = other` goes past every counter), so that each tensor is looked at.

Where torch keeps these words is no promise of torch's. It is found, and what the words tell is tried, when the native
side is loaded (`find_words`): with a torch that keeps them otherwise, tensors are looked at through its own functions.
"""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import reading
from .reading import Maker

SOURCE = Path(__file__).parents[1] / "native" / "standing.cpp"
"""Stands behind `reading.SOURCE` in the text of a library."""

FORM_BYTES = 120
HEAD_BYTES, FORM_START = 64, 128
"""Of an object of torch's, as far as words are looked for, and as far as the form of a tensor may begin."""


class TensorWords(ctypes.Structure):
    """Bytes to a word from the start of what holds it: of a tensor's implementation to its storage, to its rank (sizes,
    strides, start, type, device and the ways in which it is kept follow), to what counts writes, and to these ways; of
    a storage to its address, and of what counts to the number."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("storage", "form", "counter", "keys", "data", "writes")
    )


class _Seen(ctypes.Structure):
    _fields_ = (
        ("place", ctypes.c_int64),
        ("counted", ctypes.c_int64),
        ("tensor", ctypes.c_void_p),
        ("storage", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("writes", ctypes.c_uint64),
        ("form", ctypes.c_char * FORM_BYTES),
    )


class _Table(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("seen", ctypes.c_void_p))


Look = Callable[[list[Any]], bool]


class StandingTensors(NamedTuple):
    """`still`: whether the arguments of a list are what they were when `note` last looked at them. False if one could
    not be noted: what is no plain tensor, or has more than five dims."""

    still: Look
    note: Look
    noted: memoryview

    def take(self, other: StandingTensors) -> None:
        """What `other` has noted of the same arguments, in one step: no thread finds a part of it."""
        self.noted[:] = other.noted


_makers: list[tuple[Maker, Maker]] = []


def standing(places: Sequence[int], counted: frozenset[int] = frozenset()) -> StandingTensors | None:
    """What looks at the arguments with these numbers, of which `counted` must also be unwritten; nothing is noted yet.
    None where no native side is there, or torch is not as expected."""
    if not _makers:
        return None
    rows = (_Seen * max(1, len(places)))()
    for row, k in zip(rows, places, strict=False):
        row.place, row.counted = k, k in counted
    table = _Table(len(places), ctypes.addressof(rows))
    self = (ctypes.addressof(table), table, rows)
    still, note = (make(self) for make in _makers[0])
    return StandingTensors(still, note, memoryview(rows).cast("B"))


def is_at_hand() -> bool:
    """Whether words of tensors are looked at."""
    return bool(_makers)


def attach(library: ctypes.CDLL) -> None:
    """Let `library` look at tensors, where torch is as expected. It has been attached to by `reading`."""
    _makers.clear()
    found = find_words()
    if found is None:
        return
    library.tw_attach_words(ctypes.byref(found))
    _makers[:] = [(reading.maker(library.tw_stand), reading.maker(library.tw_note))]
    if not _stands_well():
        _makers.clear()


def find_words() -> TensorWords | None:
    """Where this torch keeps its words; None where they are not found."""
    t = torch.empty(2, 3, 4, 5)
    storage = t.untyped_storage()
    head, held = _words(t._cdata), _words(storage._cdata)
    form = reading.sizes_address(t) - t._cdata - ctypes.sizeof(ctypes.c_int64)
    if storage._cdata not in head or storage.data_ptr() not in held or not 0 < form < FORM_START:
        return None
    counter = _counter()
    if counter is None or ctypes.c_int64.from_address(t._cdata + form).value != t.dim():
        return None
    keys = _words(t._cdata + form + FORM_BYTES - HEAD_BYTES)
    if reading.keys_of(t) not in keys:
        return None
    word = ctypes.sizeof(ctypes.c_void_p)
    at = head.index(storage._cdata) * word, held.index(storage.data_ptr()) * word
    last = form + FORM_BYTES - HEAD_BYTES + keys.index(reading.keys_of(t)) * word
    return TensorWords(at[0], form, counter[0], last, at[1], counter[1])


def _words(address: int) -> list[int]:
    return list((ctypes.c_uint64 * (HEAD_BYTES // 8)).from_address(address))


def _counter() -> tuple[int, int] | None:
    """Where a tensor's implementation keeps what counts writes, and where that keeps the number. What an unknown word
    points to is read through the system, which refuses what is no memory."""
    t, writes = torch.zeros(2), 37
    for _ in range(writes):
        t.zero_()
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return None
    try:
        for place, word in enumerate(_words(t._cdata)):
            numbers = _numbers(memory, word)
            if writes not in numbers:
                continue
            t.zero_()
            at = numbers.index(writes)
            again = _numbers(memory, word)
            if len(again) > at and again[at] == writes + 1:
                return place * 8, at * 4
    finally:
        os.close(memory)
    return None


def _numbers(memory: int, address: int) -> list[int]:
    """The first numbers of 4 bytes at an address; none where nothing can be read."""
    if not address or address % 8 or address >> 47:
        return []
    try:
        found = os.pread(memory, 32, address)
    except OSError:
        return []
    return list(memoryview(found).cast("I"))


def _stands_well() -> bool:
    """Whether every kind of change is seen, and seen as what stands once it is noted."""
    t = torch.nn.Parameter(torch.arange(24.0).view(2, 3, 4).clone(), requires_grad=False)
    other = torch.arange(24.0).view(2, 3, 4).clone()
    changes: tuple[Callable[[], object], ...] = (
        lambda: setattr(t, "data", other),
        lambda: setattr(t, "data", torch._neg_view(other)),
        lambda: setattr(t, "data", other.view(torch.int32)),
        lambda: setattr(t, "data", other.view(4, 6)),
        lambda: setattr(t, "data", other.view(24).as_strided((4, 6), (6, 1), 0).t()),
        lambda: setattr(t, "data", other.view(24)[1:]),
        lambda: setattr(t, "data", other.view(24)[1:].view(torch.float16)),
        lambda: t.resize_(40),
        lambda: t.untyped_storage().resize_(1 << 14),
        lambda: torch.utils.swap_tensors(t, torch.nn.Parameter(torch.zeros(2), requires_grad=False)),
        lambda: t.zero_(),
    )
    look = standing((0,), frozenset({0}))
    if look is None or look.still([t]):
        return False
    for change in changes:
        if not look.note([t]) or not look.still([t]):
            return False
        change()
        if look.still([t]):
            return False
    free = standing((0,))
    assert free is not None
    seen = free.note([t])
    t.add_(1)
    # Sizes of more dims stand elsewhere, where they may change unseen: they are not noted.
    return seen and free.still([t]) and not free.note([torch.zeros([1] * 6)])
