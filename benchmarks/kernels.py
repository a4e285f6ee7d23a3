"""`python -m benchmarks.kernels`: memory-bound kernels against the machine's own copy bandwidth and the
peers.

Two figures per kernel. With `out=`: compulsory bytes (inputs and outputs once) per second, as a share of
the copy bandwidth measured beside it, and what of the time the arithmetic alone takes, measured on tensors
that stay in cache. With outputs allocated by each contestant: times beside eager and Inductor. A timing that
beats the fastest memory seen here is an error, not a result.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.bandwidth import Bandwidth, NoYardstick, Yardstick
from benchmarks.record import Facts
from tilewright import accuracy, measure
from tilewright.measure import PreparedContestant, Timing, Unavailable, Workload
from tilewright.report.environment import environment

SIZE = 64 << 20
CACHED = (1 << 19, 1 << 20, 1 << 21, 1 << 22)
"""Bytes of tensors that stay in the caches of two cores; the first two that differ give the time per byte."""

OURS = "tilewright"
PEERS = ("eager", "inductor", OURS)
Tensors = tuple[torch.Tensor, ...]


class Kernel(torch.nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., torch.Tensor | Tensors]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | Tensors:
        """The function of the inputs."""
        return self.function(*inputs)


@dataclass(frozen=True)
class Case:
    """A kernel, its inputs for a size in bytes of its largest tensor, and special functions per element."""

    function: Callable[..., torch.Tensor | Tensors]
    inputs: Callable[[int], Tensors]
    special: str = ""


def _square(size: int) -> tuple[int, int]:
    """Rows and columns of a float32 matrix of `size` bytes; 4096 columns for 64 MiB."""
    columns = min(4096, size // 4 // 16)
    return size // 4 // columns, columns


def _matrix(size: int) -> Tensors:
    return (torch.randn(_square(size)),)


def _two(size: int) -> Tensors:
    return torch.randn(_square(size)), torch.randn(_square(size)), *_vectors(size)[1:]


def _vectors(size: int) -> Tensors:
    columns = _square(size)[1]
    return torch.randn(_square(size)), torch.randn(columns), torch.randn(columns)


def _vector(size: int) -> Tensors:
    return _vectors(size)[:2]


def _images(size: int) -> Tensors:
    return torch.randn(max(1, size // (4 * 64 * 64 * 64)), 64, 64, 64), torch.randn(64), torch.randn(64)


def _heads(size: int) -> Tensors:
    return (torch.randn(max(1, size // (4 * 512 * 16 * 64)), 512, 16, 64),)


def _layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def _residual(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Tensors:
    z = x + y
    return z, F.layer_norm(z, z.shape[-1:], w, b)


def _chain(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Eight ops, two of them transcendental: mul, add, abs, neg, exp, mul, sub, tanh."""
    return torch.tanh(torch.exp(-torch.abs(x * a + b)) * x - a)


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "row softmax": Case(lambda x: torch.softmax(x, -1), _matrix, "1 exp"),
        "layer norm": Case(_layer_norm, _vectors),
        "RMS norm": Case(lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6), _vector),
        "group norm + SiLU": Case(
            lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)), _images, "1 exp, 1 division"
        ),
        "residual + norm": Case(_residual, _two),
        "bias + GELU": Case(lambda x, b: F.gelu(x + b), _vector, "1 erf"),
        "8-op chain": Case(_chain, _vectors, "1 exp, 1 tanh"),
        "column sums": Case(lambda x: x.sum(0), _matrix),
        "transpose": Case(lambda x: x.t().contiguous(), _matrix),
        "swap of middle dims": Case(lambda x: x.transpose(1, 2).contiguous(), _heads),
    }
)


def compulsory(inputs: Tensors, outputs: Tensors) -> int:
    """Bytes that every version must move: each input read once, each output written once."""
    return sum(tensor.nbytes for tensor in (*inputs, *outputs))


