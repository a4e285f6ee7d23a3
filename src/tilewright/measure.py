"""Time several runtimes side by side, fairly: the core of `bench`, of the demo and of the benchmarks.

Contestants run in turn (A B C, B C A, ...), each after a pause and one untimed call: the worker threads of
a runtime spin for a while after its call and would slow the next one's, and what one leaves in the caches
would help or hurt the next. Statistics keep every sample; ratios compare samples of the same round, so that
a machine that slows down for a second harms both sides alike.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import math
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

import numpy as np
import torch

from tilewright.tuning.timing_limits import MEASUREMENT

from .errors import TilewrightError
from .peak_memory import PeakMemory

Run = Callable[[], object]
Call = Callable[..., tuple[torch.Tensor, ...]]
Report = Callable[[int, int], None]
Dims = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True)
class Unavailable:
    """A contestant that cannot run, and why, in one line."""

    reason: str

    def __str__(self) -> str:
        return f"not available: {self.reason}"


@dataclass(frozen=True)
class Workload:
    """What the contestants run: a module in eval mode or the path of a model file, and its inputs by
    position.

    `dims` names dynamic dims per input, as for `tilewright.compile`; None leaves the choice to each
    contestant.
    """

    name: str
    target: torch.nn.Module | Path
    inputs: tuple[torch.Tensor, ...]
    dims: Dims | None = None


@dataclass(frozen=True)
class BuiltPeer:
    """What a peer returns: a callable from tensors to a tuple of tensors, and its coverage line."""

    call: Call
    coverage: Callable[[], str] = lambda: ""
    wasted_seconds: float = 0.0
    """Spent on an attempt that failed; not part of the build."""
    earlier_seconds: float = 0.0
    """Spent on the build before this was asked for."""


@dataclass(frozen=True)
class PreparedContestant:
    """A contestant that has run once. Seconds and bytes; `peak_bytes` is None where the system does not tell.

    `build_seconds` is spent before the first call (load, trace, compile), `first_call_seconds` in it. The
    growth of resident memory over both and one more call is `peak_bytes`.
    """

    name: str
    call: Call
    build_seconds: float
    first_call_seconds: float
    peak_bytes: int | None
    coverage: str

    @property
    def ready_seconds(self) -> float:
        """From the model to its first result: the cold start that a user waits for."""
        return self.build_seconds + self.first_call_seconds


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one contestant, one sample per round, in order."""

    samples: tuple[float, ...]

    @property
    def minimum(self) -> float:
        """The fastest sample, in seconds."""
        return min(self.samples)

    @property
    def maximum(self) -> float:
        """The slowest sample, in seconds."""
        return max(self.samples)

    @property
    def mean(self) -> float:
        """Arithmetic mean, in seconds."""
        return statistics.fmean(self.samples)

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.samples)

    @property
    def throughput(self) -> float:
        """Calls per second."""
        return 1.0 / self.mean

    @property
    def variation(self) -> float:
        """Coefficient of variation: standard deviation over mean; 0 for one sample."""
        return statistics.stdev(self.samples) / self.mean if len(self.samples) > 1 else 0.0

    def percentile(self, percent: float) -> float:
        """The smallest sample that at least `percent` % of the samples do not exceed (nearest rank), in
        seconds.
        """
        if not 0 < percent <= 100:
            raise TilewrightError(
                f"percentile {percent} is not in (0, 100]", phase="measure", hint="use 50, 90, 99"
            )
        return sorted(self.samples)[math.ceil(len(self.samples) * percent / 100) - 1]

    def summary(self) -> dict[str, float]:
        """Milliseconds under trtexec's names, `throughput` in calls per second, `cv` as a fraction."""
        times = {
            "min": self.minimum,
            "mean": self.mean,
            "median": self.median,
            "max": self.maximum,
            "p90": self.percentile(90),
            "p95": self.percentile(95),
            "p99": self.percentile(99),
        }
        result = {name: seconds * 1e3 for name, seconds in times.items()}
        return result | {"throughput": self.throughput, "cv": self.variation, "samples": len(self.samples)}


def ratio(first: Timing, second: Timing) -> float:
    """How many times longer `first` takes than `second`: the median over rounds of the two samples' ratio.

    Both come from one call of `measure`; with different counts of samples the ratio of medians is taken.
    """
    if len(first.samples) != len(second.samples):
        return first.median / second.median
    return statistics.median(a / b for a, b in zip(first.samples, second.samples, strict=True))


def geomean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers; NaN if there are none."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


