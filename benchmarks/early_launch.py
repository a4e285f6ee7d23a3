"""`python -m benchmarks.early_launch`: kernels that begin before the kernel in front has ended, on a device.

1. What the launcher does: kernels that are told to wait but do not, behind one that releases them and then sleeps,
   read old memory where they are launched early. So it is seen where the attribute has its effect: in streams, in
   graphs that are captured, in bundles, and in bundles whose nodes were set. Kernels that wait read none anywhere.
2. Programs, `own` and `any` against `none`, bit by bit: in streams, in CUDA graphs of ours, in a caller's, with NaNs in
   all their memory before each call or replay, and in two graphs at once.
3. The border of kernels of 132 blocks, in microseconds.
4. Networks at batch 1, each compiled once, as graphs and in streams.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright
from benchmarks import early_launch_kernels as hand
from benchmarks import record
from benchmarks.early_launch_switch import MODES, Switch
from benchmarks.gpu_models import NETWORKS, load
from benchmarks.record import Facts, Json
from tilewright.plan.data import CallStep, Launches, Plan
from tilewright.report.records import result_of

REPLAYS = 1000
CALLS = 300
SPARE = 14.0
"""Seconds for what is timed when all is compiled."""
ROUNDS, BACK_TO_BACK = 9, 60

Program = Callable[..., Tensor]


def chain(x: Tensor) -> Tensor:
    """Softmaxes over columns and rows in turn: each needs all of the one in front, and memory is used again."""
    for step in range(6):
        x = torch.softmax(x * 3, step % 2)
    return x


def mixed(x: Tensor, w: Tensor) -> Tensor:
    """Kernels between products of the library."""
    for step in range(3):
        x = torch.softmax(F.gelu(x @ w), step % 2)
        x = F.layer_norm(x, (x.shape[-1],)).cumsum(0)
    return x


def brief(x: Tensor) -> Tensor:
    """Kernels that move little, and release the next one before they wait, in rows and between others."""
    for step in range(4):
        row = torch.softmax(torch.softmax(x.amax(step % 2) * 3, 0).cumsum(0), 0)
        x = torch.softmax(x + row[None] + row.flip(0)[:, None], step % 2)
    return x


def kept(x: Tensor, state: Tensor) -> Tensor:
    """A state that is changed where it lies, read before and behind."""
    before = torch.softmax(state, 0)
    state.copy_(torch.softmax(x, 0) + before)
    return torch.softmax(state * before, 1).cumsum(0)


def programs() -> Mapping[str, tuple[Program, list[Tensor], list[Tensor]]]:
    """Each with three first arguments, and the rest of them."""
    torch.manual_seed(0)
    many = [torch.randn(512, 512, device="cuda") for _ in range(3)]
    half = [torch.randn(256, 256, device="cuda", dtype=torch.float16) for _ in range(4)]
    return {
        "chain": (chain, many, []),
        "mixed": (mixed, half[:3], [half[3] / 16]),
        "brief": (brief, many, []),
        "brief alone": (brief, [x[:64, :64].contiguous() for x in many], []),
        "kept": (kept, many, [torch.zeros(512, 512, device="cuda")]),
    }


def bits(t: Tensor) -> Tensor:
    """What can be compared where there are NaNs."""
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


class Differences:
    """Counts results that differ, without waiting for the device."""

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device="cuda")

    def see(self, got: Tensor, want: Tensor) -> None:
        self.count += (bits(got) != bits(want)).any()

    @property
    def number(self) -> int:
        torch.cuda.synchronize()
        return int(self.count)


def compiled(name: str, mode: str, graphs: bool) -> Callable[..., Tensor]:
    """A program, compiled anew; nothing is timed, so that all modes have the same kernels."""
    function, xs, rest = programs()[name]
    options = {"early_launch": mode, "cuda_graphs": graphs, "tune_seconds": 0, "measure": False}
    return tilewright.compile(function, (xs[0], *[r.clone() for r in rest]), options=options)  # type: ignore[return-value, arg-type]


def called(
    run: Callable[..., Tensor], name: str, calls: int, memory: Sequence[tuple[int, int]] = ()
) -> list[Tensor]:
    """The results of calls with other numbers at other places each time, one behind the other, and NaNs in `memory`
    before each."""
    _, xs, rest = programs()[name]
    rest, found = [r.clone() for r in rest], list[Tensor]()
    for k in range(calls):
        hand.fill(memory, torch.cuda.current_stream().cuda_stream)
        found.append(run(xs[k % 3], *rest))
    return found


def differing_calls(run: Callable[..., Tensor], name: str, want: Sequence[Tensor]) -> int:
    """How many of many calls differ from what they must give; half of them with NaNs in what they use again."""
    found = Differences()
    for turn in range(CALLS // len(want)):
        memory = hand.memory_kept() if turn % 2 else []
        for got, right in zip(called(run, name, len(want), memory), want, strict=True):
            found.see(got, right)
    return found.number


class Captured:
    """A call in a graph of the caller's."""

    def __init__(self, run: Callable[..., Tensor], name: str) -> None:
        _, self.xs, rest = programs()[name]
        self.rest = [r.clone() for r in rest]
        self.first = [r.clone() for r in rest]
        self.x = self.xs[0].clone()
        self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            run(self.x, *self.rest)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.out = run(self.x, *self.rest)
        torch.cuda.synchronize()
        self.memory = hand.memory_of(self.graph.pool())
        self.found = Differences()

    def start_over(self) -> None:
        """With the state of the first call."""
        for r, first in zip(self.rest, self.first, strict=True):
            r.copy_(first)

    def replay(self, k: int, want: Tensor) -> None:
        """Replay call number `k` with NaNs in all that it makes, and look at its result."""
        with torch.cuda.stream(self.stream):
            self.x.copy_(self.xs[k % 3])
            hand.fill(self.memory, self.stream.cuda_stream)
            self.graph.replay()
            self.found.see(self.out, want)


