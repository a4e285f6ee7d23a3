"""`python -m benchmarks.call_cost --json FILE`: what a call of a network costs beyond its time on the GPU, at batch 1
and with CUDA graphs: wall clock of a call and a synchronise, less device time of calls in a row.

Each contestant runs on several inputs in turn, each in memory of its own ("moving"), or on one ("standing"). The floor
is torch's own replay of a graph of the same plan, without any copies: what a launch and a synchronise cost.
"""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tilewright
from benchmarks import gpu_report, record
from benchmarks.gpu_models import NETWORKS, load
from benchmarks.record import Facts

Call = Callable[[Tensor], object]
ROUNDS, IN_A_ROW, INPUTS = 300, 40, 4
SETTLING_SECONDS = 2.0
FLOOR = "replay alone"
OURS = "tilewright.compile"
FROZEN = f"{OURS}, frozen"
BACKEND, INDUCTOR = "torch.compile, tilewright", "torch.compile, inductor"
CONTESTANTS = (FLOOR, OURS, FROZEN, BACKEND, INDUCTOR)
OPTIONS: dict[str, Any] = {"cuda_graphs": True, "tune_seconds": 0}


def wall_us(call: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, float]:
    """Microseconds of a call and a synchronise, and until the call returns; medians."""
    whole, host = list[float](), list[float]()
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - start) * 1e6)
        host.append((returned - start) * 1e6)
    return statistics.median(whole), statistics.median(host)


def device_us(call: Callable[[], object], rounds: int = 9) -> float:
    """Device microseconds of one of several calls in a row, by events; median."""
    found = list[float]()
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(IN_A_ROW):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / IN_A_ROW * 1e3)
    return statistics.median(found)


def settle(call: Callable[[], object]) -> None:
    """Call until all is built and captured, and wait until nothing of that runs any more."""
    for _ in range(6):
        call()
    time.sleep(SETTLING_SECONDS)


def figures(call: Callable[[], object]) -> Facts:
    """What one contestant costs. Calls in a row that wait for the host tell no device time: where `host_us` is not
    below `device_us`, that is how long the host takes, and what is over it is too small: compare `wall_us` then."""
    settle(call)
    device = device_us(call)
    whole, host = wall_us(call)
    return {"wall_us": whole, "host_us": host, "device_us": device, "over_device_us": whole - device}


def turning(call: Call, inputs: Sequence[Tensor]) -> Callable[[], object]:
    """Calls on one input after the other."""
    place = 0

    def run() -> object:
        nonlocal place
        place = (place + 1) % len(inputs)
        return call(inputs[place])

    return run


def captured(call: Call, x: Tensor) -> Callable[[], object]:
    """A graph of one call, replayed by torch."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            kept = call(x)
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def contestants(model: nn.Module, x: Tensor, names: Sequence[str]) -> dict[str, Callable[[], Call]]:
    """What is timed, by name; each is built when it is its turn."""
    frozen = {**OPTIONS, "freeze": True}
    plain = {**OPTIONS, "cuda_graphs": False}
    found: dict[str, Callable[[], Call]] = {
        FLOOR: lambda: tilewright.compile(model, (x,), options=plain),
        OURS: lambda: tilewright.compile(model, (x,), options=OPTIONS),
        FROZEN: lambda: tilewright.compile(model, (x,), options=frozen),
        BACKEND: lambda: torch.compile(model, backend="tilewright", options=OPTIONS),
        INDUCTOR: lambda: torch.compile(model, mode="reduce-overhead"),
    }
    return {name: found[name] for name in CONTESTANTS if not names or name in names}


def of_network(name: str, names: Sequence[str]) -> Facts:
    """All contestants' figures for one network."""
    device, network = torch.device("cuda"), NETWORKS[name]
    model, x = load(network, device, torch.float16).model, network.inputs(1, device, torch.float16)
    if network.convolutional:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  (torch takes it)
        x = x.contiguous(memory_format=torch.channels_last)
    inputs = [x.clone(memory_format=torch.preserve_format) for _ in range(INPUTS)]
    made: dict[str, Facts] = {}
    for who, build in contestants(model, x, names).items():
        torch._dynamo.reset()
        start = time.perf_counter()
        call = build()
        if who == FLOOR:
            made[who] = figures(captured(call, x))
        else:
            moving, standing = figures(turning(call, inputs)), None
            if who.startswith(OURS):  # a call of its own sees which inputs stand still
                call = build()
                standing = figures(turning(call, inputs[:1]))
            made[who] = {"moving": moving, "standing": standing}
        made[who] = {**made[who], "seconds": time.perf_counter() - start}
        print(name, who, made[who], flush=True)
    weights = sum(1 for _ in model.parameters()) + sum(1 for _ in model.buffers())
    return {"weights": weights, "contestants": made}


def main(arguments: Sequence[str]) -> int:
    """Time all, and write the file. Returns 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="", help="where there is no repository to ask")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=["resnet50", "bert_base"], choices=sorted(NETWORKS))
    parser.add_argument("--against", nargs="*", default=[], choices=CONTESTANTS)
    given = parser.parse_args(arguments)
    reason = gpu_report.unusable(torch.device("cuda"))
    if reason:
        print(reason, file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    made: dict[str, Facts] = {}
    with torch.no_grad():
        for name in given.only:
            made[name] = of_network(name, given.against)
            if given.json is not None:  # what is there stays, whatever comes
                facts = gpu_report.provenance(torch.device("cuda"), given.commit) | {"networks": made}
                record.write_json(given.json, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