def with_out(
    prepared: Mapping[str, PreparedContestant], workload: Workload, outputs: Tensors
) -> dict[str, measure.Run]:
    """Runs that write into `outputs`, for the contestants that take `out=`."""
    if OURS not in prepared:
        return {}
    import tilewright

    compiled = tilewright.compile(workload.target, workload.inputs)
    target = outputs[0] if len(outputs) == 1 else outputs
    compiled(*workload.inputs, out=target)
    return {OURS: lambda: compiled(*workload.inputs, out=target)}


@torch._dynamo.config.patch(automatic_dynamic_shapes=False)  # sizes are constants, as in what is recorded
def in_cache(case: Case, moved: int, threads: int, seconds: float) -> float | None:
    """Seconds that our kernel would take for `moved` bytes if memory took none: from how its time grows between two
    sizes that stay in cache, which leaves out what a call costs. None if noise hides it."""
    import tilewright

    found: dict[int, tuple[measure.Run, Tensors]] = {}
    for size in CACHED:
        inputs = case.inputs(size)
        if len(found) == 2:
            break
        compiled = tilewright.compile(Kernel(case.function).eval(), inputs)
        outputs = measure.flatten(compiled(*inputs))
        given = outputs[0] if len(outputs) == 1 else outputs
        call = functools.partial(compiled, *inputs, out=given)
        found.setdefault(compulsory(inputs, outputs), (call, outputs))
    sizes = sorted(found)[:2]
    with measure.settings(threads):
        timings = measure.measure({str(n): found[n][0] for n in sizes}, seconds=seconds, pause=0.0)
    small, large = (timings[str(n)].minimum for n in sizes)
    return (large - small) / (sizes[1] - sizes[0]) * moved if large > small else None


def run(name: str, yardstick: Yardstick, size: int, threads: int, seconds: float) -> Facts:
    """All figures of one kernel."""
    torch._dynamo.reset()  # all cases share the code of `Kernel.forward`: Dynamo would hit its limit of versions
    case = CASES[name]
    torch.manual_seed(0)
    inputs = case.inputs(size)
    workload = Workload(name, Kernel(case.function).eval(), inputs)
    contestants = {peer: measure.prepare(peer, workload, threads) for peer in PEERS}
    ready = {peer: item for peer, item in contestants.items() if isinstance(item, PreparedContestant)}
    with measure.settings(threads):
        results = {peer: item.call(*inputs) for peer, item in ready.items()}
        exact = measure.flatten(accuracy.in_float64(workload.target)(*inputs))
    verdicts = {
        peer: accuracy.compare_trees(result, results["eager"], exact) for peer, result in results.items()
    }
    moved = compulsory(inputs, results["eager"])
    outputs = tuple(torch.zeros_like(tensor) for tensor in results["eager"])
    del results, exact
    before = yardstick.measure()
    timings = measure.compare(ready, workload, threads, seconds=seconds)
    with measure.settings(threads):
        # One contestant: no pause between its calls, as there is none between those of the yardstick.
        direct = measure.measure(with_out(ready, workload, outputs), seconds=seconds, pause=0.0)
        computing = in_cache(case, moved, threads, seconds / 4) if direct else None
    after = yardstick.measure()
    machine = Bandwidth(
        max(before.ordinary, after.ordinary),
        max(before.non_temporal, after.non_temporal),
        max(before.read, after.read),
    )
    facts: Facts = {
        "bytes": moved,
        "special_functions": case.special,
        "copy_GB_per_s": machine.copy / 1e9,
        "ordinary_copy_GB_per_s": machine.ordinary / 1e9,
        "non_temporal_copy_GB_per_s": machine.non_temporal / 1e9,
        "read_GB_per_s": machine.read / 1e9,
        "in_cache_ms": None if computing is None else computing * 1e3,
    }
    bound = measure.lower_bound(moved=moved, bandwidth=1.25 * max(machine.copy, machine.read))
    made = {
        peer: figures(timing, timings, moved, machine, verdicts[peer], bound, peer)
        for peer, timing in timings.items()
    }
    missing = {
        peer: {"not_available": item.reason}
        for peer, item in contestants.items()
        if isinstance(item, Unavailable)
    }
    facts["allocating"] = made | missing
    facts["with_out"] = {
        peer: figures(timing, direct, moved, machine, verdicts[peer], bound, peer)
        for peer, timing in direct.items()
    }
    return facts


