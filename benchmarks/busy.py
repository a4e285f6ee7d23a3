"""`python -m benchmarks.busy`: a model alone, and beside other processes that keep all cores busy.

Each contestant runs in turn, in blocks of calls; its time is that of a block over its calls, so that what the scheduler
takes away counts. A fair share of cores that `threads` threads and as many busy loops want is a part of them: times
are compared with the time alone over that part, and with the peers in the same minute. Facts that no other process can
change stand beside the times: parallel regions that one call of ours enters, how often its thread waits for another,
and the processor time that other threads spend.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import record
from benchmarks.record import Facts
from tilewright import measure
from tilewright.measure import Run, Unavailable, Workload
from tilewright.runtime.cpu import pool

LOOP = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"
BLOCK_SECONDS = 0.1
COUNTED = 100
OURS = "tilewright"


class Voice(nn.Module):
    """Detects speech in 36 ms of sound: frames, their spectra, four convolutions, a cell, one number. [1, 576] and the
    cell's two states [1, 128] to [1, 1] and the states."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        widths, strides = (129, 128, 64, 64, 128), (1, 2, 2, 1)
        self.body = nn.ModuleList(
            nn.Conv1d(a, b, 3, padding=1, stride=s)
            for a, b, s in zip(widths, widths[1:], strides, strict=False)
        )
        self.cell = nn.LSTMCell(128, 128)
        self.head = nn.Conv1d(128, 1, 1)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One part of the sound."""
        x = nn.functional.pad(x, (32, 32), mode="reflect")
        spectrum = self.frames(x.unsqueeze(1))
        x = torch.sqrt(spectrum[:, :129] ** 2 + spectrum[:, 129:] ** 2 + 1e-9)
        for convolution in self.body:
            x = torch.relu(convolution(x))
        h, c = self.cell(x[..., -1], (h, c))
        return torch.sigmoid(self.head(torch.relu(h).unsqueeze(-1))).mean(-1), h, c


def _norms() -> nn.Module:
    return nn.Sequential(*(nn.LayerNorm(256) if k % 2 else nn.GELU() for k in range(12)))


class Layer(nn.Module):
    """One layer of an encoder, written out: [batch, places, 256] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(256), nn.LayerNorm(256)
        self.into, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
        self.wide = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, x: Tensor) -> Tensor:
        """Attention of 4 heads, then two products."""
        q, k, v = self.into(self.first(x)).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
        attended = torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.wide(self.second(x))


MODELS: Mapping[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "voice": lambda: (Voice(), (torch.randn(1, 576), torch.randn(1, 128), torch.randn(1, 128))),
    "pointwise": lambda: (_norms(), (torch.randn(64, 256),)),
    "layer": lambda: (Layer(), (torch.randn(1, 64, 256),)),
}


@contextlib.contextmanager
def busy_loops(count: int, seconds: float) -> Generator[None]:
    """`count` processes that do nothing but use a core; they end with the block, and by themselves after `seconds`."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP, str(seconds)]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def in_turns(runs: Mapping[str, Run], seconds: float) -> dict[str, list[float]]:
    """Seconds per call of each contestant, a number for each of its blocks, about `seconds` for each in all."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(max(3, round(seconds / BLOCK_SECONDS))):
        for name, run in runs.items():
            measure.silence()
            run()
            start, calls = time.perf_counter(), 0
            while time.perf_counter() - start < BLOCK_SECONDS:
                run()
                calls += 1
            found[name].append((time.perf_counter() - start) / calls)
    return found


def counts(run: Run) -> Facts:
    """Per call: parallel regions of ours, waits of the process (voluntary switches), processor time of the caller and
    of all other threads, in microseconds."""
    time.sleep(0.3)
    threads = pool.running()
    regions = threads.regions if threads is not None else 0
    waits = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    mine, all_threads = time.thread_time(), time.process_time()
    for _ in range(COUNTED):
        run()
    mine, all_threads = time.thread_time() - mine, time.process_time() - all_threads
    waits = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits
    entered = threads.regions - regions if threads is not None else 0
    return {
        "regions": entered / COUNTED,
        "waits": waits / COUNTED,
        "caller_us": mine / COUNTED * 1e6,
        "others_us": (all_threads - mine) / COUNTED * 1e6,
    }


def run(name: str, threads: int, loops: int, seconds: float, contestants: tuple[str, ...]) -> Facts:
    """All figures of one model. Milliseconds are medians over blocks."""
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    workload = Workload(name, module.eval(), inputs)
    ready: dict[str, Run] = {}
    facts: dict[str, Facts] = {}
    for contestant in contestants:
        prepared = measure.prepare(contestant, workload, threads)
        if isinstance(prepared, Unavailable):
            facts[contestant] = {"not_available": prepared.reason}
            continue
        ready[contestant] = lambda call=prepared.call: call(*inputs)
        facts[contestant] = {"coverage": prepared.coverage}
    cores = len(os.sched_getaffinity(0))
    wanted = max(1.0, (threads + loops) / cores)
    with measure.settings(threads):
        alone = in_turns(ready, seconds)
        for contestant, call in ready.items():
            facts[contestant] |= {"per_call": counts(call)}
        with busy_loops(loops, 60 + 10 * seconds * len(ready)):
            time.sleep(0.3)
            beside = in_turns(ready, seconds)
    for contestant in ready:
        first, second = (statistics.median(times[contestant]) * 1e3 for times in (alone, beside))
        facts[contestant] |= {
            "alone_ms": first, "busy_ms": second, "over_fair_share": second / (wanted * first),
            "busy_worst_block_ms": max(beside[contestant]) * 1e3,
        }  # fmt: skip
    return {"fair_share_of_alone": wanted, "contestants": facts}


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--threads", default=2, show_default=True)
@click.option("--loops", default=2, show_default=True, help="busy processes beside the model")
@click.option("--seconds", default=1.0, show_default=True, help="timing per contestant, alone and beside")
@click.option("--model", "models", multiple=True, type=click.Choice(tuple(MODELS)), help="default: all")
@click.option("--contestant", "contestants", multiple=True, type=click.Choice(tuple(measure.PEERS)))
def main(
    path: Path | None,
    threads: int,
    loops: int,
    seconds: float,
    models: tuple[str, ...],
    contestants: tuple[str, ...],
) -> None:
    """Run all models and print one table each."""
    warnings.filterwarnings("ignore")
    found: dict[str, Facts] = {}
    console = Console() if Console().is_terminal else Console(width=140)
    for name in models or tuple(MODELS):
        facts = found[name] = run(name, threads, loops, seconds, contestants or tuple(measure.PEERS))
        table = Table(title=f"{name}, {threads} threads, beside {loops} busy processes", title_justify="left")
        table.add_column("")
        for column in (
            "alone ms", "busy ms", "worst block", "over fair share", "regions", "waits", "caller us", "others us"
        ):  # fmt: skip
            table.add_column(column, justify="right")
        each: dict[str, Facts] = facts["contestants"]  # type: ignore[assignment]
        for contestant, item in each.items():
            if "alone_ms" not in item:
                table.add_row(contestant, f"not available: {item['not_available']}")
                continue
            per_call: dict[str, float] = item["per_call"]  # type: ignore[assignment]
            times = [item[k] for k in ("alone_ms", "busy_ms", "busy_worst_block_ms", "over_fair_share")]
            table.add_row(contestant, *(f"{v:.3f}" for v in times), *(f"{v:.2f}" for v in per_call.values()))
        console.print(table)
    if path is not None:
        record.write_json(path, record.provenance(threads) | {"busy_processes": loops, "models": found})


if __name__ == "__main__":
    main()
