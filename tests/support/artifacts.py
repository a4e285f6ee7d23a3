"""A small saved model, and files as an attacker would write them: any section, with right hashes, without the key."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tilewright
from tilewright.artifact.file import container, seals
from tilewright.options import Options

PREFIX = struct.Struct("<8sIIQ32s32s")
ALIGNMENT = 64


class Small(nn.Module):
    """A product of ours or a library's, kernels, a constant, a buffer that is written, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls.add_(1)
        y = torch.relu(self.first(x))
        return y.softmax(-1), {"sum": y.sum(0), "calls": self.calls * 2}


@dataclass(frozen=True, slots=True)
class Saved:
    """A model, what it was called with, and its file's bytes."""

    model: nn.Module
    x: Tensor
    data: bytes


def saved(folder: Path) -> Saved:
    """A small model with a free dim, saved."""
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(4, 8)
    same = copy.deepcopy(model)
    compiled = tilewright.compile(model, dims={"x": {0: "batch"}})
    with torch.no_grad():
        compiled.prepare((x,), {})
    path = folder / "small.tw"
    tilewright.save(compiled, path)
    return Saved(same, x, path.read_bytes())


@dataclass(slots=True)
class Parts:
    """A file taken apart: its facts, its rows, and what the sections hold."""

    facts: dict[str, Any]
    rows: list[list[Any]]
    bodies: list[bytes]

    def body(self, name: str) -> bytes:
        """What a section holds."""
        return self.bodies[self._at(name)]

    def text(self, name: str) -> Any:
        """A section of JSON."""
        return json.loads(self.body(name))

    def change(self, name: str, body: bytes) -> None:
        """Put something else into a section; its hash is made right."""
        k = self._at(name)
        self.bodies[k] = body
        self.rows[k][3], self.rows[k][4] = len(body), hashlib.sha256(body).hexdigest()

    def change_text(self, name: str, value: Any) -> None:
        """Put other JSON into a section."""
        self.change(name, canonical(value))

    def _at(self, name: str) -> int:
        return next(k for k, row in enumerate(self.rows) if row[1] == name)

    def names(self) -> list[str]:
        """All sections."""
        return [row[1] for row in self.rows]


def canonical(value: Any) -> bytes:
    """JSON as artifacts have it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def taken_apart(data: bytes) -> Parts:
    """The parts of a file."""
    *_, length, _, _ = PREFIX.unpack(data[: PREFIX.size])
    told = json.loads(data[PREFIX.size : PREFIX.size + length])
    start = PREFIX.size + length
    start += -start % ALIGNMENT
    bodies = [data[start + row[2] : start + row[2] + row[3]] for row in told["sections"]]
    return Parts(told["facts"], told["sections"], bodies)


def put_together(parts: Parts, *, laid: bool = True, sealed: bool = False) -> bytes:
    """A file of parts, with right hashes. `laid`: offsets are made right. `sealed`: by this user's key."""
    at = 0
    for row, body in zip(parts.rows, parts.bodies, strict=True) if laid else ():
        row[2] = at
        at += len(body) + -len(body) % ALIGNMENT
    return with_header(canonical({"facts": parts.facts, "sections": parts.rows}), parts.bodies, sealed=sealed)


def with_header(header: bytes, bodies: Sequence[bytes], *, sealed: bool = False) -> bytes:
    """A file with any bytes as its header."""
    head = PREFIX.pack(
        container.MAGIC, container.VERSION, 0, len(header), hashlib.sha256(header).digest(), bytes(32)
    )
    seal = seals.seal(head[:-32] + header, Options.make()) if sealed else bytes(32)
    data = bytearray(head[:-32] + seal + header)
    for body in bodies:
        data += bytes(-len(data) % ALIGNMENT)
        data += body
    return bytes(data)


def same_results(got: Any, want: Any) -> bool:
    """Whether two results of the small model are the same, but for rounding."""
    pairs = [(got[0], want[0]), (got[1]["sum"], want[1]["sum"]), (got[1]["calls"], want[1]["calls"])]
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


def mutated(value: Any, draw: random.Random) -> Any:
    """A value of JSON with one part of it changed."""
    if isinstance(value, dict) and value:
        name = draw.choice(sorted(value))
        kind = draw.random()
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != name}
        if kind < 0.15:
            return {**value, "more": 1}
        return {**value, name: mutated(value[name], draw)}
    if isinstance(value, list) and value:
        at = draw.randrange(len(value))
        if draw.random() < 0.1:
            return [*value[:at], *value[at + 1 :]]
        return [*value[:at], mutated(value[at], draw), *value[at + 1 :]]
    return draw.choice(
        [None, True, -1, 0, 1, 7, 1 << 40, -(1 << 63), 0.5, "", "s0", "os.system", "aten.add.Tensor", [], {}]
    )
