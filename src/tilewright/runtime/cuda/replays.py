"""Times what runs on a GPU by replaying captured graphs of it, so that no launch is waited for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

from tilewright.tuning.timing_limits import REPLAYS

_TIMING = threading.Lock()


@functools.cache
def timing_stream(device: int) -> torch.cuda.Stream:
    """The one on which everything is timed. cuBLAS keeps a workspace, of 32 MiB on Hopper, for each stream that it was
    ever called on: with streams of their own, timings would leave as many of them behind."""
    return torch.cuda.Stream(device)


def replayed_seconds(run: Callable[[], object]) -> float:
    """Device time of one run on the current device: the least of several replays of a graph of some runs. One at a
    time, so that none is timed beside another."""
    with _TIMING:
        return _replayed_seconds(run, timing_stream(torch.cuda.current_device()))


def _replayed_seconds(run: Callable[[], object], stream: torch.cuda.Stream) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        # Other threads go on meanwhile; `torch.cuda.graph` would collect garbage and give back memory first.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(REPLAYS.runs):
                run()
        finally:
            graph.capture_end()
        times: list[float] = []
        for _ in range(REPLAYS.replays):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            graph.replay()
            after.record(stream)
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
    return min(times) / REPLAYS.runs
