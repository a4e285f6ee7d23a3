"""The contestants of the kernel benchmark, what they compile, and whether their results are right."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import FunctionType

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.gpu_cases import Case, Tensors
from benchmarks.record import Facts
from tilewright import accuracy, measure

Call = Callable[..., object]

EAGER, FUSED = "eager", "fused"
INDUCTOR, INDUCTOR_DYNAMIC = "inductor", "inductor dynamic"
OURS, OURS_DYNAMIC = "tilewright", "tilewright dynamic"
STATIC = (EAGER, FUSED, INDUCTOR, OURS)
DYNAMIC = (INDUCTOR_DYNAMIC, OURS_DYNAMIC)
NAMES = (*STATIC, *DYNAMIC)

SAMPLE = 1 << 18
"""Elements of a result that are judged by the fp64 rule; larger results by a sample with both ends, and as
a whole by their worst error."""


class MissingError(RuntimeError):
    """This contestant has nothing for the case; the message says why."""


def build(name: str, case: Case) -> Call:
    """The contestant as a function of the case's inputs; compiles at its first call. Raises `MissingError`."""
    if name == EAGER:
        return case.composed
    if name == FUSED:
        if case.fused is None:
            raise MissingError("torch has no fused op")
        return case.fused
    # Else torch takes two sizes that are equal at the first call for one, and traces anew when they differ.
    torch.fx.experimental._config.use_duck_shape = False
    # And a global number for an input, a tensor on the host that every call brings over; a module's is a constant.
    torch._dynamo.config.specialize_float = True
    backend: object = "inductor"
    if name in (OURS, OURS_DYNAMIC):
        backend = importlib.import_module("tilewright").backend
    return torch.compile(fresh(case.composed), backend=backend, dynamic=name in DYNAMIC, fullgraph=True)  # type: ignore[arg-type]


def fresh(function: Callable[..., object]) -> Callable[..., object]:
    """The same function with code of its own: Dynamo keeps what it compiled by code object."""
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


# --- what was compiled -----------------------------------------------------------


@dataclass(frozen=True)
class Compilations:
    """Counters of this process: graphs that Dynamo captured, our units (built or found in our cache), our
    graphs, our graphs that run as captured, and calls of Triton's compiler in this process."""

    captured: int
    units: int
    graphs: int
    fallbacks: int
    triton: int

    def since(self, before: Compilations) -> Compilations:
        """What was added after `before`."""
        return Compilations(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    def plus(self, other: Compilations) -> Compilations:
        """The sum."""
        return Compilations(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


_triton_calls = 0


def watch_triton() -> bool:
    """Count calls of Triton's compiler from now on; false where there is no Triton or no such hook."""
    try:
        compilation = importlib.import_module("triton").knobs.compilation
    except (ImportError, AttributeError):
        return False

    def listener(**facts: object) -> None:
        global _triton_calls
        _triton_calls += 1

    compilation.listener = listener
    return True


def compilations() -> Compilations:
    """The counters now."""
    graphs = units = fallbacks = 0
    try:
        stats = importlib.import_module("tilewright").stats()
        graphs, fallbacks = stats.graphs, stats.fallbacks
        units = stats.units + stats.triton + stats.cache_hits
    except ImportError:  # without our compiler the peers are still counted
        graphs = units = fallbacks = 0
    return Compilations(counters["stats"]["unique_graphs"], units, graphs, fallbacks, _triton_calls)


# --- whether results are right ---------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """One call: its results or the reason why there are none, and what was compiled in it."""

    result: Tensors | str
    compiled: Compilations


def attempt(call: Call, inputs: Tensors, like: Tensors = ()) -> Attempt:
    """Call once and wait. Memory that the allocator hands out next, for results `like` these, is first filled
    with NaN (ones for integers), so that what a kernel does not write is seen."""
    for tensor in like:
        torch.full_like(tensor, math.nan if tensor.dtype.is_floating_point else 1)
    before = compilations()
    result: Tensors | str
    try:
        result = measure.flatten(call(*inputs))
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - one contestant's failure must not stop the others
        result = measure.one_line(error)
    return Attempt(result, compilations().since(before))


def judge(made: Mapping[str, Tensors], case: Case, inputs: Tensors) -> dict[str, Facts]:
    """The fp64 rule for each contestant's results, with eager's as the yardstick."""
    exact = measure.flatten(accuracy.in_float64(case.composed)(*inputs))
    return {name: verdict(mine, made[EAGER], exact) for name, mine in made.items()}


def verdict(mine: Tensors, eager: Tensors, exact: Tensors) -> Facts:
    """What is recorded of the accuracy of one contestant's results."""
    if len(mine) != len(eager):
        return {"passed": False, "reason": f"{len(mine)} results, eager {len(eager)}"}
    picked = [_sample(t) for t in eager]
    judged = accuracy.compare_trees(
        *(tuple(pick(t) for pick, t in zip(picked, ts, strict=True)) for ts in (mine, eager, exact))
    )
    facts: Facts = {"passed": judged.passed, "smallest_k": finite(judged.smallest_k)}
    facts["of_eager"] = finite(judged.relative_k)
    if not judged.passed:
        return facts | {"reason": next(str(v) for _, v in judged.leaves if not v.passed)}
    for y, e, r in zip(mine, eager, exact, strict=True):
        if y.numel() > SAMPLE and (wrong := _whole(y, e, r)):
            return facts | {"passed": False, "reason": wrong}
    return facts


def finite(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)


def _sample(like: Tensor) -> Callable[[Tensor], Tensor]:
    """Takes the same elements of every tensor of that shape: a quarter from each end, the rest at random."""
    count = like.numel()
    if count <= SAMPLE:
        return lambda t: t
    quarter = SAMPLE // 4
    ends = torch.arange(quarter, device=like.device)
    random = torch.randint(0, count, (SAMPLE - 2 * quarter,), device=like.device)
    index = torch.cat((ends, count - 1 - ends, random))
    # A result of another shape or type stays whole: the rule names the difference.
    return lambda t: t.reshape(-1)[index] if t.shape == like.shape else t


def _whole(y: Tensor, e: Tensor, r: Tensor) -> str:
    """Why the whole result is wrong; empty if it is not. Errors against eager's worst, as the rule has it."""
    if not e.dtype.is_floating_point:
        count = int(((y != e) & (y != r)).sum())
        return f"{count} integers differ from eager's" if count else ""
    if bool((y.isfinite() != e.isfinite()).any()):
        return "NaN or infinity stands where eager has none, or is missing"
    ours, eager = _worst(y, r), _worst(e, r)
    k, unit = accuracy.default_k(e.dtype), torch.finfo(e.dtype).eps / 2
    room = k * (eager + unit * float(r.abs().max()))
    return "" if ours <= room else f"worst error {ours:.3g}, eager's {eager:.3g}"


def _worst(y: Tensor, r: Tensor) -> float:
    return float((y.double() - r).abs().nan_to_num(0.0, 0.0, 0.0).max())
