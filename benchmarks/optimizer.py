"""`python -m benchmarks.optimizer --device cuda --json FILE`: a step of AdamW over many tensors, beside torch's own.

Every contestant has parameters, gradients and moments of its own with equal values, and takes the same number of steps
in turns, with the wall clock around a step and a wait for the device. A step must move seven numbers for each parameter
(it reads the parameter, its gradient and two moments, and writes all but the gradient). A plain copy of as many bytes
beside it is what the memory gives. Parameters after all steps are compared with those of eager's plain loop.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import tilewright
from benchmarks import record

MOVED = 7
"""Numbers that a step must read or write for each parameter."""

PEERS = ("foreach", "fused", "inductor", "inductor reduce-overhead", "tilewright", "tilewright cuda_graphs")
WARM = 3


@dataclass
class Contestant:
    """An optimizer with its own tensors, and what its steps took."""

    name: str
    parameters: list[nn.Parameter]
    step: Callable[[], object]
    build_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    launches: int | None = None


def tensors(count: int, total: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """`count` matrices and vectors of `total` numbers in all: one in four is a vector, as in transformers."""
    vectors = count // 4
    width = 1024
    rows = max(1, (total // (count - vectors)) // width)
    shapes = [(width,) if k % 4 == 3 else (rows, width) for k in range(count)]
    draw = torch.Generator(device=device).manual_seed(0)
    return [torch.randn(s, device=device, dtype=dtype, generator=draw) for s in shapes]


def contestant(name: str, arguments: argparse.Namespace) -> Contestant:
    """One with tensors of its own, not yet run."""
    device = torch.device(arguments.device)
    values = tensors(arguments.tensors, arguments.numbers, device, getattr(torch, arguments.dtype))
    parameters = [nn.Parameter(v) for v in values]
    for p in parameters:
        p.grad = torch.full_like(p, 0.01).copysign_(p.detach().roll(1, -1))
    on_gpu = device.type == "cuda"
    compiled = name.startswith(("inductor", "tilewright"))
    how = {"fused": True} if name == "fused" else {"foreach": name != "eager"}
    made = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, capturable=on_gpu and compiled, **how)  # type: ignore[arg-type]
    step: Callable[[], object] = made.step
    if name == "inductor":
        step = torch.compile(made.step)
    elif name == "inductor reduce-overhead":
        step = torch.compile(made.step, mode="reduce-overhead")
    elif name == "tilewright":
        step = torch.compile(made.step, backend=tilewright.backend)
    elif name == "tilewright cuda_graphs":
        step = torch.compile(made.step, backend=tilewright.backend, options={"cuda_graphs": True})
    return Contestant(name, parameters, step)


def wait(device: str) -> None:
    """Until the device has done what was asked."""
    if device != "cpu":
        torch.cuda.synchronize()


def copy_seconds(arguments: argparse.Namespace) -> float:
    """Median seconds of a copy that moves as many bytes as a step."""
    dtype = getattr(torch, arguments.dtype)
    a = torch.zeros(arguments.numbers * MOVED // 2, device=arguments.device, dtype=dtype)
    b = torch.empty_like(a)
    taken: list[float] = []
    for _ in range(7):
        wait(arguments.device)
        start = time.perf_counter()
        b.copy_(a)
        wait(arguments.device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def timed(made: Contestant, device: str) -> None:
    """One step by the clock."""
    wait(device)
    start = time.perf_counter()
    made.step()
    wait(device)
    made.seconds.append(time.perf_counter() - start)


def largest_difference(made: Contestant, told: Contestant) -> float:
    """The largest difference of a parameter, relative to one plus its size."""
    with torch.no_grad():
        pairs = zip(made.parameters, told.parameters, strict=True)
        return max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs)


def main() -> None:
    """Build, time in turns, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--numbers", type=int, default=10**7, help="of all parameters together")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--against", nargs="+", default=list(PEERS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    facts: record.Facts = record.provenance(torch.get_num_threads())
    least = copy_seconds(arguments)
    names = ["eager", *arguments.against]
    if arguments.device == "cpu":
        names = [n for n in names if "graphs" not in n and "overhead" not in n]
    ready: list[Contestant] = []
    failed: dict[str, record.Json] = {}
    for name in names:
        torch._dynamo.reset()
        made = contestant(name, arguments)
        start = time.perf_counter()
        try:
            for _ in range(WARM):
                made.step()
            wait(arguments.device)
        except Exception as error:  # noqa: BLE001  a peer's failure is a fact
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(name, failed[name], flush=True)
            continue
        made.build_s = time.perf_counter() - start
        print(name, round(made.build_s, 1), flush=True)
        ready.append(made)
    for _ in range(arguments.steps):
        for made in ready:
            timed(made, arguments.device)
    results: dict[str, record.Json] = {}
    for made in ready:
        seconds = statistics.median(made.seconds)
        results[made.name] = {
            "ms": round(seconds * 1e3, 3),
            "of_copy_rate": round(least / seconds, 3),
            "build_s": round(made.build_s, 1),
            "largest_difference_from_eager": largest_difference(made, ready[0]),
        }
        print(made.name, results[made.name], flush=True)
    facts |= {
        "tensors": arguments.tensors, "numbers": arguments.numbers, "dtype": arguments.dtype,
        "copy_ms": round(least * 1e3, 3), "results": results, "failed": failed,
    }  # fmt: skip
    if arguments.json is not None:
        record.write_json(arguments.json, facts)


if __name__ == "__main__":
    main()
