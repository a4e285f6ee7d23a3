"""`python -m benchmarks.networks --device cuda`: whole networks in half precision against eager and Inductor,
with its defaults and with max-autotune.

Each network and batch size has a process of its own. Every contestant runs with and without CUDA graphs
and, for networks of convolutions, in both memory formats; its best setting counts. Eager and Inductor are
captured by this program, without copies of inputs and results; our compiler captures itself (`cuda_graphs`)
and is captured from outside too.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import gpu_peers, gpu_report, gpu_turns, record
from benchmarks.gpu_clock import CaptureError, capture, release, synchronize, wall_clock
from benchmarks.gpu_models import NETWORKS, Loaded, Network, load
from benchmarks.gpu_report import Figure, figure
from benchmarks.gpu_turns import BUILDING, DONE, TIMING, Limits, Turns
from benchmarks.record import Facts
from tilewright import accuracy, measure

EAGER, INDUCTOR, AUTOTUNE, OURS = "eager", "inductor", "inductor max-autotune", "tilewright"
PEERS = (EAGER, INDUCTOR, AUTOTUNE, OURS)
LEAST_MEAN, LEAST = {1: 1.35, 64: 1.25}, 0.97
"""Wanted of all networks by batch, and of each."""
REPEATS = 4
"""Calls after which our compiler replays its own graph: that result is judged."""

NONE, OWN, OUTSIDE = "none", "own", "captured"
Call = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Setting:
    """How a contestant runs: memory format, weights as constants, and who makes the CUDA graph, if any."""

    peer: str
    channels_last: bool
    frozen: bool = False
    graph: str = NONE

    @property
    def name(self) -> str:
        """`inductor channels-last frozen graph`."""
        words = [
            self.peer,
            *(["channels-last"] if self.channels_last else []),
            *(["frozen"] if self.frozen else []),
        ]
        graph = {NONE: [], OWN: ["own graph"], OUTSIDE: ["graph"]}[self.graph]
        return " ".join([*words, *graph])


def settings(network: Network, peers: Sequence[str], frozen: Sequence[bool], cuda: bool) -> list[Setting]:
    """What is built, the most promising first; graphs captured from outside come when timing."""
    layouts = (True, False) if network.convolutional else (False,)
    made: list[Setting] = []
    for constant in frozen:
        for layout in layouts:
            if EAGER in peers and constant == frozen[0]:
                made.append(Setting(EAGER, layout))
            made += [Setting(p, layout, constant) for p in (INDUCTOR, AUTOTUNE) if p in peers]
            if OURS in peers:
                made.append(Setting(OURS, layout, constant))
                if cuda:
                    made.append(Setting(OURS, layout, constant, OWN))
    return made


def build(setting: Setting, model: torch.nn.Module, x: torch.Tensor, tune_seconds: int | None = None) -> Call:
    """The contestant as a function; what compiles does so at its first call. `tune_seconds` are ours, if not the usual
    ones."""
    if setting.peer == EAGER:
        return model
    if setting.peer in (INDUCTOR, AUTOTUNE):
        return Inductor(
            model, setting.frozen, "max-autotune-no-cudagraphs" if setting.peer == AUTOTUNE else None
        )
    compile_ = importlib.import_module("tilewright").compile
    options: dict[str, int] = {"cuda_graphs": setting.graph == OWN} if x.is_cuda else {}
    if tune_seconds is not None:
        options["tune_seconds"] = tune_seconds
    return compile_(model, (x,), freeze=setting.frozen, options=options)


class Inductor:
    """A compiled module. Freezing is process-wide state that only the compiling call may see."""

    def __init__(self, model: torch.nn.Module, frozen: bool, mode: str | None) -> None:
        def run(x: torch.Tensor) -> object:
            return model(x)

        # Code of its own: Dynamo would take what it compiled of the same model with other settings.
        self._compiled = torch.compile(gpu_peers.fresh(run), dynamic=False, mode=mode)
        self._frozen = frozen

    def __call__(self, x: torch.Tensor) -> object:
        """Compiles at the first call."""
        if not self._frozen:
            return self._compiled(x)
        config = importlib.import_module("torch._inductor.config")
        with config.patch(freezing=True):
            result = self._compiled(x)
        self._frozen = False
        return result


@dataclass
class Ready:
    """One batch size: built contestants with their inputs, and what is recorded of each so far."""

    batch: int
    calls: dict[Setting, tuple[Call, torch.Tensor]]
    facts: dict[Setting, Facts]


def build_batch(
    network: Network, models: Mapping[bool, torch.nn.Module], batch: int, arguments: argparse.Namespace
) -> Ready:
    """Build and run every contestant once, and judge its results by the fp64 rule."""
    device = torch.device(arguments.device)
    torch.manual_seed(batch)
    plain = network.inputs(batch, device, torch.float16)
    inputs = {False: plain}
    if network.pixels:
        inputs[True] = plain.contiguous(memory_format=torch.channels_last)
    eager = measure.flatten(models[False](plain))
    exact = measure.flatten(accuracy.in_float64(models[False])(plain))
    release(device)
    ready = Ready(batch, {}, {})
    for setting in settings(network, arguments.peers, arguments.frozen, device.type == "cuda"):
        if setting.peer != EAGER and time.time() > (arguments.build_until or float("inf")):
            ready.facts[setting] = {"not_available": "no time left to build it"}
            continue
        x = inputs[setting.channels_last]
        start = time.perf_counter()
        try:
            call = build(setting, models[setting.channels_last], x, arguments.tune_seconds)
            for _ in range(REPEATS if setting.graph == OWN else 1):
                result = measure.flatten(call(x))
            synchronize(device)
        except Exception as error:  # noqa: BLE001 - one contestant's failure must not stop the others
            ready.facts[setting] = {"not_available": measure.one_line(error)}
            continue
        ready.facts[setting] = {
            "build_s": time.perf_counter() - start,
            "accuracy": gpu_peers.verdict(result, eager, exact),
            "coverage": str(getattr(call, "coverage", "")) if setting.peer == OURS else "",
        }
        ready.calls[setting] = (call, x)
        release(device)
    return ready


def time_batch(ready: Ready, device: torch.device, rounds: int) -> dict[Setting, Facts]:
    """All contestants of one batch size, and those that can be captured once more as graphs. Needs the device
    alone."""
    runs: dict[Setting, measure.Run] = {}
    facts = {setting: dict(known) for setting, known in ready.facts.items()}
    for setting, (call, x) in ready.calls.items():
        run = _bound(call, x)
        runs[setting] = run
        if device.type != "cuda" or setting.graph != NONE:
            continue
        captured = replace(setting, graph=OUTSIDE)
        try:
            runs[captured] = capture(run)
            facts[captured] = {"accuracy": facts[setting]["accuracy"]}
        except CaptureError as error:
            facts[captured] = {"not_available": str(error)}
    names = {setting.name: setting for setting in runs}
    timings = wall_clock({name: runs[setting] for name, setting in names.items()}, device, rounds)
    for name, timing in timings.items():
        micro = {
            "median_us": timing.median * 1e6,
            "min_us": timing.minimum * 1e6,
            "p90_us": timing.percentile(90) * 1e6,
        }
        facts[names[name]] |= micro
    return facts


def _bound(call: Call, x: torch.Tensor) -> measure.Run:
    return lambda: call(x)


# --- a child ---------------------------------------------------------------------


def child(item: str, arguments: argparse.Namespace) -> Facts:
    """Build, check and time one network at one batch size; `item` names both, as in `resnet50 64`."""
    device = torch.device(arguments.device)
    turns = Turns(arguments.turns)
    name, _, batch = item.rpartition(" ")
    facts: Facts = {"phase": BUILDING, "network": name, "batch": int(batch)}

    def write(**news: record.Json) -> None:
        facts.update(news)
        if arguments.child_json is not None:
            record.write_json(arguments.child_json, facts)

    with torch.no_grad(), turns.building():
        write()
        start = time.perf_counter()
        loaded = load(NETWORKS[name], device, torch.float16)
        models = layouts(loaded, NETWORKS[name])
        ready = build_batch(NETWORKS[name], models, int(batch), arguments)
        write(phase=TIMING, source=loaded.source, build_s=time.perf_counter() - start)
    with torch.no_grad(), turns.timing():
        timed = time_batch(ready, device, arguments.rounds)
    write(phase=DONE, settings={setting.name: {**vars(setting), **known} for setting, known in timed.items()})
    return facts


def layouts(loaded: Loaded, network: Network) -> dict[bool, torch.nn.Module]:
    """The model in both memory formats; by `channels_last`."""
    if not network.convolutional:
        return {False: loaded.model}
    return {False: loaded.model, True: copy.deepcopy(loaded.model).to(memory_format=torch.channels_last)}


# --- the whole run ---------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One network and batch size: microseconds by setting, for results that are right."""

    network: str
    batch: int
    times: Mapping[Setting, float]
    faults: tuple[tuple[str, str], ...]
    """Settings that are missing or wrong, and why."""

    def best(self, peer: str, *, graph: bool | None = None) -> tuple[float, Setting] | None:
        """The fastest setting of a contestant, with, without, or with or without CUDA graphs."""
        fitting = [
            (time_, setting)
            for setting, time_ in self.times.items()
            if setting.peer == peer and graph in (None, setting.graph != NONE)
        ]
        return min(fitting, key=lambda pair: pair[0], default=None)

    def speed(self, *, graph: bool | None = None) -> float | None:
        """How many times as fast as the best peer ours is, each at its best setting."""
        ours = self.best(OURS, graph=graph)
        peers = [found[0] for peer in PEERS[:-1] if (found := self.best(peer, graph=graph))]
        return min(peers) / ours[0] if ours and peers else None


