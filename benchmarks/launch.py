"""`python -m benchmarks.launch --device cuda`: what the host spends on each kernel, without CUDA graphs.

A chain of softmaxes over the rows and the columns of one matrix in turn: each needs all of the last one's
result, and the matrix is larger than what a multiprocessor keeps, so that no two can be one kernel. Calls
start on an idle device and the clock stops when they return. The cost per kernel is that of a long chain
less that of a short one, over the difference of their kernels, which the profiler counts.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks import gpu_peers, gpu_report, record
from benchmarks.gpu_clock import host_time, synchronize
from benchmarks.gpu_report import Figure, figure
from benchmarks.record import Facts
from tilewright import measure

LONG, SHORT = 20, 4
SIDE = 512
CONTESTANTS = ("eager", "inductor", "torch.compile, tilewright", "tilewright.compile")
OURS = "tilewright.compile"
LIMIT = 3.0
"""Microseconds."""

Function = Callable[[torch.Tensor], torch.Tensor]


def chain(steps: int) -> Function:
    """`steps` softmaxes, over columns and rows in turn."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for step in range(steps):
            x = torch.softmax(x, step % 2)
        return x

    return run


def build(name: str, steps: int, x: torch.Tensor) -> Function:
    """One contestant for one length."""
    function = chain(steps)
    if name == "eager":
        return function
    if name == OURS:
        options = {"cuda_graphs": False} if x.is_cuda else {}
        return importlib.import_module("tilewright").compile(function, (x,), options=options)
    backend = "inductor" if name == "inductor" else importlib.import_module("tilewright").backend
    return torch.compile(gpu_peers.fresh(function), backend=backend, dynamic=False)  # type: ignore[return-value,arg-type]


def kernels(run: Function, x: torch.Tensor) -> int:
    """How many kernels one call starts, as the profiler sees it; 0 where it sees none."""
    if not x.is_cuda:
        return 0
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        run(x)
        torch.cuda.synchronize()
    found = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not e.name.startswith(("Memcpy", "Memset")) for e in found)


def measured(name: str, x: torch.Tensor, rounds: int) -> Facts:
    """All figures of one contestant."""
    runs: dict[int, Function] = {}
    try:
        for steps in (LONG, SHORT):
            runs[steps] = build(name, steps, x)
            runs[steps](x)
            synchronize(x.device)
        counts = {steps: kernels(run, x) for steps, run in runs.items()}
    except Exception as error:  # noqa: BLE001 - one contestant's failure must not stop the others
        return {"not_available": measure.one_line(error)}
    times = host_time({str(n): _bound(run, x) for n, run in runs.items()}, x.device, rounds)
    long, short = (times[str(n)].median * 1e6 for n in (LONG, SHORT))
    counted = counts[LONG] > counts[SHORT] > 0
    more = counts[LONG] - counts[SHORT] if counted else LONG - SHORT
    return {
        "kernels": counts[LONG] if counted else LONG,
        "kernels_counted": counted,
        "call_us": long,
        "us_per_kernel": (long - short) / more,
        "call_us_over_kernels": long / (counts[LONG] if counted else LONG),
    }


def _bound(run: Function, x: torch.Tensor) -> measure.Run:
    return lambda: run(x)


def figures(contestants: Mapping[str, Facts]) -> list[Figure]:
    """The wanted figure."""
    values = (
        [float(contestants[OURS]["us_per_kernel"])] if "us_per_kernel" in contestants.get(OURS, {}) else []
    )  # type: ignore[arg-type]
    return [
        figure("launch per kernel, no graph", values, lambda v: (f"{v[0]:.2f} us", v[0] <= LIMIT), "<= 3 us")
    ]


def main(given: Sequence[str] | None = None) -> int:
    """Run, print the table, write the JSON."""
    warnings.filterwarnings("ignore")
    arguments = gpu_report.parser(__doc__).parse_args(given)
    device = torch.device(arguments.device)
    if reason := gpu_report.unusable(device):
        print(reason, file=sys.stderr)
        return 2
    x = torch.randn(SIDE, SIDE, device=device)
    found: dict[str, Facts] = {}
    head = gpu_report.provenance(device, arguments.commit)
    for name in arguments.only or CONTESTANTS:
        with torch.no_grad():
            found[name] = measured(name, x, arguments.rounds)
        if arguments.json is not None:
            wanted = [item.facts() for item in figures(found)]
            record.write_json(arguments.json, head | {"figures": wanted, "contestants": found})
    lines = [
        [name, f"{f['us_per_kernel']:.2f}", f"{f['call_us']:.1f}", str(f["kernels"])]
        if "call_us" in f
        else [f"{name}: not available: {f['not_available']}", "-", "-", "-"]
        for name, f in found.items()
    ]
    title = f"host time, chain of {LONG} softmaxes of {SIDE} x {SIDE} floats, us"
    print(gpu_report.text_table(title, ["", "per kernel", "per call", "kernels"], lines))
    heads = ["figure", "value", "wanted", ""]
    print(gpu_report.text_table("wanted figures", heads, [item.row() for item in figures(found)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
