"""`python -m benchmarks.chains --json FILE`: chains around products, attention and convolutions beside Inductor.

Each chain has a process of its own. Contestants are eager, Inductor with its defaults and with max-autotune, and ours,
all captured into CUDA graphs by this program, replayed in turns; chains of images run in both memory formats. A graph
runs a chain over several inputs, which share its start; so many that large ones are in no cache when their turn comes.
A result that breaks the fp64 rule does not count. The speed is the best peer's time over ours, in each format.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

import tilewright
from benchmarks import gpu_report, gpu_turns, record
from benchmarks.chain_cases import CHAINS, Net
from benchmarks.gpu_clock import release, sets_needed, time_runs
from benchmarks.gpu_report import Figure, figure
from benchmarks.gpu_turns import BUILDING, DONE, TIMING, Limits, Turns
from benchmarks.record import Facts
from tilewright import accuracy, measure

EAGER, INDUCTOR, AUTOTUNE, OURS = "eager", "inductor", "inductor max-autotune", "tilewright"
PEERS = (EAGER, INDUCTOR, AUTOTUNE, OURS)
JOBS = 8
FEWEST_SETS, MOST_SETS = 8, 32
"""Inputs of a graph: of small ones the weights are what moves, and these stay in the cache."""


def compiled(peer: str, net: Net) -> Callable[[Tensor], Tensor]:
    """A contestant as a function of the input; it compiles at its first call."""
    own = copy.deepcopy(net)
    if peer == EAGER:
        return own
    if peer == OURS:
        return torch.compile(own, backend=tilewright.backend, dynamic=False)  # type: ignore[return-value]
    mode = "max-autotune-no-cudagraphs" if peer == AUTOTUNE else None
    return torch.compile(own, mode=mode, dynamic=False)  # type: ignore[return-value]


def formats(net: Net, x: Tensor, images: bool) -> dict[str, tuple[Net, Tensor]]:
    """The net and its input in each memory format."""
    if not images:
        return {"": (net, x)}
    last = torch.channels_last
    return {
        "nchw": (net, x),
        "nhwc": (copy.deepcopy(net).to(memory_format=last), x.to(memory_format=last)),  # type: ignore[call-overload]
    }


def child(name: str, arguments: argparse.Namespace) -> None:
    """Build, check and time one chain, and write its facts."""
    device, turns, facts = torch.device(arguments.device), Turns(arguments.turns), Facts()

    def write(**news: record.Json) -> None:
        facts.update(news)
        if arguments.child_json is not None:
            record.write_json(arguments.child_json, facts)

    runs: dict[str, tuple[Callable[[Tensor], Tensor], list[tuple[Tensor]]]] = {}
    found: dict[str, Facts] = {}
    with torch.no_grad(), turns.building():
        write(phase=BUILDING)
        start = time.perf_counter()
        net, x = CHAINS[name].make(device, torch.float16)
        exact = copy.deepcopy(net).double()(x.double())
        plain = net(x)
        sets = max(FEWEST_SETS, min(MOST_SETS, sets_needed(x.nbytes + plain.nbytes, device)))
        write(sets=sets)
        for layout, (own, given) in formats(net, x, CHAINS[name].of_images).items():
            for peer in arguments.peers:
                title = f"{peer} {layout}".strip()
                torch._dynamo.reset()
                try:
                    fast = compiled(peer, own)
                    judged = accuracy.compare(fast(given), plain, exact)
                    found[title] = {"right": judged.passed, "smallest_k": judged.smallest_k}
                    runs[title] = fast, [(given.clone(),) for _ in range(sets)]
                except Exception as error:  # noqa: BLE001 - a contestant that fails has no figure
                    found[title] = {"not_available": measure.one_line(error)}
        write(phase=TIMING, build_s=time.perf_counter() - start, contestants=found)
    with torch.no_grad(), turns.timing():
        for title, timed in time_runs(runs, device, arguments.rounds).items():
            found[title] |= {
                "median_us": timed.timing.median * 1e6,
                "min_us": timed.timing.minimum * 1e6,
                "method": timed.method,
            }
        write(contestants=found)
        release(device)
    write(phase=DONE)


def speeds(facts: Mapping[str, object]) -> dict[str, float]:
    """The best peer's time over ours, by memory format."""
    timed = {
        str(title): float(f["median_us"])
        for title, f in facts.get("contestants", {}).items()  # type: ignore[attr-defined]
        if "median_us" in f and f.get("right")
    }
    found: dict[str, float] = {}
    for layout in ("", "nchw", "nhwc"):
        ours = timed.get(f"{OURS} {layout}".strip())
        peers = [t for p in PEERS[:-1] if (t := timed.get(f"{p} {layout}".strip())) is not None]
        if ours and peers:
            found[layout] = min(peers) / ours
    return found


