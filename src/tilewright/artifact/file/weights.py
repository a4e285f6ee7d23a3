"""A file of weights beside an artifact, in the form of safetensors, so that other programs read it too.

bytes of the header (8) | header: JSON, name -> type, shape, offsets behind the header | elements
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from .disk import replacing
from .strict_json import dump

TYPES = {
    "f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "i64": "I64", "i32": "I32", "i16": "I16", "i8": "I8",
    "u8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Names of element types there, by ours; others are written as bytes."""


class Weight(Protocol):
    """A tensor to write."""

    @property
    def name(self) -> str: ...
    @property
    def data(self) -> memoryview: ...
    @property
    def form(self) -> tuple[str, tuple[int, ...]] | None: ...


@contextmanager
def writing(path: Path, tensors: Sequence[Weight]) -> Generator[list[int]]:
    """Write them; gives where each begins in the file. It takes the place of `path` at the end of the block, if that
    ends well. Raises OSError."""
    rows: dict[str, dict[str, object]] = {}
    starts: list[int] = []
    at = 0
    for t in tensors:
        kind, shape = t.form or ("u8", (len(t.data),))
        if kind not in TYPES:
            kind, shape = "u8", (len(t.data),)
        rows[t.name] = {"dtype": TYPES[kind], "shape": list(shape), "data_offsets": [at, at + len(t.data)]}
        starts.append(at)
        at += len(t.data)
    header = dump(rows)  # pyright: ignore[reportArgumentType]  (names, numbers and lists of them)
    header += b" " * (-(len(header) + 8) % 64)
    with replacing(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for t in tensors:
            file.write(t.data)
        file.flush()
        os.fsync(file.fileno())  # a full disk is known before anything takes its place
        yield [8 + len(header) + start for start in starts]
