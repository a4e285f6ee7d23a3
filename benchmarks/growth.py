"""`python -m benchmarks.growth`: how the time of a first call grows with the size of a program, cold.

Each family is a kind of program of a few sizes: chains of ops, towers of layers, steps of a cell, many results, many
inputs, training. Each figure comes from a process of its own with empty caches: seconds that processors worked, in this
process and in those that it started (C++ compilers), from `torch.compile` to the end of the first call. `exponent` is
the slope of a line through the logarithms of sizes and seconds, less those of the smallest size of the family `nothing`
(what any first call takes). Peers are Inductor and torch's tracing alone (`aot_eager`).
"""

from __future__ import annotations

import importlib
import math
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import record
from benchmarks.record import Facts

CONTESTANTS = ("aot_eager", "inductor", "tilewright")
Program = tuple[Callable[..., object], tuple[Tensor, ...]]


class Layer(nn.Module):
    """A norm, two products with GELU in between, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """`x` is [rows, width]."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Cell(nn.Module):
    """An LSTM cell that a Python loop runs over the first dim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is [steps, batch, width]; so is the result."""
        h = c = x.new_zeros(x.shape[1:])
        steps: list[Tensor] = []
        for step in x:
            h, c = self.cell(step, (h, c))
            steps.append(h)
        return torch.stack(steps)


def nothing(size: int) -> Program:
    """One op, whatever the size."""
    return torch.sin, (torch.randn(64, 64),)


