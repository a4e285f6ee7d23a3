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
from torch._subclasses import FakeTensorMode

import tilewright
from benchmarks.fuzz.chance import is_chance
from benchmarks.fuzz.contradiction import contradicted
from benchmarks.fuzz.matrix_units import UNITS, cuts_off, rounding_units, takes_pieces
from benchmarks.fuzz.outcome import Draw, Outcome, ran
from benchmarks.fuzz.program import Program, function
from benchmarks.fuzz.smooth import firm, is_smooth
from benchmarks.fuzz.stepwise import has_halves, ran_stepwise
from benchmarks.promises import promised, strides
from tilewright import accuracy
from tilewright.errors import InputError

ELEMENTS = 1024
"""Elements over which a refused result is judged again, if no more than MOST draws of the inputs give so many. Those
that are one number, as in the gradient of a sum, are one."""
FEWEST, MOST = 6, 64
REFUSED = "refused"
"""The kind of a program that was not judged: eager refuses it, or torch fixes a size that the caller named."""
FAKE, PROMISE = "fake", "promise"
"""What `judged` takes for a backend to ask of torch's fake kernels, and the kind of a promise that eager breaks."""
APART, CONTRADICTION = "apart", "contradiction"
"""The same to ask whether torch contradicts itself, and the kind of a contradiction."""
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
    """What went wrong. `kind` is wrong, crash, fallback, layout or slow; or refused, if nothing was judged; or what
    matrix units cut off (UNITS), or what torch itself is asked for (PROMISE, CONTRADICTION)."""

    kind: str
    text: str


def judged(
    program: Program, setting: Setting, device: str = "cpu", backend: str = "tilewright"
) -> Failure | None:
    """The first failure of a program, or None. Another `backend` of torch.compile tells whether torch itself fails; at
    the direct door, as one graph. FAKE asks what torch's fake kernels promise."""
    torch._dynamo.reset()
    # Torch allows TF32 in convolutions: of two layouts one may be rounded to eleven bits.
    torch.backends.cudnn.allow_tf32 = False
    plain = function(program.source())
    if backend == FAKE:
        return _broken_promise(plain, program, setting, device)
    if backend == APART:
        return _contradiction(plain, program, setting, device)
    compiled: Callable[..., tuple[Tensor, ...]] | None = None
    excused: Failure | None = None
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
        if found is not None and found.kind != UNITS:
            return found
        excused = excused or found
    return excused


def _broken_promise(
    plain: Callable[..., tuple[Tensor, ...]], program: Program, setting: Setting, device: str
) -> Failure | None:
    """Where a result has other sizes, or another type, than torch's fake kernels say."""
    inputs = program.inputs(setting.seed, device=device)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x.detach()) for x in inputs]
    with torch.no_grad(), mode:
        said = plain(*fakes)
    wanted = ran(plain, inputs, training=False).results
    for k, (e, f) in enumerate(zip(wanted, said, strict=True)):
        if (e.dtype, tuple(e.shape)) != (f.dtype, tuple(f.shape)):
            return Failure(PROMISE, f"results[{k}]: {f.dtype}{list(f.shape)}, eager {e.dtype}{list(e.shape)}")
    return None


