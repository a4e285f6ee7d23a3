"""Loops written in Python, more than 64 steps of them, which torch unrolls: what a call and the first call take.

    python -m benchmarks.python_loops [--device cuda] [--steps 100] [--train] [--json FILE] [--commit HASH]

Beside eager and Inductor (default options; with `--steps` of a few hundred it takes minutes for some). Results
(and gradients of all operands) are judged in doubles: at most twice as far off as eager, or a few units of single
precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

import tilewright
from benchmarks import record
from benchmarks.record import Facts

UNITS = 64 * torch.finfo(torch.float32).eps
"""Relative to the largest element: what a hundred steps in another order may differ by."""
ROUNDS = 20


def elman(x: Tensor, w: Tensor, u: Tensor, h: Tensor) -> Tensor:
    """A recurrent layer: h = tanh(x_t w + h u), all states."""
    made: list[Tensor] = []
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] @ w + h @ u)
        made.append(h)
    return torch.stack(made)


def average(a: Tensor, x: Tensor, h: Tensor) -> Tensor:
    """A gated running average along dim 1, all states."""
    made: list[Tensor] = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        made.append(h)
    return torch.stack(made, 1)


def selective(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    """A selective state space, read out at each step."""
    made: list[Tensor] = []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        made.append(torch.einsum("bdn,bn->bd", h, c[:, t]))
    return torch.stack(made, 1)


def euler(x: Tensor, w: Tensor, u: Tensor, steps: int) -> Tensor:
    """An ordinary differential equation whose slope is a small network."""
    for _ in range(steps):
        x = x + 0.01 * (torch.tanh(x @ w) @ u)
    return x


def powers(a: Tensor, v: Tensor, steps: int) -> Tensor:
    """The largest eigenvector."""
    for _ in range(steps):
        v = a @ v
        v = v / v.norm()
    return v


def balanced(k: Tensor, steps: int) -> Tensor:
    """Sinkhorn's normalisation of rows and columns in turns."""
    for _ in range(steps):
        k = k - k.logsumexp(-1, keepdim=True)
        k = k - k.logsumexp(-2, keepdim=True)
    return k


def cells(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Tensor:
    """LSTM cells written out, all states."""
    made: list[Tensor] = []
    for t in range(x.shape[0]):
        i, f, g, o = (x[t] @ w + h @ u + b).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        made.append(h)
    return torch.stack(made)


def waves(now: Tensor, before: Tensor, speed: Tensor, steps: int) -> Tensor:
    """A wave on a ring: each point from itself and its neighbours."""
    for _ in range(steps):
        bent = now.roll(1, -1) + now.roll(-1, -1) - 2 * now
        now, before = 2 * now - before + speed * bent, now
    return now


@dataclass(frozen=True, slots=True)
class Case:
    """A program and its operands for a number of steps."""

    function: Callable[..., Tensor]
    operands: Callable[[Callable[..., Tensor], int], tuple[object, ...]]


CASES = {
    "elman": Case(elman, lambda r, n: (r(n, 32, 128), r(128, 256) / 20, r(256, 256) / 20, r(32, 256))),
    "average": Case(average, lambda r, n: (r(32, n, 1024).sigmoid(), r(32, n, 1024), r(32, 1024))),
    "selective": Case(
        selective, lambda r, n: (r(4, n, 256, 16).sigmoid(), r(4, n, 256, 16), r(4, n, 16), r(4, 256, 16))
    ),
    "euler": Case(euler, lambda r, n: (r(64, 128), r(128, 256) / 20, r(256, 128) / 20, n)),
    "powers": Case(powers, lambda r, n: (r(512, 512) / 20 + r(512, 1), r(512), n)),
    "balanced": Case(balanced, lambda r, n: (r(8, 64, 64), n)),
    "cells": Case(
        cells, lambda r, n: (r(n, 16, 64), r(16, 128), r(16, 128), r(64, 512) / 20, r(128, 512) / 20, r(512))
    ),
    "waves": Case(waves, lambda r, n: (r(64, 4096), r(64, 4096), r(1).sigmoid() / 4, n)),
}


def milliseconds(run: Callable[[], object], device: str) -> float:
    """The median time of a call, which has ended when it counts."""
    times: list[float] = []
    for _ in range(ROUNDS + 3):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[3:])[ROUNDS // 2] * 1e3


def distance(made: list[Tensor], exact: list[Tensor]) -> float:
    """The largest error in units of the largest element of its tensor."""
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(made, exact, strict=True))


def results(function: Callable[..., Tensor], operands: Sequence[object], train: bool) -> list[Tensor]:
    """What a call gives; with `train`, after it the gradients of all operands, of a weighted mean square (that of
    a normalised vector alone is always the same)."""
    if not train:
        with torch.no_grad():
            return [function(*operands)]
    given = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in operands]
    made = function(*given)
    leaves = [x for x in given if isinstance(x, Tensor)]
    weights = torch.linspace(0.5, 1.5, made.numel(), dtype=made.dtype, device=made.device).view_as(made)
    return [made.detach(), *torch.autograd.grad((made.square() * weights).mean(), leaves)]


def run_case(case: Case, device: str, steps: int, *, peers: bool, train: bool) -> Facts:
    """What one program takes, and how far off it is."""
    draw = torch.Generator(device=device).manual_seed(0)
    operands = case.operands(lambda *shape: torch.randn(*shape, device=device, generator=draw), steps)
    wide = [x.double() if isinstance(x, Tensor) else x for x in operands]
    exact = results(case.function, wide, train)
    found: Facts = {"steps": steps}
    eager = distance(results(case.function, operands, train), exact)
    took = milliseconds(lambda: results(case.function, operands, train), device)
    found["eager"] = {"ms": took, "error": eager}
    compilers = {"tilewright": tilewright.backend} | ({"inductor": "inductor"} if peers else {})
    for name, backend in compilers.items():
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
        compiled = torch.compile(case.function, backend=backend)
        start = time.perf_counter()
        made = results(compiled, operands, train)
        first = time.perf_counter() - start
        wrong = distance(made, exact)
        took = milliseconds(lambda compiled=compiled: results(compiled, operands, train), device)
        found[name] = {"ms": took, "error": wrong, "first_call_s": first}
        if name == "tilewright":
            kept = tilewright.compilations()[-1 - train :]
            found["loops"] = sum(c.name == "loop" for m in kept for c in m.calls)
            found["right"] = wrong <= max(2 * eager, UNITS)
    return found


@click.command(help=__doc__)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--steps", default=100)
@click.option("--only", default="")
@click.option("--peers/--no-peers", default=True)
@click.option("--train/--inference", default=False)
@click.option("--commit", default="")
@click.option("--json", "file", type=click.Path(path_type=Path), default=None)
def main(
    device: str, steps: int, only: str, peers: bool, train: bool, commit: str, file: Path | None
) -> None:
    """See the module."""
    cases: Facts = {}
    for name, case in CASES.items():
        if only in name:
            cases[name] = run_case(case, device, steps, peers=peers, train=train)
            click.echo(f"{name}: {cases[name]}")
    if file is not None:
        name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
        facts = record.provenance(torch.get_num_threads()) | {"device": name, "results": cases}
        record.write_json(file, facts | ({"commit": commit} if commit else {}))


if __name__ == "__main__":
    main()