def rows(networks: Mapping[str, Facts]) -> list[Row]:
    """From the recorded facts of all networks."""
    return [_row(facts) for facts in networks.values() if "settings" in facts]


def _row(row: Mapping[str, object]) -> Row:
    times: dict[Setting, float] = {}
    faults: list[tuple[str, str]] = []
    for title, facts in row["settings"].items():  # type: ignore[attr-defined]
        setting = Setting(facts["peer"], facts["channels_last"], facts["frozen"], facts["graph"])
        judged = facts.get("accuracy", {})
        if "not_available" in facts:
            faults.append((title, f"not available: {facts['not_available']}"))
        elif judged.get("passed") is False:
            faults.append((title, str(judged.get("reason", "wrong"))))
        elif "median_us" in facts:
            times[setting] = facts["median_us"]
    return Row(str(row["network"]), int(row["batch"]), times, tuple(faults))  # type: ignore[call-overload]


def figures(found: Sequence[Row]) -> list[Figure]:
    """The lines of the table of wanted figures."""

    def mean(least: float) -> Callable[[Sequence[float]], tuple[str, bool]]:
        return lambda v: (f"geomean {measure.geomean(v):.3f}x of {len(v)}", measure.geomean(v) >= least)

    def worst(least: float) -> Callable[[Sequence[float]], tuple[str, bool]]:
        return lambda v: (f"worst {min(v):.3f}x of {len(v)}", min(v) >= least)

    made: list[Figure] = []
    for batch, least in LEAST_MEAN.items():
        title = f"networks at batch {batch} over the best peer, best settings"
        speeds = [speed for row in found if row.batch == batch and (speed := row.speed()) is not None]
        made.append(figure(title, speeds, mean(least), f"geomean >= {least}x"))
        made.append(figure(title, speeds, worst(LEAST), f"none < {LEAST}x"))
    plain = [speed for row in found if (speed := row.speed(graph=False)) is not None]
    made.append(figure("networks over the best peer, without graphs", plain, worst(1.0), "none < 1.0x"))
    return made