def chain(ops: int) -> Program:
    """Pointwise ops in three kinds that repeat."""

    def run(x: Tensor) -> Tensor:
        for _ in range(ops // 3):
            x = torch.sin(x) * 1.01 + 0.1
        return x

    return run, (torch.randn(64, 64),)


def unlike(ops: int) -> Program:
    """Pointwise ops of which no stretch repeats."""

    def run(x: Tensor) -> Tensor:
        for k in range(ops // 2):
            x = (torch.sin(x), torch.tanh(x), torch.abs(x))[(k * k + k // 7) % 3] + k
        return x

    return run, (torch.randn(64, 64),)


def mixed(ops: int) -> Program:
    """Pointwise ops and means along rows and columns in turns."""

    def run(x: Tensor) -> Tensor:
        for k in range(ops // 4):
            x = torch.sin(x)
            x = (x - x.mean(k % 2, keepdim=True)) * 1.5
        return x

    return run, (torch.randn(64, 64),)


def tower(layers: int) -> Program:
    """Layers of norm, product, GELU, product."""
    return nn.Sequential(*(Layer(64) for _ in range(layers))), (torch.randn(32, 64),)


def steps(count: int) -> Program:
    """An LSTM cell, unrolled."""
    return Cell(32), (torch.randn(count, 4, 32),)


def schedule(count: int) -> Program:
    """Steps of a cell in Python, by numbers that change with the step."""

    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        for t in range(count):
            made = torch.lerp(h, torch.tanh(h @ w), 1 / (t + 1))
            h = torch.add(made, x, alpha=0.1 * t).clamp(min=-t - 1, max=t + 1)
        return h

    return run, (torch.randn(4, 32), torch.randn(32, 32) / 8, torch.randn(4, 32))


def results(ops: int) -> Program:
    """Many results of one input."""
    return lambda x: [torch.sin(x + k) * k for k in range(ops // 3)], (torch.randn(64, 64),)


def inputs(ops: int) -> Program:
    """Many inputs, summed."""

    def run(*xs: Tensor) -> Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = total + x * 2
        return total

    return run, tuple(torch.randn(16, 16) for _ in range(ops // 2))


FAMILIES: Mapping[str, tuple[Callable[[int], Program], tuple[int, ...], bool]] = {
    "nothing": (nothing, (1,), False),
    "chain": (chain, (500, 1000, 2000, 4000, 8000), False),
    "unlike": (unlike, (500, 1000, 2000, 4000), False),
    "mixed": (mixed, (500, 1000, 2000, 4000), False),
    "tower": (tower, (8, 16, 32, 64, 128), False),
    "steps": (steps, (10, 40, 160, 640), False),
    "schedule": (schedule, (10, 40, 160), False),
    "results": (results, (500, 1000, 2000, 4000), False),
    "inputs": (inputs, (500, 1000, 2000, 4000), False),
    "trained chain": (chain, (500, 1000, 2000), True),
}
"""Each family: its programs by size, the sizes, and whether they are trained (forward and backward)."""


def worked() -> tuple[float, float]:
    """Seconds that processors worked for this process, and for those that it started and that have ended."""
    own, others = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, others.ru_utime + others.ru_stime


def run(family: str, size: int, contestant: str) -> Facts:
    """Seconds of one contestant's first call, in this process."""
    make, _, trained = FAMILIES[family]
    torch.manual_seed(0)
    program, arguments = make(size)
    modules = {"tilewright": "tilewright.api", "inductor": "torch._inductor.compile_fx"}
    importlib.import_module(modules.get(contestant, "torch._dynamo.backends.debugging"))
    before = worked()
    compiled = torch.compile(program, backend=contestant)
    if trained:
        found = compiled(*(t.requires_grad_() for t in arguments))
        assert isinstance(found, Tensor)
        found.sum().backward()
    else:
        with torch.no_grad():
            compiled(*arguments)
    own, others = (b - a for a, b in zip(before, worked(), strict=True))
    facts: Facts = {"cpu_s": own + others, "own_cpu_s": own, "started_cpu_s": others}
    if contestant == "tilewright":
        from tilewright import compilations

        facts["coverage"] = [str(c.coverage) for c in compilations()]
        facts["phases_cpu_s"] = [{p.name: p.cpu_seconds for p in c.trace.phases} for c in compilations()]
    return facts


def exponent(seconds: Mapping[int, float], least: float) -> float | None:
    """The power of the size with which seconds above `least` grow; None of fewer than two sizes."""
    points = [(math.log(n), math.log(s - least)) for n, s in seconds.items() if s > least]
    if len(points) < 2:
        return None
    x, y = (sum(p[k] for p in points) / len(points) for k in (0, 1))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def seconds_of(found: Mapping[int, Facts]) -> dict[int, float]:
    """By size, where a run came to its end."""
    return {n: s for n, facts in found.items() if isinstance(s := facts.get("cpu_s"), float)}


def table(found: Mapping[str, Mapping[str, Mapping[int, Facts]]], exponents: Mapping[str, Facts]) -> Table:
    """One row per family and contestant."""
    result = Table(title="seconds of processors for a first call, cold", title_justify="left")
    for column in ("family", "contestant", "seconds by size", "exponent"):
        result.add_column(column)
    for family, by in found.items():
        for contestant, sizes in by.items():
            cells = [f"{n}: {s:.1f}" for n, s in seconds_of(sizes).items()]
            slope = exponents[family][contestant]
            result.add_row(
                family, contestant, ", ".join(cells), f"{slope:.2f}" if isinstance(slope, float) else "-"
            )
    return result


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--only", multiple=True, type=click.Choice(list(FAMILIES)), help="some of the families")
@click.option("--largest", default=1 << 30, help="no sizes above this")
@click.option("--against", multiple=True, type=click.Choice(CONTESTANTS), help="some of the contestants")
@click.option("--threads", default=2, show_default=True)
@click.option("--size", type=int, hidden=True)
@click.option("--child-json", type=click.Path(dir_okay=False, path_type=Path), hidden=True)
def main(
    path: Path | None, only: Sequence[str], largest: int, against: Sequence[str], threads: int, size: int | None,
    child_json: Path | None,
) -> None:  # fmt: skip
    """Run all processes and print one table."""
    if child_json is not None and size is not None:
        torch.set_num_threads(threads)
        record.write_json(child_json, run(only[0], size, against[0]))
        return
    found: dict[str, dict[str, dict[int, Facts]]] = {}
    exponents: dict[str, Facts] = {}
    for family in dict.fromkeys(("nothing", *(only or FAMILIES))):
        found[family], exponents[family] = {}, {}
        for contestant in against or CONTESTANTS:
            sizes = found[family].setdefault(contestant, {})
            for n in (n for n in FAMILIES[family][1] if n <= largest):
                arguments = ["--only", family, "--against", contestant, "--size", str(n)]
                sizes[n] = record.cold_child("benchmarks.growth", arguments, threads)
            least = min(seconds_of(found["nothing"][contestant]).values(), default=0.0)
            exponents[family][contestant] = exponent(seconds_of(sizes), least)
        if path is not None:
            shown = {
                f: {c: {str(n): x for n, x in s.items()} for c, s in by.items()} for f, by in found.items()
            }
            record.write_json(path, record.provenance(threads) | {"families": shown, "exponents": exponents})
    Console(width=150).print(table(found, exponents))


if __name__ == "__main__":
    main()
