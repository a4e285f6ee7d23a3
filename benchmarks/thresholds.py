"""`python -m benchmarks.thresholds`: what the numbers of `tuning/` are worth on this CPU, in seconds.

A sweep compiles one program with several values of one threshold, and times them in turn; of each, the fastest sample
counts, since other processes can only add. All is timed in several rounds, one after the other, and each value has the
seconds of its best round. The `loss` is how many times as long the value in the table takes as the best one;
`loss_of_rounds` is the same in each round alone: by how much these differ is noise. `texts` says how many different
kernels the values led to (1: the kernels of this program do not depend on the number, and what differs is noise or lies
in calls). A rate is measured by itself, in each round. `load` says how many processes wanted a core, this one included:
before the first round and after each.
"""

# Dynamo keeps what it compiled; its reset has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tilewright
from benchmarks import record
from benchmarks.record import Facts
from tilewright import measure
from tilewright.interp import modular
from tilewright.measure import Run
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.tuning import thresholds

PACKAGE = "tilewright"
SAMPLES = (60, 400)
"""Many short samples and no pause between them, since the fastest one counts."""
MAX_LOSS = 1.2
"""A value that takes longer than this many times the best one is marked."""


@contextlib.contextmanager
def replaced(name: str, field: str, value: object) -> Generator[None]:
    """Inside, every module of the package reads `value` for a field of the record `name`; also one that is imported
    there, which would keep it behind."""
    old = getattr(thresholds, name)
    new = dataclasses.replace(old, **{field: value})
    _put(name, old, new)
    try:
        yield
    finally:
        _put(name, new, old)


def _put(name: str, old: object, new: object) -> None:
    """Put another record where modules of the package have `old`."""
    for module, holder in list(sys.modules.items()):
        if module.startswith(PACKAGE) and vars(holder).get(name) is old:
            setattr(holder, name, new)


# --- programs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Something to compile: the module or function, its inputs, options of the compiler."""

    target: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def compiled(self) -> tuple[Run, str]:
        """A call, and the text of all its kernels."""
        torch._dynamo.reset()
        function = self.target
        if not isinstance(function, nn.Module):
            function = _Module(function)
        options = {"cache": False, **self.options}
        model = tilewright.compile(function, self.inputs, options=options)
        model(*self.inputs)
        text = "\n".join(str(getattr(k, "source", k)) for k in model.kernels)
        return partial(model, *self.inputs), text + str(model.coverage)


class _Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def _randn(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(s, generator=generator) for s in shapes)


def _chain(x: Tensor, ops: int) -> Tensor:
    for k in range(ops):
        x = x * (0.5 + 0.01 * k) + 0.1
    return x


def _two_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.nn.functional.gelu(x)
    return y.sum(0), (y * y).sum(1)


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.transpose(-1, -2) * 0.125 + bias)
    return torch.softmax(scores, -1) @ v


def _heads(keys: int, depth: int) -> Program:
    side = (1, 4, keys, depth)
    return Program(_attention, _randn(side, side, side, (keys, keys)), {"contractions": "inside"})


PROGRAMS: dict[str, Callable[[], Program]] = {
    "exp of 2^14": lambda: Program(torch.exp, _randn((1 << 14,))),
    "exp of 2^17": lambda: Program(torch.exp, _randn((1 << 17,))),
    "exp of 2^20": lambda: Program(torch.exp, _randn((1 << 20,))),
    "sum of 2^20": lambda: Program(torch.sum, _randn((1 << 20,))),
    "columns of 1024 x 1024": lambda: Program(lambda x: x.sum(0), _randn((1024, 1024))),
    "columns of 256 x 4096": lambda: Program(lambda x: x.sum(0), _randn((256, 4096))),
    "columns of 48 x 4096": lambda: Program(lambda x: x.sum(0), _randn((48, 4096))),
    "transpose 128": lambda: Program(lambda x: x.t().contiguous(), _randn((128, 128))),
    "transpose 1024": lambda: Program(lambda x: x.t().contiguous(), _randn((1024, 1024))),
    "transpose 2048": lambda: Program(lambda x: x.t().contiguous(), _randn((2048, 2048))),
    "softmax of 1024": lambda: Program(lambda x: x.softmax(-1), _randn((1024, 1024))),
    "layer norm of 1024": lambda: Program(lambda x: torch.layer_norm(x, (1024,)), _randn((1024, 1024))),
    "two sums of gelu": lambda: Program(_two_sums, _randn((1024, 1024))),
    "96 pointwise ops": lambda: Program(lambda x: _chain(x, 48), _randn((1 << 20,))),
    "attention of 256, depth 64": lambda: _heads(256, 64),
    "attention of 256, depth 128": lambda: _heads(256, 128),
    "attention of 320, depth 64": lambda: _heads(320, 64),
    "modelled attention of 256": lambda: Program(_attention, _randn(*((4, 8, 256, 64),) * 3, (256, 256))),
    "2 MiB plus 1": lambda: Program(lambda x: x + 1.0, _randn((1 << 19,))),
    "8 MiB plus 1": lambda: Program(lambda x: x + 1.0, _randn((1 << 21,))),
    "64 MiB plus 1": lambda: Program(lambda x: x + 1.0, _randn((1 << 24,))),
}  # fmt: skip


