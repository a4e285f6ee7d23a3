"""Ways to compute one function, judged and timed beside each other in one process."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from benchmarks.gpu_clock import release, time_runs
from benchmarks.record import Facts
from tilewright import accuracy, measure

Function = Callable[..., Tensor]


def extra_bytes(call: Function, given: list[Tensor], device: torch.device) -> int:
    """The peak of one call above what it was given and gives back."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call(*given)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - result.numel() * result.element_size()


def allocated(device: torch.device) -> int:
    """Bytes that tensors take now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def beside_each_other(
    function: Function, given: list[Tensor], contestants: Mapping[str, Callable[[Function], Function]],
    device: torch.device, rounds: int,
) -> dict[str, Facts]:  # fmt: skip
    """The facts of each contestant, which compiles `function` at its first call: whether it is right by the fp64 rule,
    the memory that a call takes beyond what it is given and gives back, with what its first call left for the next
    ones, and the median of turns in microseconds."""
    exact, plain = accuracy.in_float64(function)(*given), function(*given)
    found: dict[str, Facts] = {}
    runs: dict[str, tuple[Function, list[tuple[Tensor, ...]]]] = {}
    for name, made in contestants.items():
        torch._dynamo.reset()
        try:
            fast, before = made(function), allocated(device)
            judged = accuracy.compare(fast(*given), plain, exact)
            found[name] = {"right": judged.passed, "smallest_k": judged.smallest_k}
            kept = allocated(device) - before
            found[name] |= {"extra_bytes": kept + extra_bytes(fast, given, device)}
            runs[name] = fast, [tuple(given)]
        except Exception as error:  # noqa: BLE001 - a contestant that fails has no figure
            found[name] = {"not_available": measure.one_line(error)}
    del exact, plain
    release(device)
    for name, timed in time_runs(runs, device, rounds).items():
        found[name] |= {"median_us": timed.timing.median * 1e6, "method": timed.method}
    return found


def cells(found: Mapping[str, Facts], digits: int) -> list[str]:
    """A cell of a table for each contestant: microseconds and MiB."""
    return [
        f"{f['median_us']:.{digits}f} us {int(f['extra_bytes']) >> 20} MiB{'' if f['right'] else ' WRONG'}"  # type: ignore[call-overload]
        if "median_us" in f
        else str(f.get("not_available", "not timed"))[:24]
        for f in found.values()
    ]
