"""`python -m benchmarks.overhead`: the cost of one call, on tensors so small that nothing else counts.

The yardstick is what torch's own front costs before any backend: `torch.compile` with an AOTAutograd
backend whose graph does nothing but hand out a tensor that it kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from torch._dynamo.backends.common import aot_autograd

from benchmarks import record
from benchmarks.record import Facts
from tilewright import measure
from tilewright.measure import Timing, Unavailable

ELEMENTS = 8
NO_OP = "torch.compile, no-op backend"


def chain(x: torch.Tensor) -> torch.Tensor:
    """Three pointwise ops."""
    return torch.relu(x * 2.0 + 1.0)


def no_op(
    graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> Callable[[list[object]], list[torch.Tensor]]:
    """An AOTAutograd compiler that computes nothing: its result is one kept tensor."""
    kept = [torch.empty_like(inputs[0])]

    def run(arguments: list[object]) -> list[torch.Tensor]:
        arguments.clear()
        return list(kept)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def contestants(x: torch.Tensor) -> dict[str, Callable[[], object] | Unavailable]:
    """Zero-argument calls by name, built and called once."""

    def through(backend: object) -> Callable[[], object]:
        # A function of its own each time: Dynamo keeps its code by function.
        compiled = torch.compile(_fresh(chain), backend=backend)
        compiled(x)
        return lambda: compiled(x)

    def ours() -> Callable[[], object]:
        import tilewright

        compiled = tilewright.compile(_fresh(chain), (x,))
        compiled(x)
        return lambda: compiled(x)

    builders: dict[str, Callable[[], Callable[[], object]]] = {
        "eager": lambda: lambda: chain(x),
        NO_OP: lambda: through(aot_autograd(fw_compiler=no_op, inference_compiler=no_op)),
        "torch.compile, Inductor": lambda: through("inductor"),
        "torch.compile, Tilewright": lambda: through("tilewright"),
        "tilewright.compile": ours,
    }
    result: dict[str, Callable[[], object] | Unavailable] = {}
    for name, build in builders.items():
        try:
            result[name] = build()
        except Exception as error:  # noqa: BLE001 - one contestant's failure must not stop the others
            result[name] = Unavailable(measure.one_line(error))
    return result


def _fresh(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return type(function)(function.__code__.replace(), function.__globals__, function.__name__)


def figures(timing: Timing, base: Timing) -> Facts:
    """Microseconds per call, and how many more than the no-op backend."""
    micro = {
        name: value * 1e3 for name, value in timing.summary().items() if name in ("min", "median", "p90")
    }
    return {"latency_us": micro, "over_no_op_us": (timing.median - base.median) * 1e6}


def run(threads: int, seconds: float) -> dict[str, Facts]:
    """All contestants' figures."""
    x = torch.randn(ELEMENTS)
    with measure.settings(threads):
        made = contestants(x)
        ready = {name: item for name, item in made.items() if not isinstance(item, Unavailable)}
        timings = measure.measure(ready, seconds=seconds)
    facts = {name: figures(timing, timings[NO_OP]) for name, timing in timings.items()}
    missing: dict[str, Facts] = {
        name: {"not_available": item.reason} for name, item in made.items() if isinstance(item, Unavailable)
    }
    return facts | missing


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--threads", default=2, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="timing per contestant")
def main(path: Path | None, threads: int, seconds: float) -> None:
    """Run all contestants and print one table."""
    warnings.filterwarnings("ignore")
    facts = run(threads, seconds)
    table = Table(title=f"3-op chain on {ELEMENTS} floats", title_justify="left")
    table.add_column("")
    for column in ("median us", "min us", "over no-op us"):
        table.add_column(column, justify="right")
    for name, item in facts.items():
        if "not_available" in item:
            table.add_row(name, "", "", f"not available: {item['not_available']}")
            continue
        latency: Facts = item["latency_us"]  # type: ignore[assignment]
        table.add_row(
            name, f"{latency['median']:.2f}", f"{latency['min']:.2f}", f"{item['over_no_op_us']:+.2f}"
        )
    (Console() if Console().is_terminal else Console(width=140)).print(table)
    if path is not None:
        record.write_json(path, record.provenance(threads) | {"elements": ELEMENTS, "contestants": facts})


if __name__ == "__main__":
    main()