# --- sweeps --------------------------------------------------------------------------------------

FLAT = ("exp of 2^14", "exp of 2^17", "exp of 2^20")
COLUMNS = ("columns of 1024 x 1024", "columns of 256 x 4096", "columns of 48 x 4096")
TRANSPOSES = ("transpose 128", "transpose 1024", "transpose 2048")
ROWS = ("softmax of 1024", "layer norm of 1024")
PRODUCTS = ("attention of 256, depth 64", "attention of 256, depth 128", "attention of 320, depth 64")
MODELLED = ("two sums of gelu", "modelled attention of 256")


@dataclass(frozen=True)
class Sweep:
    """Values of one field beside the one in the table, and programs that should depend on it."""

    record: str
    field: str
    values: tuple[Any, ...]
    programs: tuple[str, ...]
    threads: int = 1
    """Two where the question is how work is shared."""

    @property
    def key(self) -> str:
        """As tables name it."""
        return f"{self.record.lower()}.{self.field}"

    @property
    def usual(self) -> Any:
        """What the table says."""
        return getattr(getattr(thresholds, self.record), self.field)


SWEEPS = (
    Sweep("CPU_VECTORS", "task_elements", (512, 1024, 2048, 8192, 16384), FLAT, 2),
    Sweep("CPU_VECTORS", "max_task_row_elements", (256, 512, 1024, 4096), COLUMNS, 2),
    Sweep("CPU_VECTORS", "max_states", (2048, 8192), COLUMNS),
    Sweep("CPU_VECTORS", "max_rows_side_by_side", (1, 2, 8), COLUMNS),
    Sweep("CPU_VECTORS", "max_idle_ratio", (0.03, 0.5), COLUMNS, 2),
    Sweep("CPU_VECTORS", "min_rows_from_memory", (16, 256, 2048), COLUMNS),
    Sweep("CPU_VECTORS", "transposed_side", (16, 32, 128, 256), TRANSPOSES),
    Sweep("CPU_VECTORS", "turned_rows_and_columns", ((32, 256), (64, 512), (128, 256), (256, 2048)), TRANSPOSES),
    Sweep("CPU_VECTORS", "min_large_tasks_per_core", (1, 2, 32), TRANSPOSES, 2),
    Sweep("CPU_VECTORS", "min_scratch_cost", (4, 24, 1000), ROWS),
    Sweep("CPU_MATMUL", "max_lane_registers", (1, 2, 3), PRODUCTS),
    Sweep("CPU_MATMUL", "max_rows", (4, 6, 8, 28), PRODUCTS),
    Sweep("CPU_MATMUL", "streamed_step_elements", (16, 32, 128), PRODUCTS),
    Sweep("CPU_MATMUL", "max_untiled_extent", (64, 128, 512), PRODUCTS),
    Sweep("PARTITION", "max_kernel_ops", (12, 24, 96), ("96 pointwise ops",)),
    Sweep("PARTITION", "min_stored_instructions", (2, 32, 1000), ("two sums of gelu",)),
    Sweep("PARTITION", "min_gain_over_library_ratio", (1.0, 1.5), MODELLED),
    Sweep("CPP_TEXT", "max_unrolled_registers", (8, 16, 64), (COLUMNS[0], *TRANSPOSES[1:])),
    Sweep("CPP_TEXT", "max_inline_tree_registers", (2, 16), (*ROWS, "sum of 2^20")),
    Sweep("CPU_COST", "instructions_per_second", (1e9, 2e9, 4e9, 16e9), MODELLED),
    Sweep("CPU_COST", "strided_instructions", (1, 2, 6), MODELLED),
    Sweep("CPU_WORK", "min_huge_page_bytes", (1 << 20, 1 << 40), ("2 MiB plus 1", "8 MiB plus 1", "64 MiB plus 1")),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Seconds of one program with each value in each round, and how many different kernels there were."""

    usual: str
    rounds: tuple[dict[str, float], ...]
    texts: int

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds with each value in its best round."""
        return {value: min(of[value] for of in self.rounds) for value in self.rounds[0]}

    @property
    def best(self) -> str:
        """The fastest value."""
        return min(self.seconds, key=lambda value: self.seconds[value])

    @property
    def loss(self) -> float:
        """How many times as long the value in the table takes as the best one."""
        return round(self.seconds[self.usual] / self.seconds[self.best], 3)

    def of_round(self, k: int) -> Measured:
        """What round number k says alone."""
        return replace(self, rounds=(self.rounds[k],))

    def facts(self) -> Facts:
        """For a file."""
        return {"rounds": self.rounds, "texts": self.texts, "loss": self.loss}


@dataclass(frozen=True)
class Contest:
    """One program, compiled with each value of a field."""

    usual: str
    runs: Mapping[str, Run]
    texts: int
    threads: int

    def timed(self, seconds: float) -> dict[str, float]:
        """Seconds with each value, in one round."""
        with measure.settings(self.threads):
            timings = measure.measure(self.runs, seconds=seconds, rounds=SAMPLES, pause=0.0)
        return {value: timing.minimum for value, timing in timings.items()}


def contests(sweep: Sweep) -> dict[str, Contest]:
    """The programs of a sweep, ready to be timed."""
    found: dict[str, Contest] = {}
    values = (sweep.usual, *(v for v in sweep.values if v != sweep.usual))
    for name in sweep.programs:
        program = PROGRAMS[name]()
        runs: dict[str, Run] = {}
        texts: set[str] = set()
        for value in values:
            with replaced(sweep.record, sweep.field, value):
                run, text = program.compiled()
            runs[str(value)] = _under(sweep, value, run)
            texts.add(text)
        found[name] = Contest(str(sweep.usual), runs, len(texts), sweep.threads)
    return found


def _under(sweep: Sweep, value: object, run: Run) -> Run:
    """The call with the value in place; what kernels do not hold is read as they run."""
    if sweep.record != "CPU_WORK":
        return run

    def call() -> object:
        with replaced(sweep.record, sweep.field, value):
            return run()

    return call


# --- rates ---------------------------------------------------------------------------------------


def _seconds(run: Run, seconds: float) -> float:
    return measure.measure({"": run}, seconds=seconds, rounds=SAMPLES, pause=0.0)[""].minimum


def vector_rate(seconds: float) -> float:
    """Vector instructions per second of one core: 96 in a row on each vector of what its nearest cache holds."""
    lanes = host_target().vector_bytes // 4
    elements, ops = 1 << 12, 96
    run, _ = Program(lambda x: _chain(x, ops // 2), _randn((elements,))).compiled()
    base, _ = Program(lambda x: x + 1.0, _randn((elements,))).compiled()
    with measure.settings(1):
        spent = _seconds(run, seconds) - _seconds(base, seconds)
    return (ops - 1) * elements / lanes / spent


def python_powers(seconds: float) -> float:
    """Elements up to which Python's own pow is faster than rounds over arrays."""
    prime, crossing = modular.PRIMES[0], 0
    for elements in (1 << k for k in range(4, 13)):
        base = np.random.default_rng(1).integers(2, prime, elements, np.uint64)
        ways: list[float] = []
        for limit in (1 << 40, 0):
            with replaced("INTERPRETER", "max_python_power_elements", limit):
                ways.append(_seconds(partial(modular.inverse, base, 0), seconds / 8))
        crossing = elements if ways[0] <= ways[1] else crossing
    return crossing


@dataclass(frozen=True)
class Rate:
    """What is in the table, and how it is measured."""

    value: float
    measure: Callable[[float], float]


RATES = {
    "cpu_cost.instructions_per_second": Rate(thresholds.CPU_COST.instructions_per_second, vector_rate),
    "interpreter.max_python_power_elements": Rate(thresholds.INTERPRETER.max_python_power_elements, python_powers),
}  # fmt: skip


# --- the command ---------------------------------------------------------------------------------


@dataclass
class Figures:
    """What has been measured so far: a number a round of each rate, the programs of each sweep, and the load."""

    rates: dict[str, list[float]]
    sweeps: dict[str, dict[str, Measured]]
    load: list[float]


def figures(asked: Callable[[str], bool], seconds: float, rounds: int) -> Figures:
    """Measure in rounds what is asked for."""
    found = Figures({key: [] for key in RATES if asked(key)}, {}, [processes_waiting()])
    ready: dict[str, dict[str, Contest]] = {}
    for sweep in SWEEPS:
        if asked(sweep.key):
            ready[sweep.key] = contests(sweep)
            click.echo(f"{sweep.key}: compiled", err=True)
    spent: list[dict[tuple[str, str], dict[str, float]]] = []
    for _ in range(rounds):
        for key, measured in found.rates.items():
            measured.append(RATES[key].measure(seconds))
        spent.append({(k, n): c.timed(seconds) for k, programs in ready.items() for n, c in programs.items()})
        found.load.append(processes_waiting())
    for key, programs in ready.items():
        found.sweeps[key] = {
            n: Measured(c.usual, tuple(of[key, n] for of in spent), c.texts) for n, c in programs.items()
        }
    return found


def table(found: Figures) -> Table:
    """One row a program: what is in the table, the best value, and how much that would save."""
    rows = Table()
    for column in ("threshold", "program", "value", "best", "loss", "texts"):
        rows.add_column(column, justify="left" if column in ("threshold", "program") else "right")
    for key, measured in found.rates.items():
        rows.add_row(key, "", f"{RATES[key].value:g}", ", ".join(f"{m:g}" for m in measured), "", "")
    for key, programs in found.sweeps.items():
        for name, made in programs.items():
            loss = f"{made.loss:.2f}" + ("*" if made.loss > MAX_LOSS else "")
            rows.add_row(key, name, made.usual, made.best, loss, str(made.texts))
    return rows


def lost(programs: Mapping[str, Measured]) -> float:
    """The largest loss of the programs whose kernels depend on the number; of all, if no kernel does."""
    deciding = [made for made in programs.values() if made.texts > 1]
    return max(made.loss for made in deciding or programs.values())


def facts(found: Figures) -> Facts:
    """The same for a file."""
    told: Facts = {}
    for key, programs in found.sweeps.items():
        usual = next(iter(programs.values())).usual
        rounds = range(len(next(iter(programs.values())).rounds))
        told[key] = {
            "value": usual,
            "loss": lost(programs),
            "loss_of_rounds": [lost({n: m.of_round(k) for n, m in programs.items()}) for k in rounds],
            "programs": {name: made.facts() for name, made in programs.items()},
        }
    rates: Facts = {k: {"value": RATES[k].value, "measured": measured} for k, measured in found.rates.items()}
    return {"load": found.load, "rates": rates, "sweeps": told}


def processes_waiting() -> float:
    """How many processes ran or wanted to, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures")
@click.option("--only", multiple=True, help="thresholds whose names contain this")
@click.option("--seconds", default=0.25, show_default=True, help="timing per value, program and round")
@click.option("--rounds", default=2, show_default=True, type=click.IntRange(1), help="how often all is timed")
def main(path: Path | None, only: tuple[str, ...], seconds: float, rounds: int) -> None:
    """Measure and print one table."""
    warnings.filterwarnings("ignore")
    provenance = record.provenance(2)

    def asked(key: str) -> bool:
        return not only or any(part in key for part in only)

    found = figures(asked, seconds, rounds)
    (Console() if Console().is_terminal else Console(width=140)).print(table(found))
    if path is not None:
        record.write_json(path, provenance | facts(found))


if __name__ == "__main__":
    main()
