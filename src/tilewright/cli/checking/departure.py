"""Where a checked model departs from its meaning, what to try, and how far its peers are off."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tilewright import measure
from tilewright.accuracy import compare_trees
from tilewright.cli.model import Model
from tilewright.cli.request import CommandRequest
from tilewright.cli.show import Json
from tilewright.cli.work import threads_of
from tilewright.errors import InputError, WrongResult
from tilewright.measure import PEERS, Unavailable, Workload

from .parts import compile_whole_or_parts

OURS = "tilewright"
TRY = (
    ("--bisect", "names the kernel, call or rewrite, and writes a program that shows it"),
    ("--option round_intermediates=1", "rounds half types inside kernels as eager does"),
    ("--option trim=exact", "if masked values may be infinite or NaN"),
)
"""What to try where a check fails, and what it does."""


def first_departure(request: CommandRequest, model: Model, inputs: tuple[Tensor, ...]) -> str:
    """The first kernel or call that computes something else than it means, by holding each against its meaning."""
    held = replace(request, options=(*request.options, "verify=1"))
    try:
        compile_whole_or_parts(held, model, inputs)(*(value.clone() for value in inputs))
    except WrongResult as error:
        return str(error)
    return "no kernel or call departs by itself: errors add up, or a rewrite makes them"


def show_failure(request: CommandRequest, departure: str) -> None:
    """What a failed check says besides its verdict."""
    request.screen.line(f"first departs: {departure}", style="red")
    for flag, why in TRY:
        request.screen.line(f"try {flag}: {why}")
    request.screen.facts["first_departure"] = departure


def peers_of(names: str) -> list[str]:
    """The peers that are asked for. Raises InputError for others."""
    wanted = [n for n in dict.fromkeys(name.strip() for name in names.split(",")) if n not in ("", "none")]
    known = [peer for peer in PEERS if peer not in (OURS, "eager")]
    for name in wanted:
        if name not in known:
            hint = f"of {', '.join(known)}; eager is always there"
            raise InputError(f"unknown peer {name!r}", phase="cli", op="--against", hint=hint)
    return wanted


def show_peers(
    request: CommandRequest,
    names: list[str],
    workload: Workload,
    eager: object,
    exact: object,
    k: float | None,
) -> None:
    """The same rule for what peers compute of the same inputs; one that cannot run is a line."""
    found: list[Json] = []
    for name in names:
        built = PEERS[name](workload, threads_of(request))
        if isinstance(built, Unavailable):
            request.screen.line(f"{name}: {built}", style="yellow")
            continue
        results = measure.flatten(built.call(*(value.clone() for value in workload.inputs)))
        verdict = compare_trees(results, eager, exact, k=k)
        text = f"smallest k {verdict.smallest_k:.3g}"
        request.screen.line(f"{name}: {'PASS' if verdict.passed else 'FAIL'}: {text}")
        found.append({"peer": name, "passed": verdict.passed, "smallest_k": verdict.smallest_k})
    request.screen.facts["peers"] = found
