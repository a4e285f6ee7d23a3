"""Timing on a device: many runs in one CUDA graph, over enough sets of inputs that none is in the L2 cache.

A set comes up again only after `ROTATION` times the L2's size was moved, so every run reads cold data, and
every run pays for writing back as many dirty lines as it makes: what a bandwidth means. (Clearing the cache
with a write before each run would let a kernel that only reads pay for the clearing's own lines, and a
kernel with a small result keep that result in the cache.) `after_flush` times single runs after such a
write nevertheless, for comparison with figures taken that way. Without a GPU, the wall clock is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.measure import Run, Timing, one_line

ROTATION = 4
SETS = (2, 128)
"""Fewest and most sets of inputs."""

CPU_CACHE = 4 << 20
"""What is taken for the last-level cache where the device is no GPU; such a run is a smoke test."""

Tensors = tuple[torch.Tensor, ...]
Call = Callable[..., object]


@dataclass(frozen=True)
class Timed:
    """A contestant's seconds per run, and how its runs were started: `graph`, `stream: why` or `wall`."""

    timing: Timing
    method: str


def cache_bytes(device: torch.device) -> int:
    """Size of the device's L2 cache."""
    if device.type != "cuda":
        return CPU_CACHE
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def sets_needed(moved: int, device: torch.device) -> int:
    """How many sets, of which a run moves `moved` bytes, keep the cache cold."""
    fewest, most = SETS
    return min(most, max(fewest, math.ceil(ROTATION * cache_bytes(device) / max(1, moved))))


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back memory that nothing uses: other processes need it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class CaptureError(RuntimeError):
    """A call that cannot be captured in a CUDA graph; the message says why."""


def capture(run: Run) -> Run:
    """A CUDA graph of one `run()`, as a callable that replays it. The graph owns all memory that it uses.

    The result stays alive through the capture, so that runs within it do not share their outputs, and no
    longer. Raises `CaptureError`; the device stays usable.
    """
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            run()
            torch.cuda.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                kept = run()
            finally:
                graph.capture_end()
            del kept
    except Exception as error:
        torch.cuda.synchronize()
        raise CaptureError(one_line(error)) from error
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def over_sets(call: Call, sets: Sequence[Tensors]) -> Run:
    """One call per set, in order; results are returned, so that none is overwritten by the next."""

    def run() -> object:
        return [call(*inputs) for inputs in sets]

    return run


def time_runs(
    calls: Mapping[str, tuple[Call, Sequence[Tensors]]], device: torch.device, rounds: int
) -> dict[str, Timed]:
    """Time each call over its sets, the contestants in turn, `rounds` samples each.

    A sample is the mean over the sets.
    """
    if device.type != "cuda":
        runs = {name: over_sets(call, sets) for name, (call, sets) in calls.items()}
        samples = _interleaved(runs, rounds, device)
        return {name: _timed(samples[name], len(sets), "wall") for name, (_, sets) in calls.items()}
    runs, methods = {}, {}
    for name, (call, sets) in calls.items():
        run = over_sets(call, sets)
        try:
            runs[name], methods[name] = capture(run), "graph"
        except CaptureError as error:
            runs[name], methods[name] = run, f"stream: {error}"
    samples = events(runs, rounds, lambda: None)
    return {name: _timed(samples[name], len(sets), methods[name]) for name, (_, sets) in calls.items()}


def _timed(samples: Sequence[float], count: int, method: str) -> Timed:
    return Timed(Timing(tuple(s / count for s in samples)), method)


def after_flush(
    calls: Mapping[str, tuple[Call, Tensors]], device: torch.device, rounds: int
) -> dict[str, Timing]:
    """Time single runs, each after a write of four times the cache. Contestants that cannot be captured are
    left out. A sample includes the start of a graph, about a microsecond."""
    if device.type != "cuda":
        return {}
    runs: dict[str, Run] = {}
    for name, (call, inputs) in calls.items():
        try:
            runs[name] = capture(over_sets(call, [inputs]))
        except CaptureError:
            continue
    scratch = torch.empty(ROTATION * cache_bytes(device), dtype=torch.uint8, device=device)
    samples = events(runs, rounds, lambda: scratch.fill_(1))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def events(runs: Mapping[str, Run], rounds: int, before: Run) -> dict[str, list[float]]:
    """Seconds between two events around each run, after `before`; one list per contestant, one untimed round first."""
    names = list(runs)
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        shift = turn % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before()
            first.record()
            kept = runs[name]()
            last.record()
            del kept
            marks[name].append((first, last))
        torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) / 1e3 for a, b in pairs[1:]] for name, pairs in marks.items()}


def _interleaved(runs: Mapping[str, Run], rounds: int, device: torch.device) -> dict[str, list[float]]:
    names = list(runs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        shift = turn % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            synchronize(device)
            start = time.perf_counter()
            runs[name]()
            synchronize(device)
            samples[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in samples.items()}


BLOCK = 2e-3
FEWEST = 3
"""Seconds and least number of calls in one sample of `wall_clock`."""


def wall_clock(runs: Mapping[str, Run], device: torch.device, rounds: int) -> dict[str, Timing]:
    """Seconds per call as a program sees them: blocks of calls one after another, then a synchronisation.

    Contestants in turn, `rounds` samples each.
    """
    blocks: dict[str, Run] = {}
    counts: dict[str, int] = {}
    for name, run in runs.items():
        once = min(_interleaved({name: run}, 3, device)[name])
        counts[name] = max(FEWEST, math.ceil(BLOCK / max(once, 1e-7)))
        blocks[name] = _repeated(run, counts[name])
    samples = _interleaved(blocks, rounds, device)
    return {name: Timing(tuple(s / counts[name] for s in values)) for name, values in samples.items()}


def _repeated(run: Run, count: int) -> Run:
    def block() -> None:
        for _ in range(count):
            run()

    return block


def host_time(runs: Mapping[str, Run], device: torch.device, rounds: int) -> dict[str, Timing]:
    """Seconds that the caller spends in one call while the device is idle before it: the cost of launching."""
    names = list(runs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 3):
        shift = turn % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            runs[name]()
            synchronize(device)
            start = time.perf_counter()
            kept = runs[name]()
            samples[name].append(time.perf_counter() - start)
            synchronize(device)
            del kept
    return {name: Timing(tuple(values[3:])) for name, values in samples.items()}