@contextlib.contextmanager
def settings(threads: int) -> Generator[None]:
    """Torch with `threads` threads and without gradients inside the block; restored after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)


class Interrupted(KeyboardInterrupt):
    """Somebody has interrupted the timing; `timings` are those that were taken until then, of equally many rounds."""

    def __init__(self, timings: Mapping[str, Timing]) -> None:
        super().__init__()
        self.timings = timings


def measure(
    contestants: Mapping[str, Run],
    *,
    seconds: float = 2.0,
    rounds: tuple[int, int] = (7, 200),
    pause: float = MEASUREMENT.pause_seconds,
    report: Report = lambda done, most: None,
) -> dict[str, Timing]:
    """Time each contestant in turn and return its samples, in the mapping's order.

    Rounds go on until about `seconds` per contestant are spent, at least `rounds[0]`, at most `rounds[1]`.
    A sample is one call, or the mean of a block of calls if one is shorter than `MEASUREMENT.min_sample_seconds`.
    `report(done, most)` is called after each round. Calls run with the caller's settings: wrap in `settings(threads)`.
    Raises Interrupted with what is known where somebody interrupts it.
    """
    names = list(contestants)
    calls = {name: _calls_per_sample(contestants[name]) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    fewest, most = rounds
    start = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for done in range(most):
            if done >= fewest and time.perf_counter() - start >= seconds * len(names):
                break
            shift = done % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                samples[name].append(_sample(contestants[name], calls[name], pause))
            report(done + 1, most)
    except KeyboardInterrupt as stopped:
        begun = [values for values in samples.values() if values]
        least = min(map(len, begun), default=0)
        raise Interrupted(
            {name: Timing(tuple(values[:least])) for name, values in samples.items() if values}
        ) from stopped
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _calls_per_sample(run: Run) -> int:
    run()
    start = time.perf_counter()
    run()
    once = max(time.perf_counter() - start, 1e-7)
    if once >= MEASUREMENT.min_sample_seconds:
        return 1
    start = time.perf_counter()
    count = math.ceil(MEASUREMENT.min_sample_seconds / once)
    for _ in range(count):
        run()
    return max(1, math.ceil(MEASUREMENT.min_sample_seconds * count / (time.perf_counter() - start)))


def silence(pause: float = MEASUREMENT.pause_seconds) -> None:
    """Wait `pause` seconds, and longer until no thread of this process runs any more, or is about to: some runtimes let
    theirs spin for 50 ms after a call, on the cores that the next one wants."""
    start = time.perf_counter()
    time.sleep(pause)
    while time.perf_counter() < start + MEASUREMENT.max_pause_seconds:
        used, since = time.process_time(), time.perf_counter()
        time.sleep(pause / 3)
        if (
            time.process_time() - used <= MEASUREMENT.max_quiet_core_ratio * (time.perf_counter() - since)
            and not _others_are_ready()
        ):
            break


def _others_are_ready() -> bool:
    """Whether another thread of this process wants a core, though it may not have one; False where no one says."""
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            state = task.read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended
            continue
        if state == "R" and task.parent.name != own:
            return True
    return False


def _sample(run: Run, calls: int, pause: float) -> float:
    if pause > 0:
        silence(pause)
    run()
    if calls == 1:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    turns = range(calls)
    start = time.perf_counter()
    for _ in turns:
        run()
    return (time.perf_counter() - start) / calls


def lower_bound(
    *, moved: float = 0.0, bandwidth: float = math.inf, flops: float = 0.0, peak: float = math.inf
) -> float:
    """Seconds that no kernel can beat: the larger of moved bytes / (bytes/s) and flops / (flops/s)."""
    return max(moved / bandwidth, flops / peak)


def is_possible(seconds: float, bound: float) -> bool:
    """Whether a timing is at most `MEASUREMENT.bound_slack_ratio` below its lower bound. One that is not measured
    something else."""
    return seconds >= bound * (1 - MEASUREMENT.bound_slack_ratio)


def require_possible(name: str, timing: Timing, bound: float) -> Timing:
    """Return `timing`; raise `TilewrightError` if its fastest sample lies below `bound` seconds by more than
    `MEASUREMENT.bound_slack_ratio`.
    """
    if is_possible(timing.minimum, bound):
        return timing
    raise TilewrightError(
        f"{name} took {timing.minimum * 1e6:.1f} us, but no run can take less than {bound * 1e6:.1f} us",
        phase="measure",
        hint="the result was not computed, or the bandwidth given is not this machine's",
    )


Peer = Callable[[Workload, int], BuiltPeer | Unavailable]
"""Builds one contestant for a workload with a number of threads. May raise: `prepare` turns that into a
reason.
"""


def eager(workload: Workload, threads: int) -> BuiltPeer | Unavailable:
    """Torch as it is. A model file is run as the torch module that our importer makes of it."""
    del threads
    module = torch_module(workload.target)
    return BuiltPeer(lambda *inputs: flatten(module(*inputs)))


def inductor(workload: Workload, threads: int) -> BuiltPeer | Unavailable:
    """`torch.compile` with its default backend; weights frozen, or not where only that fails (the coverage
    says so).
    """
    from torch._inductor import config

    del threads
    module = torch_module(workload.target)
    # Freezing is process-wide state that other backends would see too; only the compiling call may see it.
    start = time.perf_counter()
    try:
        with config.patch(freezing=True):
            return _compile_with_inductor(module, workload, False, "weights frozen", 0.0)
    except Exception as error:  # noqa: BLE001 - its freezing pass fails on some models that it compiles without
        note = f"weights not frozen ({one_line(error)})"
        # Options of its own, or the code that Dynamo keeps for the failed attempt would be taken.
        wasted = time.perf_counter() - start
        return _compile_with_inductor(module, workload, True, note, wasted)


def _compile_with_inductor(
    module: torch.nn.Module, workload: Workload, again: bool, note: str, wasted: float
) -> BuiltPeer:
    dynamic = True if workload.dims else None
    compiled = torch.compile(module, dynamic=dynamic, options={"freezing": False} if again else None)
    compiled(*workload.inputs)
    return BuiltPeer(lambda *inputs: flatten(compiled(*inputs)), lambda: note, wasted)


def onnxruntime(workload: Workload, threads: int) -> BuiltPeer | Unavailable:
    """ONNX Runtime on the CPU with the same number of threads; a module is exported first."""
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return Unavailable("onnxruntime is not installed")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    with _model_file(workload) as path:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        feeds = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        return flatten(session.run(None, feeds))

    return BuiltPeer(call)


def tilewright(workload: Workload, threads: int) -> BuiltPeer | Unavailable:
    """Our compiler through `tilewright.compile`, weights frozen."""
    del threads
    compile_ = importlib.import_module("tilewright").compile
    target = str(workload.target) if isinstance(workload.target, Path) else workload.target
    compiled = compile_(target, workload.inputs, dims=workload.dims, freeze=True)
    return BuiltPeer(lambda *inputs: flatten(compiled(*inputs)), lambda: str(compiled.coverage))


PEERS: Mapping[str, Peer] = MappingProxyType(
    {"eager": eager, "inductor": inductor, "onnxruntime": onnxruntime, "tilewright": tilewright}
)


def torch_module(target: torch.nn.Module | Path) -> torch.nn.Module:
    """The module itself in eval mode, or the one that the importer makes of a model file."""
    if isinstance(target, torch.nn.Module):
        return target.eval()
    return importlib.import_module("tilewright.capture.onnx").load(target).eval()


@contextlib.contextmanager
def _model_file(workload: Workload) -> Generator[Path]:
    if isinstance(workload.target, Path):
        yield workload.target
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        # A copy: modules that ask whether they are traced keep what they found out, and later contestants would
        # see it. The exporter is the one that needs no further package; it warns about itself, on stderr too, and
        # prints the graph that it fails on.
        module = copy.deepcopy(workload.target)
        with open(os.devnull, "w") as sink, _printing_to(sink), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(module, workload.inputs, str(path), dynamo=False)
        yield path


@contextlib.contextmanager
def _printing_to(sink: TextIO) -> Generator[None]:
    """What is printed inside goes there: by Python on both streams, by native code on the first."""
    sys.stdout.flush()
    before = os.dup(1)
    try:
        os.dup2(sink.fileno(), 1)
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield
    finally:
        os.dup2(before, 1)
        os.close(before)


def flatten(result: object) -> tuple[torch.Tensor, ...]:
    """All tensors of a result (tensor, array, sequence or mapping, nested) in order; None entries are left
    out.
    """
    if isinstance(result, torch.Tensor):
        return (result,)
    if isinstance(result, np.ndarray):
        return (torch.from_numpy(result),)
    if isinstance(result, Mapping):
        return flatten(tuple(result.values()))
    if isinstance(result, (tuple, list)):
        return tuple(tensor for item in result if item is not None for tensor in flatten(item))
    raise TilewrightError(f"a result holds a {type(result).__name__}", phase="measure", hint="return tensors")


def prepare(
    name: str, workload: Workload, threads: int, peer: Peer | None = None
) -> PreparedContestant | Unavailable:
    """Build the contestant `name` (or `peer`), run it once, and say what that cost; its failure becomes a
    reason.
    """
    build = PEERS[name] if peer is None else peer
    try:
        with settings(threads), PeakMemory() as memory:
            start = time.perf_counter()
            built = build(workload, threads)
            middle = time.perf_counter()
            if isinstance(built, Unavailable):
                return built
            built.call(*workload.inputs)
            end = time.perf_counter()
            built.call(*workload.inputs)
    except Exception as error:  # noqa: BLE001 - whatever a peer raises, it must not stop the others
        return Unavailable(one_line(error))
    building = middle - start - built.wasted_seconds + built.earlier_seconds
    return PreparedContestant(name, built.call, building, end - middle, memory.bytes, built.coverage())


def one_line(error: BaseException, width: int = 120) -> str:
    """Type and first telling line of an error, at most `width` characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = next((line for line in lines if not line.endswith(":")), "")
    text = f"{type(error).__name__}: {telling}" if telling else type(error).__name__
    return text if len(text) <= width else text[: width - 3] + "..."


def compare(
    prepared: Mapping[str, PreparedContestant],
    workload: Workload,
    threads: int,
    *,
    seconds: float = 2.0,
    report: Report = lambda done, most: None,
) -> dict[str, Timing]:
    """Time prepared contestants on the workload's inputs, about `seconds` each; see `measure`."""
    runs = {name: _bind(item.call, workload.inputs) for name, item in prepared.items()}
    with settings(threads):
        return measure(runs, seconds=seconds, report=report)


def _bind(call: Call, inputs: tuple[torch.Tensor, ...]) -> Run:
    return lambda: call(*inputs)