def _contradiction(
    plain: Callable[..., tuple[Tensor, ...]], program: Program, setting: Setting, device: str
) -> Failure | None:
    """Where torch contradicts itself and we are right by another of its ways."""
    compiled = _compiled(plain, program, setting, device, "tilewright")
    for later in (False, True) if setting.dynamic and program.later else (False,):

        def inputs(double: bool, place: str, later: bool = later) -> list[Tensor]:
            return program.inputs(setting.seed, later=later, double=double, device=place)

        ours = ran(compiled, inputs(False, device), training=setting.training)
        exact = _exact(program, setting, setting.seed, later, device)
        place = contradicted(program, inputs, setting.training, ours, exact, device)
        if place:
            return Failure(CONTRADICTION, f"{place}: eager in float64 is not what torch gives in another way")
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
    is the one that made them doubtful. What is refused then as well is judged over MOST draws: the numbers of a tensor
    may all err as one of them does, and six numbers tell no systematic error from luck. What these refuse is wrong
    unless it is chance."""
    draws: list[Draw] = []
    found: Failure | None = None
    for count in dict.fromkeys((min(MOST, max(FEWEST, ELEMENTS // max(1, fewest))), MOST)):
        draws += _drawn(program, setting, range(len(draws), count), plain, compiled, later, device)
        found = _pooled(program, setting, draws, doubtful, later, device)
        if found is None:
            return None
    return found


def _drawn(
    program: Program, setting: Setting, numbers: range, plain: Callable[..., tuple[Tensor, ...]],
    compiled: Callable[..., tuple[Tensor, ...]], later: bool, device: str,
) -> list[Draw]:  # fmt: skip
    """Draws by number. Where the program is not smooth at the inputs of one, those of the first serve again: what
    gradients are taken from is another draw all the same, so that a gradient of one number is never judged by one."""
    found: list[Draw] = []
    for number in numbers:
        seed = setting.seed + number
        if number and not is_smooth(program, seed, device):
            seed = setting.seed
        ours, eager = (
            ran(f, program.inputs(seed, later=later, device=device), training=setting.training, draw=number)
            for f in (compiled, plain)
        )
        found.append(Draw(seed, (ours, eager, _exact(program, setting, seed, later, device, number))))
    return found


def _pooled(
    program: Program,
    setting: Setting,
    draws: Sequence[Draw],
    doubtful: Sequence[str],
    later: bool,
    device: str,
) -> Failure | None:
    """The verdict on the doubtful tensors of all draws, but for the places that a near tie decides. That of matrix
    units hides no other."""
    excused: Failure | None = None
    for name in doubtful:
        part, k = name.split()
        pooled = [
            torch.cat([getattr(d.outcomes[i], part)[int(k)].reshape(-1) for d in draws]) for i in range(3)
        ]
        if part != "inputs" and not accuracy.compare(*pooled).passed:
            firms = {
                s: firm(program, s, later, device, part, int(k)).reshape(-1) for s in {d.seed for d in draws}
            }
            sure = torch.cat([firms[d.seed] for d in draws])
            if not sure.any():
                return Failure(REFUSED, f"eager: near ties decide all of {part}[{k}]")
            pooled = [x[sure] for x in pooled]
        verdict = accuracy.compare(*pooled)
        if not verdict.passed:
            if _overflows(*pooled):
                return Failure(REFUSED, f"eager: {part}[{k}] overflows in places")
            training = setting.training
            if len(draws) >= MOST and (
                is_chance(program, draws, part, int(k), training=training, later=later, device=device)
                or _as_stepwise(program, draws, part, int(k), training=training, later=later, device=device)
            ):
                continue
            place = f"{part}[{k}]{' at the second sizes' if later else ''}"
            if len(draws) < MOST or not cuts_off(pooled[0], pooled[2]):
                return Failure("wrong", f"{place}: {verdict}")
            if not _is_right_rounded(program, setting, draws, part, int(k), later, device):
                return Failure("wrong", f"{place}: {verdict}")
            excused = excused or Failure(UNITS, f"{place}: {verdict}")
    return excused


def _is_right_rounded(
    program: Program, setting: Setting, draws: Sequence[Draw], part: str, k: int, later: bool, device: str
) -> bool:
    """Whether a tensor is right where products of fp32 are rounded, if matrix units cut them off."""
    if not takes_pieces(device, setting.options):
        return False
    with rounding_units():
        f = _compiled(function(program.source()), program, setting, device, "tilewright")
        again: list[Draw] = []
        for number, draw in enumerate(draws):
            inputs = program.inputs(draw.seed, later=later, device=device)
            mine = ran(f, inputs, training=setting.training, draw=number)
            again.append(Draw(draw.seed, (mine, *draw.outcomes[1:])))
    pooled = [torch.cat([getattr(d.outcomes[i], part)[k].reshape(-1) for d in again]) for i in range(3)]
    return accuracy.compare(*pooled).passed or is_chance(
        program, again, part, k, training=setting.training, later=later, device=device
    )


def _as_stepwise(
    program: Program, draws: Sequence[Draw], part: str, k: int, *, training: bool, later: bool, device: str
) -> bool:
    """Whether a tensor of a program on halves errs no more than steps that round correctly do."""
    if not has_halves(program.source(), program.inputs(draws[0].seed, later=later, device=device)):
        return False
    plain = function(program.source())
    pooled: list[list[Tensor]] = [[], [], []]
    for number, draw in enumerate(draws):
        inputs = program.inputs(draw.seed, later=later, device=device)
        steps = ran_stepwise(plain, inputs, training=training, draw=number)
        for to, outcome in zip(pooled, (draw.outcomes[0], steps, draw.outcomes[2]), strict=True):
            to.append(getattr(outcome, part)[k].reshape(-1))
    return accuracy.compare(*map(torch.cat, pooled)).passed


def _overflows(ours: Tensor, eager: Tensor, exact: Tensor) -> bool:
    """Whether halves leave eager without numbers where there are some, in at least as many places as us, and all that
    differs is which: how far those reach is a matter of where it rounds."""
    if eager.dtype not in (torch.float16, torch.bfloat16):
        return False
    lost = [exact.isfinite() & ~x.isfinite() for x in (ours, eager)]
    kept = ~(lost[0] | lost[1])
    return (
        0 < int(lost[1].sum()) >= int(lost[0].sum())
        and accuracy.compare(ours[kept], eager[kept], exact[kept]).passed
    )
