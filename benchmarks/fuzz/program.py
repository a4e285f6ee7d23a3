"""A random program as data: its inputs, its statements, what it returns, and the text of it as Python."""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Size = int | str
HALVES = ("float16", "bfloat16")
LAYOUTS = ("contiguous", "turned", "strided", "offset", "expanded", "channels_last")
_NARROW = re.compile(r"torch\.(float32|float16|bfloat16)\b")


@dataclass(frozen=True)
class Given:
    """An input. `sizes` are numbers or names of sizes; integers lie in [0, bound)."""

    name: str
    sizes: tuple[Size, ...]
    dtype: str
    layout: str = "contiguous"
    grad: bool = False
    bound: int = 2

    def make(
        self, sizes: Mapping[str, int], seed: int, *, double: bool = False, device: str = "cpu"
    ) -> Tensor:
        """Random contents in the layout that is asked for; the same numbers in single and in `double`, everywhere."""
        draw = torch.Generator().manual_seed(1009 * seed + int(self.name[1:]))
        shape = [sizes[s] if isinstance(s, str) else s for s in self.sizes]
        dtype = getattr(torch, self.dtype)
        stored = list(shape)
        if self.layout == "turned":
            stored[-1], stored[-2] = stored[-2], stored[-1]
        elif self.layout == "strided":
            stored[-1] *= 2
        elif self.layout == "offset":
            stored[0] += 1
        elif self.layout == "expanded":
            stored[0] = 1
        if dtype.is_floating_point:
            x = torch.randn(stored, generator=draw, device="cpu").to(dtype)
            x = x.double() if double else x
        elif dtype is torch.bool:
            x = torch.randint(0, 2, stored, generator=draw, device="cpu") > 0
        else:
            x = torch.randint(0, self.bound, stored, generator=draw, device="cpu").to(dtype)
        x = _laid(x.to(device), self.layout, shape)
        return x.requires_grad_(self.grad)


def _laid(x: Tensor, layout: str, shape: list[int]) -> Tensor:
    """Contents as they lie in memory, seen in `shape`."""
    if layout == "turned":
        return x.transpose(-1, -2)
    if layout == "strided":
        return x[..., ::2]
    if layout == "offset":
        return x[1:]
    if layout == "expanded":
        return x.expand(shape)
    return x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x


@dataclass(frozen=True)
class Statement:
    """`made` are the names that it binds; `{0}`, `{1}`, ... in `template` are its operands."""

    made: tuple[str, ...]
    template: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        right = self.template.format(*self.operands)
        return f"{', '.join(self.made)} = {right}" if self.made else right


@dataclass(frozen=True)
class Program:
    """Inputs, statements, and the names of what it returns. `sizes` are those of the first call, `later` those of the
    second (none: sizes are fixed)."""

    givens: tuple[Given, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, int]
    later: Mapping[str, int]

    def source(self) -> str:
        """The function `forward`, as text."""
        lines = [f"def forward({', '.join(g.name for g in self.givens)}):"]
        lines += [f"    {s}" for s in self.statements]
        lines.append(f"    return ({', '.join(self.outputs)},)")
        return "\n".join(lines) + "\n"

    def inputs(
        self, seed: int, *, later: bool = False, double: bool = False, device: str = "cpu"
    ) -> list[Tensor]:
        """Fresh inputs."""
        sizes = self.later if later else self.sizes
        return [g.make(sizes, seed, double=double, device=device) for g in self.givens]


def function(source: str, *, double: bool = False) -> Callable[..., tuple[Tensor, ...]]:
    """`forward` of a source text; in `double`, every narrower float that it names is float64, and what integers become
    where a float is asked for is as well."""
    text = _NARROW.sub("torch.float64", source).replace(".float()", ".double()") if double else source
    name = f"<program {abs(hash(text)):x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, object] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(text, name, "exec"), space)
    forward: Callable[..., tuple[Tensor, ...]] = space["forward"]  # type: ignore[assignment]
    if not double:
        return forward

    def wide(*inputs: Tensor) -> tuple[Tensor, ...]:
        with default_dtype(torch.float64):
            return forward(*inputs)

    return wide


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """The type that integers have after a root, a quotient or a mean."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def has_halves(program: Program) -> bool:
    """Whether any value is of a half type."""
    text = program.source()
    return any(h in text for h in HALVES) or any(g.dtype in HALVES for g in program.givens)


def pick(draw: random.Random, weights: Mapping[str, float]) -> str:
    """A key, as often as its weight says."""
    return draw.choices(list(weights), list(weights.values()))[0]


def read(text: str) -> Program:
    """The program whose `repr` a text is."""
    made = eval(text, {"Given": Given, "Statement": Statement, "Program": Program})
    assert isinstance(made, Program)
    return made