def table(found: Sequence[Row]) -> str:
    """One line per network and batch size, in milliseconds."""
    lines: list[list[str]] = []
    for row in found:
        cells = [f"{row.network} {row.batch}"]
        for peer in PEERS:
            cells += [_milliseconds(row.best(peer, graph=False)), _milliseconds(row.best(peer, graph=True))]
        speed = row.speed()
        lines.append([*cells, f"{speed:.2f}" if speed else "-"])
    heads = ["network, batch", *(word for peer in PEERS for word in (peer, "graph")), "x best peer"]
    return gpu_report.text_table("fp16, ms, best setting each, without and with CUDA graphs", heads, lines)


def _milliseconds(found: tuple[float, Setting] | None) -> str:
    return f"{found[0] / 1e3:.3f}" if found else "-"


def summary(networks: Mapping[str, Facts]) -> str:
    """Everything that is printed at the end."""
    found = rows(networks)
    parts = [table(found)]
    faults = [(f"{row.network} {row.batch} {title}", why) for row in found for title, why in row.faults]
    faults += [(name, str(facts["failed"])) for name, facts in networks.items() if "failed" in facts]
    if faults:
        parts.append(f"wrong, failed or absent:\n{gpu_report.grouped(faults)}\n")
    lines = [item.row() for item in figures(found)]
    parts.append(gpu_report.text_table("wanted figures", ["figure", "value", "wanted", ""], lines))
    return "\n".join(parts)