def figures(found: Mapping[str, Facts]) -> list[Figure]:
    """The lines of the table of wanted figures."""
    all_speeds = [s for facts in found.values() for s in speeds(facts).values()]

    def mean(values: Sequence[float]) -> tuple[str, bool]:
        return f"geomean {measure.geomean(values):.3f}x of {len(values)}", measure.geomean(values) >= 1.35

    def worst(values: Sequence[float]) -> tuple[str, bool]:
        slow = sum(v < 0.95 for v in values)
        return f"worst {min(values):.3f}x, {slow} of {len(values)} slower", slow == 0

    return [
        figure("chains over the best peer", all_speeds, mean, "geomean >= 1.35x"),
        figure("chains over the best peer", all_speeds, worst, "none < 0.95x"),
    ]


def summary(found: Mapping[str, Facts]) -> str:
    """One line for each chain and format, and the wanted figures."""
    lines: list[list[str]] = []
    for name, facts in found.items():
        known: Mapping[str, Facts] = facts.get("contestants", {})  # type: ignore[assignment]
        for layout in ("", "nchw", "nhwc"):
            own = [known.get(f"{peer} {layout}".strip()) for peer in PEERS]
            if any(own):
                cells = [f"{f['median_us']:.1f}" if f and "median_us" in f else "-" for f in own]
                speed = speeds(facts).get(layout)
                lines.append([f"{name} {layout}".strip(), *cells, f"{speed:.2f}" if speed else "-"])
    table = gpu_report.text_table("chains in fp16, us in CUDA graphs", ["chain", *PEERS, "speed"], lines)
    wanted = gpu_report.text_table(
        "wanted figures", ["figure", "value", "wanted", ""], [f.row() for f in figures(found)]
    )
    return f"{table}\n{wanted}"


def options(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = gpu_report.parser(__doc__)
    gpu_report.child_options(parser)
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS))
    made = parser.parse_args(given)
    for name in made.only:
        if name not in CHAINS:
            parser.error(f"no {name!r}; there are: {', '.join(CHAINS)}")
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Run, print the tables, write the JSON."""
    warnings.filterwarnings("ignore")
    arguments = options(given)
    device = torch.device(arguments.device)
    reason = gpu_report.unusable(device) if device.type == "cuda" else "chains are timed on a GPU"
    if reason:
        print(reason, file=sys.stderr)
        return 2
    if arguments.child:
        child(arguments.child, arguments)
        return 0
    head = gpu_report.provenance(device, arguments.commit) | {"rounds": arguments.rounds}

    def report(found: Mapping[str, Facts]) -> None:
        if arguments.json is not None:
            wanted = [f.facts() for f in figures(found)]
            record.write_json(arguments.json, head | {"figures": wanted, "chains": found})

    limits = Limits(arguments.build or 0.7 * arguments.budget, arguments.budget, arguments.gpus)
    passed = [
        f"--device={arguments.device}",
        f"--rounds={arguments.rounds}",
        f"--peers={','.join(arguments.peers)}",
    ]
    names = arguments.only or list(CHAINS)
    found = gpu_turns.run("benchmarks.chains", names, passed, limits, arguments.jobs or JOBS, report)
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
