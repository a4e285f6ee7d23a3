"""`python -m benchmarks.launches --json FILE`: every launch of the networks in half precision, with its time and class.

Each network and batch size has a process of its own: it is compiled by ours and by Inductor, captured into a CUDA graph
and replayed under torch's profiler. Of each launch: name, class, microseconds of the device. Beside their sum, what a
replay takes, back to back: the difference is spent between launches.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

import tilewright
from benchmarks import gpu_report, gpu_turns, record
from benchmarks.gpu_clock import capture, release
from benchmarks.gpu_models import NETWORKS, load
from benchmarks.gpu_turns import BUILDING, DONE, TIMING, Limits, Turns
from benchmarks.record import Facts

PEERS = ("tilewright", "inductor")
REPLAYS = 3
BACK_TO_BACK = 50
CLASSES = (
    ("cudnn", ("cudnn", "xmma", "fprop", "conv2d", "cutlass__5x")),
    ("cublas", ("nvjet", "gemm", "cublas", "splitKreduce")),
    ("copy", ("Memcpy", "Memset", "copy_kernel")),
    ("torch", ("at::native",)),
    ("inductor", ("triton_",)),
)
"""Words in the names of launches that tell whose they are; ours are k and a number."""


def class_of(name: str) -> str:
    """Whose kernel a launch is."""
    if name[:1] == "k" and name[1:].isdecimal():
        return "tilewright"
    return next((kind for kind, words in CLASSES if any(w in name for w in words)), "other")


def launches(run: Callable[[], object]) -> list[Facts]:
    """The launches of one replay, in order."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            run()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    count = len(events) // REPLAYS
    return [
        {"name": e.name[:120], "class": class_of(e.name), "us": round(e.time_range.elapsed_us(), 2)}
        for e in events[count : 2 * count]
    ]


def back_to_back(run: Callable[[], object]) -> float:
    """Microseconds of a replay among others."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(BACK_TO_BACK):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / BACK_TO_BACK * 1e3


def measured(peer: str, model: torch.nn.Module, x: torch.Tensor, frozen: bool) -> Facts:
    """The launches of a compiled model in a CUDA graph."""
    torch._dynamo.reset()
    if peer == "tilewright":
        fast = torch.compile(model, backend=tilewright.backend, dynamic=False, options={"freeze": frozen})
    else:
        fast = torch.compile(model, dynamic=False)
    run = capture(lambda: fast(x))
    found = launches(run)
    counted = Counter(str(launch["class"]) for launch in found)
    return {
        "launches": found,
        "count": len(found),
        "classes": dict(counted),
        "sum_us": round(sum(float(str(launch["us"])) for launch in found), 1),
        "replay_us": round(back_to_back(run), 1),
    }


def child(item: str, arguments: argparse.Namespace) -> None:
    """Build and profile one network at one batch size, and write its facts."""
    device, turns = torch.device(arguments.device), Turns(arguments.turns)
    name, _, batch = item.rpartition(" ")
    facts: Facts = {"network": name, "batch": int(batch)}

    def write(**news: record.Json) -> None:
        facts.update(news)
        if arguments.child_json is not None:
            record.write_json(arguments.child_json, facts)

    with torch.no_grad(), turns.building():
        write(phase=BUILDING)
        start = time.perf_counter()
        network = NETWORKS[name]
        loaded = load(network, device, torch.float16)
        x = network.inputs(int(batch), device, torch.float16)
        model = loaded.model
        if network.convolutional:
            x = x.to(memory_format=torch.channels_last)
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for peer in arguments.peers:  # what is built now is recalled
            torch._dynamo.reset()
            made = measured(peer, model, x, arguments.frozen)
            write(**{peer: made})
        write(phase=TIMING, source=loaded.source, build_s=time.perf_counter() - start)
    with torch.no_grad(), turns.timing():
        for peer in arguments.peers:
            write(**{peer: measured(peer, model, x, arguments.frozen)})
        release(device)
    write(phase=DONE)


def summary(found: Mapping[str, Facts]) -> str:
    """One line for each network, batch and contestant."""
    lines: list[list[str]] = []
    for item, facts in found.items():
        for peer in PEERS:
            made = facts.get(peer)
            if isinstance(made, Mapping):
                classes = ", ".join(f"{n} {kind}" for kind, n in made["classes"].items())  # type: ignore[union-attr]
                lines.append(
                    [
                        f"{item} {peer}",
                        str(made["count"]),
                        str(made["sum_us"]),
                        str(made["replay_us"]),
                        classes,
                    ]
                )
    return gpu_report.text_table(
        "launches in fp16", ["network, batch", "launches", "sum us", "replay us", "whose"], lines
    )


def options(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = gpu_report.parser(__doc__)
    gpu_report.child_options(parser)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 64])
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS))
    parser.add_argument("--frozen", action="store_true", help="ours treats weights as constants")
    made = parser.parse_args(given)
    for name in made.only:
        if name not in NETWORKS:
            parser.error(f"no {name!r}; there are: {', '.join(NETWORKS)}")
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Run, print the table, write the JSON."""
    warnings.filterwarnings("ignore")
    arguments = options(given)
    device = torch.device(arguments.device)
    reason = gpu_report.unusable(device) if device.type == "cuda" else "launches are those of a GPU"
    if reason:
        print(reason, file=sys.stderr)
        return 2
    if arguments.child:
        child(arguments.child, arguments)
        return 0
    head = gpu_report.provenance(device, arguments.commit)

    def report(found: Mapping[str, Facts]) -> None:
        if arguments.json is not None:
            record.write_json(arguments.json, head | {"networks": found})

    limits = Limits(arguments.build or 0.6 * arguments.budget, arguments.budget, arguments.gpus)
    passed = [f"--device={arguments.device}", f"--peers={','.join(arguments.peers)}"]
    passed += ["--frozen"] if arguments.frozen else []
    names = [f"{name} {batch}" for batch in arguments.batches for name in arguments.only or NETWORKS]
    found = gpu_turns.run("benchmarks.launches", names, passed, limits, arguments.jobs or 8, report)
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
