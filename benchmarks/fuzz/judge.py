"""Runs a program compiled and judges it: values, gradients and what it writes, by the fp64 rule; layouts are eager's
or those that torch's fake kernels promise.

Of small tensors a lucky eager may be exact: what the rule refuses is judged again over several draws of the inputs at
once, the first among them, so that luck is not the yardstick.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._prims_common import check_significant_strides

import tilewright
from benchmarks.fuzz.program import Program, function
from benchmarks.promises import promised, strides
from tilewright import accuracy
from tilewright.errors import InputError

ELEMENTS = 1024
"""Elements over which a refused result is judged again, if no more than MOST draws of the inputs give so many. Those
that are one number, as in the gradient of a sum, are one."""
FEWEST, MOST = 6, 64
REFUSED = "refused"
"""The kind of a program that was not judged: eager refuses it, or torch fixes a size that the caller named."""
FIXED = "is fixed by the program"
"""A size that the caller named and torch itself fixes while it traces: told, not wrong."""


@dataclass(frozen=True)
class Setting:
    """How a program is compiled. `seed` draws its inputs; `schedules` (0: none) draws the decisions of its kernels."""

    door: str = "backend"
    training: bool = False
    dynamic: bool = False
    options: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    schedules: int = 0


@dataclass(frozen=True)
class Failure:
    """What went wrong. `kind` is wrong, crash, fallback, layout or slow; or refused, if nothing was judged."""

    kind: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """What a run made: results, gradients of inputs, and the inputs as they are afterwards."""

    results: list[Tensor]
    gradients: list[Tensor]
    inputs: list[Tensor]


def ran(
    forward: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    *,
    training: bool = True,
    draw: int = 0,
) -> Outcome:
    """Run, and where an input wants a gradient, differentiate a sum of all results, weighted by the numbers of a
    `draw`."""
    asked = [x for x in inputs if x.requires_grad]
    leaves = list(inputs)
    with nullcontext() if training and asked else torch.no_grad():
        results = forward(*leaves)
    gradients: list[Tensor] = []
    live = [r for r in results if r.requires_grad]
    if training and asked and live:
        weights = [_weights(r, k, draw) for k, r in enumerate(live)]
        found = torch.autograd.grad(live, asked, weights, allow_unused=True)
        gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(asked, found, strict=True)]
    return Outcome([r.detach() for r in results], gradients, [x.detach() for x in inputs])


def _weights(r: Tensor, k: int, draw: int) -> Tensor:
    numbers = torch.Generator().manual_seed(1000 * (1 + draw) + k)
    return torch.randn(r.shape, generator=numbers, device="cpu").to(r.device, r.dtype)


def judged(
    program: Program, setting: Setting, device: str = "cpu", backend: str = "tilewright"
) -> Failure | None:
    """The first failure of a program, or None. Another `backend` of torch.compile tells whether torch itself fails; at
    the direct door, as one graph."""
    torch._dynamo.reset()
    plain = function(program.source())
    compiled: Callable[..., tuple[Tensor, ...]] | None = None
    for later in (False, True) if setting.dynamic and program.later else (False,):
        try:
            wanted = ran(
                plain, program.inputs(setting.seed, later=later, device=device), training=setting.training
            )
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return Failure(REFUSED, f"eager: {str(error)[:600]}")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                compiled = compiled or _compiled(plain, program, setting, device, backend)
                got = ran(
                    compiled,
                    program.inputs(setting.seed, later=later, device=device),
                    training=setting.training,
                )
            except InputError as refused:
                return Failure(REFUSED if FIXED in str(refused) else "crash", str(refused)[:600])
            except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
                return Failure("crash", f"{type(error).__name__}: {str(error)[:600]}")
        told = [str(w.message) for w in said if "without generated code" in str(w.message)]
        if told:
            return Failure("fallback", told[0][:600])
        found = _compared(program, setting, wanted, got, plain, compiled, later, device)
        if found is not None:
            return found
    return None


def _compiled(
    plain: Callable[..., tuple[Tensor, ...]], program: Program, setting: Setting, device: str, backend: str
) -> Callable[..., tuple[Tensor, ...]]:
    if backend != "tilewright":
        whole = setting.door == "direct"
        return torch.compile(plain, backend=backend, dynamic=setting.dynamic, fullgraph=whole)
    options = {"measure": False, **setting.options}
    if setting.door == "direct":
        inputs = program.inputs(setting.seed, device=device)
        dims = {g.name: {k: s for k, s in enumerate(g.sizes) if isinstance(s, str)} for g in program.givens}
        dims = {n: d for n, d in dims.items() if d} if setting.dynamic else None
        with nullcontext() if setting.training else torch.no_grad():
            return tilewright.compile(plain, tuple(inputs), dims=dims, options=options)
    return torch.compile(plain, backend=tilewright.backend, dynamic=setting.dynamic, options=options)


def _compared(
    program: Program, setting: Setting, wanted: Outcome, got: Outcome, plain: Callable[..., tuple[Tensor, ...]],
    compiled: Callable[..., tuple[Tensor, ...]], later: bool, device: str,
) -> Failure | None:  # fmt: skip
    reference = _exact(program, setting, setting.seed, later, device)
    doubtful: list[str] = []
    promises: list[list[int]] = []
    fewest = ELEMENTS
    for part in ("results", "gradients", "inputs"):
        ours, eager, exact = (getattr(o, part) for o in (got, wanted, reference))
        if len(ours) != len(eager):
            return Failure("wrong", f"{len(ours)} {part}, eager {len(eager)}")
        for k, (y, e, r) in enumerate(zip(ours, eager, exact, strict=True)):
            place = f"{part}[{k}]" + (" at the second sizes" if later else "")
            verdict = accuracy.compare(y, e, r)
            if y.shape != e.shape:
                return Failure("wrong", f"{place}: {verdict}")
            if not verdict.passed:
                doubtful.append(f"{part} {k}")
                fewest = min(fewest, r.unique().numel())
            if part == "results" and not check_significant_strides(y, e)[0]:
                promises = promises or promised(
                    plain, *program.inputs(setting.seed, later=later, device=device)
                )
                if k >= len(promises) or strides(y) != promises[k]:
                    return Failure(
                        "layout", f"{place}: strides {y.stride()}, eager {e.stride()} of {tuple(e.shape)}"
                    )
    return _again(program, setting, doubtful, fewest, plain, compiled, later, device) if doubtful else None


def _exact(program: Program, setting: Setting, seed: int, later: bool, device: str, draw: int = 0) -> Outcome:
    inputs = program.inputs(seed, later=later, double=True, device=device)
    return ran(function(program.source(), double=True), inputs, training=setting.training, draw=draw)


def _again(
    program: Program, setting: Setting, doubtful: Sequence[str], fewest: int, plain: Callable[..., tuple[Tensor, ...]],
    compiled: Callable[..., tuple[Tensor, ...]], later: bool, device: str,
) -> Failure | None:  # fmt: skip
    """Judge the doubtful tensors of several draws as one: of inputs, and of what gradients are taken from. The first
    is the one that made them doubtful."""
    trios: list[tuple[Outcome, Outcome, Outcome]] = []
    draws = min(MOST, max(FEWEST, ELEMENTS // max(1, fewest)))
    for draw in range(draws):
        seed = setting.seed + draw
        outcomes = [
            ran(f, program.inputs(seed, later=later, device=device), training=setting.training, draw=draw)
            for f in (compiled, plain)
        ]
        trios.append((outcomes[0], outcomes[1], _exact(program, setting, seed, later, device, draw)))
    for name in doubtful:
        part, k = name.split()
        pooled = [torch.cat([getattr(t[i], part)[int(k)].reshape(-1) for t in trios]) for i in range(3)]
        verdict = accuracy.compare(*pooled)
        if not verdict.passed:
            if _overflows(pooled[1], pooled[2]):
                return Failure(REFUSED, f"eager: {part}[{k}] overflows in places")
            return Failure("wrong", f"{part}[{k}]{' at the second sizes' if later else ''}: {verdict}")
    return None


def _overflows(eager: Tensor, exact: Tensor) -> bool:
    """Whether halves leave eager without numbers where there are some: which other elements those reach is a matter of
    where it rounds."""
    return eager.dtype in (torch.float16, torch.bfloat16) and bool(
        (exact.isfinite() & ~eager.isfinite()).any()
    )