def replayed(run: Callable[..., Tensor], name: str, want: Sequence[Tensor], count: int) -> int:
    """How many replays of so many graphs at once differ from what they must give."""
    graphs = [Captured(run, name) for _ in range(count)]
    for k in range(REPLAYS):
        for g in graphs:
            if k % len(want) == 0:
                with torch.cuda.stream(g.stream):
                    g.start_over()
            g.replay(k % len(want), want[k % len(want)])
    return sum(g.found.number for g in graphs)


def check_programs(until: float) -> Facts:
    """Differences of each program and mode, by the way that it runs: all must be 0. Some may be left out for lack of
    time."""
    facts: dict[str, Json] = {}
    want = {name: called(compiled(name, "none", False), name, 6) for name in programs()}
    for mode, name in ((mode, name) for mode in reversed(MODES[1:]) for name in programs()):
        if time.monotonic() > until:
            break
        run = compiled(name, mode, False)
        facts[f"{name} {mode}"] = {
            "calls": differing_calls(run, name, want[name]),
            "a graph": replayed(run, name, want[name], 1),
            "two graphs": replayed(run, name, want[name], 2),
            "own graphs": differing_calls(compiled(name, mode, True), name, want[name]),
        }
    return facts


def replay_us(graph: torch.cuda.CUDAGraph, times: int = BACK_TO_BACK) -> float:
    """Microseconds of a replay among others."""
    return stream_us(graph.replay, times)


