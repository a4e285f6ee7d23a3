"""Kernels for few queries: their parts, shared heads written out, and whether they are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.triton.absent_gpu import Device
from tests.support.triton.harness import interpret, same_as_interpreter
from torch import Tensor

from tilewright import accuracy
from tilewright.ir.program import Dot, Loop, Stmt
from tilewright.ir.sizes import dims


def repeated(x: Tensor, heads: int) -> Tensor:
    batch, few, places, depth = x.shape
    shared = x[:, :, None].expand(batch, few, heads // few, places, depth)
    return shared.reshape(batch, heads, places, depth)


def statements(body: tuple[Stmt, ...]) -> list[Stmt]:
    return [x for s in body for x in (s, *(statements(s.body) if isinstance(s, Loop) else ()))]


def parts(made: Device) -> int:
    return max(r.parts for r in made.regions)


def right(
    made: Device, function: Callable[..., object], given: list[Tensor], folder: Path | None = None
) -> None:
    results, jobs = made.run(given)
    wide = accuracy.in_float64(function)(*given)
    eager = function(*given)
    flat = lambda x: [x] if isinstance(x, Tensor) else list(x)  # type: ignore[arg-type]  # noqa: E731
    for ours, e, r in zip(results, flat(eager), flat(wide), strict=True):
        verdict = accuracy.compare(ours, e, r)
        assert verdict.passed, verdict
    if folder is not None:
        for job, outcome in zip(jobs, interpret(folder, jobs), strict=True):
            same_as_interpreter(job, outcome, rtol=2e-3, atol=2e-3)


def inner(body: tuple[Stmt, ...]) -> list[Loop]:
    """The loops of more than one step around products."""
    found: list[Loop] = []
    for s in body:
        if isinstance(s, Loop):
            found += inner(s.body)
            if s.tile > 1 and dims.static(dims.sub(s.stop, s.start)) != s.tile:
                found += [s] if any(isinstance(x, Loop | Dot) for x in s.body) else []
    return found