def options(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = gpu_report.parser(__doc__)
    gpu_report.child_options(parser)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[64, 1])
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS))
    parser.add_argument(
        "--weights", choices=("both", "inputs", "frozen"), default="both",
        help="weights as inputs of the compiled code, as its constants (freezing), or each (the default)",
    )  # fmt: skip
    parser.add_argument("--tune-seconds", type=int, help="of our compiler, if not its usual ones")
    made = parser.parse_args(given)
    for names, known in ((made.only, NETWORKS), (made.peers, PEERS)):
        for name in names:
            if name not in known:
                parser.error(f"no {name!r}; there are: {', '.join(known)}")
    made.frozen = {"both": (False, True), "inputs": (False,), "frozen": (True,)}[made.weights]
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Run, print the table, write the JSON."""
    warnings.filterwarnings("ignore")
    arguments = options(given)
    device = torch.device(arguments.device)
    if reason := gpu_report.unusable(device):
        print(reason, file=sys.stderr)
        return 2
    if arguments.child:
        child(arguments.child, arguments)
        return 0
    names = [f"{name} {batch}" for batch in arguments.batches for name in arguments.only or NETWORKS]
    head = gpu_report.provenance(device, arguments.commit) | {"rounds": arguments.rounds}
    start = time.time()

    def report(networks: Mapping[str, Facts]) -> None:
        if arguments.json is not None:
            found = [item.facts() for item in figures(rows(networks))]
            record.write_json(arguments.json, head | {"figures": found, "networks": networks})

    limits = Limits(arguments.build or 0.6 * arguments.budget, arguments.budget, arguments.gpus)
    passed = [
        f"--device={arguments.device}", f"--rounds={arguments.rounds}", f"--peers={','.join(arguments.peers)}",
        f"--weights={arguments.weights}",
        *([] if arguments.tune_seconds is None else [f"--tune-seconds={arguments.tune_seconds}"]),
    ]  # fmt: skip
    networks = gpu_turns.run(
        "benchmarks.networks", names, passed, limits, arguments.jobs or len(names), report
    )
    print(summary(networks))
    built = [f"{name} {facts['build_s']:.0f}" for name, facts in networks.items() if "build_s" in facts]
    print(f"{time.time() - start:.0f} s in all; seconds of building: {', '.join(built)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