def stream_us(run: Callable[[], object], times: int = BACK_TO_BACK) -> float:
    """Microseconds of a run among others."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times * 1e3


def network(name: str) -> None:
    """Compile a network, say so, and time it when it is told to."""
    device, half, facts = torch.device("cuda"), torch.float16, dict[str, Json]()
    with torch.no_grad(), Switch() as switch:
        loaded = load(NETWORKS[name], device, half)
        model, x = loaded.model, NETWORKS[name].inputs(1, device, half)
        if NETWORKS[name].convolutional:
            x = x.to(memory_format=torch.channels_last)
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        fast = torch.compile(
            model, backend=tilewright.backend, dynamic=False, options={"early_launch": "any"}
        )
        fast(x)  # before modes are set, as only kernels that are there know of them
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        results: dict[str, Tensor] = {}
        for mode in MODES:
            switch.set(mode)
            for _ in range(4):
                fast(x)
            torch.cuda.synchronize()
            graphs[mode] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[mode], capture_error_mode="thread_local"):
                results[mode] = fast(x)
            graphs[mode].replay()
        torch.cuda.synchronize()
        facts["steps"] = steps()
        facts["early kernels"] = switch.early_kernels
        print("ready", flush=True)
        sys.stdin.readline()
        found = {mode: (list[float](), list[float]()) for mode in MODES}
        for _ in range(ROUNDS):
            for mode in MODES:
                found[mode][0].append(replay_us(graphs[mode]))
        for mode in MODES:
            switch.set(mode)
            for _ in range(4):
                fast(x)
            found[mode][1].extend(stream_us(lambda: fast(x)) for _ in range(5))
        facts["graph us"] = {mode: round(statistics.median(g), 2) for mode, (g, _) in found.items()}
        facts["stream us"] = {mode: round(statistics.median(s), 2) for mode, (_, s) in found.items()}
        facts["differences"] = differences(graphs, results)
    print(json.dumps(facts), flush=True)


def differences(graphs: Mapping[str, torch.cuda.CUDAGraph], results: Mapping[str, Tensor]) -> Facts:
    """How many of many replays differ from those in stream order, with NaNs in all memory before each."""
    graphs["none"].replay()
    want = results["none"].clone()
    found: dict[str, Json] = {}
    for mode, graph in graphs.items():
        memory, seen = hand.memory_of(graph.pool()), Differences()
        for _ in range(CALLS):
            hand.fill(memory, torch.cuda.current_stream().cuda_stream)
            graph.replay()
            seen.see(results[mode], want)
        found[mode] = seen.number
    return found


def steps() -> Facts:
    """Kernels, borders between neighbours that are both ours, and library calls of what was compiled last."""
    plan = result_of(tilewright.compilations()[-1], "plan")  # type: ignore[arg-type]
    assert isinstance(plan, Plan)
    every = [s for segment in plan.segments for s in segment.steps]
    runs = [len(s.together()) for s in every if isinstance(s, Launches)]
    calls = sum(isinstance(s, CallStep) for s in every)
    return {"kernels": sum(runs), "borders": sum(runs) - len(runs), "runs": len(runs), "calls": calls}


def start(name: str) -> subprocess.Popen[str]:
    """A process that compiles a network."""
    command = [sys.executable, "-m", "benchmarks.early_launch", "--network", name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def is_ready(child: subprocess.Popen[str], until: float) -> bool:
    """Whether it has compiled its network in time."""
    assert child.stdout is not None
    there, _, _ = select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))
    return bool(there) and child.stdout.readline() == "ready\n"


def told(child: subprocess.Popen[str], until: float) -> Facts:
    """The figures of a network whose process is ready, or what it says instead."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write("go\n")
        child.stdin.flush()
        lines = child.communicate(timeout=max(1.0, until - time.monotonic()))[0].splitlines()
        found: Facts = json.loads(lines[-1])
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        child.kill()
        return {"failed": str(error)[:200]}
    return found


def main() -> None:
    """Run the parts that were asked for, the networks last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--network", help="time one network (a child of this program)")
    parser.add_argument("--parts", default="launcher,programs,borders,networks")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--seconds", type=float, default=58.0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.network:
        network(arguments.network)
        return
    until, parts = time.monotonic() + arguments.seconds, arguments.parts.split(",")
    children = {name: start(name) for name in NETWORKS} if "networks" in parts else {}
    spare = SPARE if children else 0.0
    facts: dict[str, Json] = {
        **record.provenance(1),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }

    def note(name: str, found: Json) -> None:
        facts[name] = found
        print(f"{time.monotonic() - until + arguments.seconds:5.1f} s", name, json.dumps(found), flush=True)
        if arguments.json:
            record.write_json(arguments.json, facts)

    bench = hand.Bench()
    note("driver", bench.facts())
    if "launcher" in parts:
        note("old memory read", bench.old_memory_read())
    if "programs" in parts:
        note("programs", check_programs(until - spare - 4))
    for child in children.values():
        is_ready(child, until - spare)
    if "borders" in parts:
        note("border us", bench.borders())
    for name, child in children.items():
        note(name, told(child, until))


if __name__ == "__main__":
    main()