def figures(
    timing: Timing,
    all_: Mapping[str, Timing],
    moved: int,
    machine: Bandwidth,
    verdict: accuracy.TreeVerdict,
    bound: float,
    name: str,
) -> Facts:
    """What is recorded of one contestant on one kernel."""
    measure.require_possible(name, timing, bound)
    return {
        "latency_ms": timing.summary(),
        "GB_per_s": moved / timing.median / 1e9,
        "share_of_copy": moved / timing.median / machine.copy,
        "accuracy": {
            "passed": verdict.passed,
            "smallest_k": verdict.smallest_k,
            "of_eager": verdict.relative_k,
        },
        **{
            f"speed_over_{peer}": measure.ratio(all_[peer], timing)
            for peer in ("eager", "inductor")
            if peer in all_
        },
    }


def table(kernels: Mapping[str, Facts], size: int, threads: int) -> Table:
    """One row per kernel."""
    title = f"memory-bound kernels, {size >> 20} MiB, {threads} threads, {environment()['cpu']}"
    result = Table(title=title, title_justify="left")
    result.add_column("kernel", no_wrap=True)
    for column in (
        "copy GB/s",
        "eager ms",
        "Inductor ms",
        "ours ms",
        "x Inductor",
        "out= ms",
        "in cache ms",
        "of copy",
        "smallest k",
    ):
        result.add_column(column, justify="right", no_wrap=True)
    for name, facts in kernels.items():
        allocating: Mapping[str, Facts] = facts["allocating"]  # type: ignore[assignment]
        times = [_median(allocating.get(peer, {})) for peer in PEERS]
        ours = allocating.get(OURS, {})
        speed = f"{ours['speed_over_inductor']:.2f}" if "speed_over_inductor" in ours else "-"
        direct: Facts = facts["with_out"].get(OURS, {})  # type: ignore[union-attr]
        share = f"{direct['share_of_copy']:.0%}" if direct else "-"
        cached = f"{facts['in_cache_ms']:.2f}" if isinstance(facts["in_cache_ms"], float) else "-"
        accurate = ours.get("accuracy")
        fits = (
            f"{accurate['smallest_k']:.2f}"
            if isinstance(accurate, Mapping)
            else str(ours.get("not_available", "-"))
        )
        result.add_row(
            name, f"{facts['copy_GB_per_s']:.1f}", *times, speed, _median(direct), cached, share, fits[:40]
        )
    return result


def _median(facts: Facts) -> str:
    latency = facts.get("latency_ms")
    return f"{latency['median']:.2f}" if isinstance(latency, Mapping) else "-"


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--only", multiple=True, type=click.Choice(list(CASES)), help="some of the kernels")
@click.option("--mebibytes", default=SIZE >> 20, show_default=True, help="size of the largest tensor")
@click.option("--threads", default=2, show_default=True)
@click.option("--seconds", default=3.0, show_default=True, help="timing per contestant")
def main(path: Path | None, only: tuple[str, ...], mebibytes: int, threads: int, seconds: float) -> None:
    """Run the kernels and print one table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    console = Console() if Console().is_terminal else Console(width=150)
    size = mebibytes << 20
    try:
        yardstick = Yardstick(size, threads)
    except NoYardstick as error:
        raise click.ClickException(f"no yardstick: {error}") from error
    kernels: dict[str, Facts] = {}
    for name in only or CASES:
        with console.status(name):
            kernels[name] = run(name, yardstick, size, threads, seconds)
        if path is not None:
            record.write_json(path, record.provenance(threads) | {"size": size, "kernels": kernels})
    console.print(table(kernels, size, threads))


if __name__ == "__main__":
    main()
