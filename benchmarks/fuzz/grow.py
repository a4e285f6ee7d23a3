"""Grows random programs: a statement stays if eager runs it and its result hangs on no rounding.

Every statement is run in four copies of the program: as it is, in float64, in float64 with inputs moved a little, and
at the second sizes. What eager refuses, what overflows, and what a small change of the inputs throws about (a floor
near an integer, an index of two nearly equal values) is dropped, so that no verdict needs an excuse.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.fuzz.ops import KINDS, Line
from benchmarks.fuzz.program import Given, Program, Statement, default_dtype, pick
from benchmarks.fuzz.smooth import AMPLIFIED, HALF, NUDGE, is_smooth

MOST_ELEMENTS = 1 << 15
LARGEST = 1e3

Values = dict[str, object]


@dataclass
class Grower:
    """One program in the making."""

    seed: int
    draw: random.Random = field(init=False)
    givens: list[Given] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    copies: list[Values] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    later: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    # --- what ops ask for ---

    @property
    def values(self) -> dict[str, Tensor]:
        """All tensors of the program as it is."""
        return {n: v for n, v in self.copies[0].items() if isinstance(v, Tensor)}

    def some(self, fits: Callable[[Tensor], bool]) -> str | None:
        """A value that fits; young ones are likelier."""
        names = [n for n, v in self.values.items() if fits(v)]
        if not names:
            return None
        return names[-1 - min(int(self.draw.expovariate(0.25)), len(names) - 1)]

    def given(self, sizes: tuple[int | str, ...], dtype: str = "float32", bound: int = 2) -> str:
        """A new input."""
        layouts = {"contiguous": 6.0, "offset": 1.0, "expanded": 0.5}
        if len(sizes) >= 1:
            layouts["strided"] = 1.0
        if len(sizes) >= 2:
            layouts["turned"] = 1.5
        if len(sizes) == 4:
            layouts["channels_last"] = 4.0
        layout = pick(self.draw, layouts) if sizes else "contiguous"
        grad = dtype.startswith(("float", "bfloat")) and self.draw.random() < 0.8
        g = Given(f"x{len(self.givens)}", sizes, dtype, layout, grad and layout != "expanded", bound)
        self.givens.append(g)
        self._fill(g)
        return g.name

    def size_names(self, shape: tuple[int, ...]) -> tuple[int | str, ...]:
        """A shape with the names of sizes for numbers that can only be those."""
        named = {n: s for s, n in self.sizes.items()}
        return tuple(named.get(n, n) for n in shape)

    # --- growing ---

    def _fill(self, g: Given) -> None:
        """The new input in each copy."""
        for k, copy in enumerate(self.copies):
            x = g.make(self.later if k == 3 else self.sizes, self.seed, double=k in (1, 2)).detach()
            if k == 2 and x.is_floating_point():
                draw = torch.Generator().manual_seed(len(self.givens))
                x = x * (1 + self.nudge * torch.randn(x.shape, generator=draw, dtype=x.dtype))
            copy[g.name] = x.requires_grad_(g.grad and k in (0, 3))

    @property
    def nudge(self) -> float:
        """The relative change of the inputs in the third copy."""
        return NUDGE * (HALF if self.halves else 1.0)

    @property
    def halves(self) -> bool:
        """Whether half types may occur."""
        return self.seed % 4 == 3

    def start(self) -> None:
        """Sizes and the first inputs."""
        draw = self.draw
        self.sizes = {
            "b": draw.choice([1, 2, 3, 4]), "n": draw.choice([5, 7, 9, 17, 33, 70]),
            "m": draw.choice([6, 10, 13, 24, 65]),
        }  # fmt: skip
        self.later = {
            "b": draw.choice([2, 5, 6]),
            "n": draw.choice([8, 11, 35]),
            "m": draw.choice([7, 14, 31]),
        }
        self.copies = [{}, {}, {}, {}] if self.dynamic else [{}, {}, {}]
        shapes: list[tuple[int | str, ...]] = [
            ("n",), ("n", "m"), ("b", "n"), ("b", "n", 8), ("b", 4, "n", "m"), ("b", 8, "n", 6), ("b", 4, 12, 12),
            ("b", "n", 16), (16, "m"), ("b", 2, "n", 8),
        ]  # fmt: skip
        for _ in range(draw.randint(1, 3)):
            dtype = draw.choice(["float16", "bfloat16", "float32"]) if self.halves else "float32"
            self.given(draw.choice(shapes), dtype)
        if draw.random() < 0.3:
            self.given(draw.choice(shapes), "int64", draw.choice([3, 5, 8]))

    @property
    def dynamic(self) -> bool:
        """Whether the sizes are symbols."""
        return self.seed % 3 == 1

    def grow(self, length: int) -> None:
        """Add statements until there are `length`."""
        self.start()
        weights = {name: kind.weight for name, kind in KINDS.items()}
        for _ in range(8 * length):
            if len(self.statements) >= length:
                break
            before = len(self.givens)
            line = KINDS[pick(self.draw, weights)].make(self)
            if line is None or not self._added(line):
                self._forget(before)

    def _forget(self, count: int) -> None:
        """Drop inputs that a refused statement asked for."""
        for g in self.givens[count:]:
            for copy in self.copies:
                copy.pop(g.name)
        del self.givens[count:]

    def _added(self, line: Line) -> bool:
        made = tuple(f"v{self.count + k}" for k in range(line.results))
        statement = Statement(made, line.template, line.operands)
        if not line.results:
            return self._mutated(statement)
        if not all(_executed(statement, copy) for copy in self.copies) or not self._sound(made):
            for copy in self.copies:
                for name in made:
                    copy.pop(name, None)
            return False
        self.count += line.results
        self.statements.append(statement)
        return True

    def _mutated(self, statement: Statement) -> bool:
        """A statement that writes is tried by running all again; what it does is judged on every value."""
        if not all(_executed(statement, copy) for copy in self.copies) or not self._sound(tuple(self.values)):
            self._again()
            return False
        self.statements.append(statement)
        return True

    def _again(self) -> None:
        """All copies from the start."""
        givens, self.givens = self.givens, []
        self.copies = [{} for _ in self.copies]
        for g in givens:
            self.givens.append(g)
            self._fill(g)
        for s in self.statements:
            for copy in self.copies:
                assert _executed(s, copy)

    def _sound(self, names: tuple[str, ...]) -> bool:
        return all(_is_sound(*(c[n] for c in self.copies[:3]), self.nudge) for n in names)


def _executed(statement: Statement, space: Values) -> bool:
    """Whether a statement runs in a copy."""
    text = str(statement)
    double = any(isinstance(v, Tensor) and v.dtype == torch.float64 for v in space.values())
    if double:
        for word in ("torch.float32", "torch.float16", "torch.bfloat16"):
            text = text.replace(word, "torch.float64")
    scope = {"torch": torch, "F": torch.nn.functional} | space
    try:
        with default_dtype(torch.float64 if double else torch.float32):
            exec(text, scope)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return False
    space.update({n: scope[n] for n in statement.made})
    return all(isinstance(space[n], Tensor) for n in statement.made)


def _is_sound(plain: object, double: object, moved: object, nudge: float) -> bool:
    """Whether a value is small enough and hangs on its inputs smoothly."""
    assert isinstance(plain, Tensor) and isinstance(double, Tensor) and isinstance(moved, Tensor)
    if plain.layout != torch.strided or plain.is_complex() or not 0 < plain.numel() <= MOST_ELEMENTS:
        return False
    plain, double, moved = plain.detach(), double.detach(), moved.detach()
    if not plain.is_floating_point():
        small = plain.dtype == torch.bool or int(plain.abs().max()) < 1 << 20
        return (
            small and plain.shape == double.shape and bool((plain == double).all() & (double == moved).all())
        )
    if plain.shape != double.shape or not bool(plain.isfinite().all()) or float(plain.abs().max()) > LARGEST:
        return False
    size = float(double.square().mean().sqrt())
    change = float((double - moved).abs().max())
    error = float((double - plain.double()).abs().max())
    room = AMPLIFIED * nudge * size
    if size < 1e-30:
        return nudge == NUDGE  # numbers that halves round differently do not cancel
    return change <= room and error <= max(room, 0.02 * size * (nudge > NUDGE)) and size > 1e-4


def grown(seed: int) -> Program:
    """A random program of 5 to 40 statements."""
    grower = Grower(seed)
    with torch.enable_grad():
        grower.grow(min(40, 5 + int(grower.draw.expovariate(1 / 7))))
    return _returned(grower)


def _returned(grower: Grower) -> Program:
    """With outputs: all that nobody reads, and some others; inputs that nobody reads are left out."""
    read = {n for s in grower.statements for n in s.operands}
    made = [n for s in grower.statements for n in s.made]
    outputs = [n for n in made if n not in read or grower.draw.random() < 0.1]
    outputs = outputs or made[-1:]
    used = read | set(outputs)
    later = grower.later if grower.dynamic else {}
    program = Program(
        tuple(g for g in grower.givens if g.name in used),
        tuple(grower.statements),
        tuple(outputs),
        grower.sizes,
        later,
    )
    return (
        program
        if is_smooth(program, grower.seed)
        else replace(program, givens=tuple(replace(g, grad=False) for g in program.givens))
    )
