"""Files of the GGUF format: a table of facts, and tensors, some of them in blocks of small integers.

Only what the demo's language model needs: types F32, Q8_0 and Q4_1. Others are refused by name.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Fact: TypeAlias = "bool | int | float | str | list[Fact]"

ALIGNMENT = 32
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of the format for plain facts, as `struct` names them; 8 is text and 9 a list."""

BLOCKS = {
    0: np.dtype([("x", "<f4")]),
    3: np.dtype([("scale", "<f2"), ("least", "<f2"), ("pairs", "u1", 16)]),
    8: np.dtype([("scale", "<f2"), ("x", "i1", 32)]),
}
"""The blocks of each type of tensor: F32, Q4_1, Q8_0."""


class FormatError(ValueError):
    """The file is not what its format says, or holds what is not read here."""


@dataclass(frozen=True)
class Gguf:
    """What a file holds: its facts, and its tensors as float32."""

    facts: Mapping[str, Fact]
    tensors: Mapping[str, Array]


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place = data, 0

    def number(self, code: str) -> int | float | bool:
        size = struct.calcsize("<" + code)
        if self.place + size > len(self.data):
            raise FormatError("the file ends in the middle of a fact")
        (value,) = struct.unpack_from("<" + code, self.data, self.place)
        self.place += size
        return value

    def count(self, code: str = "Q") -> int:
        return int(self.number(code))

    def text(self) -> str:
        size = self.count()
        start, self.place = self.place, self.place + size
        return self.data[start : self.place].decode("utf-8", errors="replace")

    def fact(self, kind: int) -> Fact:
        if kind == 8:
            return self.text()
        if kind == 9:
            of, size = self.count("I"), self.count()
            return [self.fact(of) for _ in range(size)]
        if kind not in NUMBERS:
            raise FormatError(f"a fact has the unknown type {kind}")
        return self.number(NUMBERS[kind])


def read(path: Path) -> Gguf:
    """The facts and tensors of a file. Raises FormatError."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise FormatError(f"{path} is no GGUF file")
        reader = _Reader(data)
        reader.place = 4
        if (version := reader.count("I")) not in (2, 3):
            raise FormatError(f"{path} has version {version} of the format, 2 and 3 are read")
        tensors, facts = reader.count(), reader.count()
        known = {reader.text(): reader.fact(reader.count("I")) for _ in range(facts)}
        places = [_placed(reader) for _ in range(tensors)]
        align = known.get("general.alignment", ALIGNMENT)
        assert isinstance(align, int)
        start = -(-reader.place // align) * align
        return Gguf(known, {n: _tensor(data, n, shape, kind, start + at) for n, shape, kind, at in places})


def _placed(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.text()
    sizes = [reader.count() for _ in range(reader.count("I"))]
    return name, tuple(reversed(sizes)), reader.count("I"), reader.count()


def _tensor(data: mmap.mmap, name: str, shape: tuple[int, ...], kind: int, start: int) -> Array:
    """A copy, so that the file may be closed."""
    block = BLOCKS.get(kind)
    if block is None:
        raise FormatError(f"tensor {name} has type {kind}; read are {sorted(BLOCKS)}")
    count = int(np.prod(shape)) // (1 if kind == 0 else 32)
    if start + count * block.itemsize > len(data):
        raise FormatError(f"the file ends in the middle of tensor {name}")
    blocks = np.frombuffer(data, block, count, start).copy()
    if kind == 0:
        return blocks["x"].reshape(shape)
    scale = blocks["scale"].astype(np.float32)[:, None]
    if kind == 8:
        return (blocks["x"] * scale).astype(np.float32).reshape(shape)
    pairs = blocks["pairs"]
    values = np.concatenate([pairs & 15, pairs >> 4], axis=1)
    return (values * scale + blocks["least"].astype(np.float32)[:, None]).astype(np.float32).reshape(shape)
