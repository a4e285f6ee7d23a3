"""`python -m benchmarks.alternation`: library calls and generated kernels in turn, against each alone.

Two thread pools that take turns can disturb each other: spinning threads of one keep the cores from the other. The time
of a graph that alternates is compared with what its steps take in loops of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.record import Facts
from tilewright import measure

WIDTH = 512
STEPS = 8
"""Steps of each kind in the graph that alternates."""
ROWS = (32, 128, 512, 2048)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A library call: the weight is an input."""
    return x @ w


def norm(x: torch.Tensor) -> torch.Tensor:
    """A generated kernel."""
    return torch.softmax(x, -1) * x


def alternating(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Both, in turn."""
    for _ in range(STEPS):
        x = norm(product(x, w))
    return x


def run(rows: int, threads: int, seconds: float) -> Facts:
    """Milliseconds of one step of each kind alone, of the graph, and the graph over the sum of its steps."""
    import tilewright

    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    with measure.settings(threads):
        x, w = torch.randn(rows, WIDTH), torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        both = tilewright.compile(alternating, (x, w))
        library = tilewright.compile(product, (x, w))
        generated = tilewright.compile(norm, (x,))
        calls: dict[str, Callable[[], object]] = {
            "library": lambda: library(x, w), "generated": lambda: generated(x), "alternating": lambda: both(x, w)
        }  # fmt: skip
        timings = measure.measure(calls, seconds=seconds)
    times = {name: timing.median * 1e3 for name, timing in timings.items()}
    alone = STEPS * (times["library"] + times["generated"])
    return {"median_ms": times, "alone_ms": alone, "over_alone": times["alternating"] / alone}


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--threads", default=2, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="timing per contestant")
def main(path: Path | None, threads: int, seconds: float) -> None:
    """Run all sizes and print one table."""
    warnings.filterwarnings("ignore")
    table = Table(title=f"{STEPS} products and {STEPS} generated kernels in turn, ms", title_justify="left")
    for column in ("rows", "library", "generated", "sum of the steps alone", "alternating", "ratio"):
        table.add_column(column, justify="right")
    found: dict[str, Facts] = {}
    for rows in ROWS:
        facts = found[str(rows)] = run(rows, threads, seconds)
        each: Facts = facts["median_ms"]  # type: ignore[assignment]
        cells = (
            each["library"],
            each["generated"],
            facts["alone_ms"],
            each["alternating"],
            facts["over_alone"],
        )
        table.add_row(str(rows), *(f"{cell:.3f}" for cell in cells))
    (Console() if Console().is_terminal else Console(width=140)).print(table)
    if path is not None:
        record.write_json(path, record.provenance(threads) | {"width": WIDTH, "steps": STEPS, "rows": found})


if __name__ == "__main__":
    main()
