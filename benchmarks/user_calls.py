"""`python -m benchmarks.user_calls`: networks in half precision at batch 1 as a user calls them: wall clock of a call
and a synchronise, beside Inductor with its own CUDA graphs (`reduce-overhead`, `max-autotune`).

Nothing is captured from outside: what a call checks, copies and returns counts. Each network has a process of its own;
all contestants are built in it, then timed alone, one after the other in several passes. A call brings inputs from
memory of its own in turn ("moving") or always the same ("standing"). Networks of convolutions are channels-last.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks import gpu_peers, gpu_report, gpu_turns, record
from benchmarks.call_cost import INPUTS, SETTLING_SECONDS, turning, wall_us
from benchmarks.gpu_clock import release
from benchmarks.gpu_models import NETWORKS, Network, load
from benchmarks.gpu_report import Figure, figure
from benchmarks.gpu_turns import BUILDING, DONE, TIMING, Limits, Turns
from benchmarks.networks import Inductor
from benchmarks.record import Facts
from tilewright import accuracy, measure

Call = Callable[[Tensor], object]
PASSES = 3
REPEATS = 6
"""Calls after which all contestants replay their graphs: that result is judged."""
MOVING, STANDING = "moving", "standing"
AGAIN_SECONDS = 2.0
"""Between interruptions of a build that caught one itself."""
LEAST_MEAN, LEAST = 1.3, 1.0
"""Wanted of all networks, and of each, over the best peer."""


@dataclass(frozen=True)
class Contestant:
    """Ours or Inductor, the door (`compile`: our own) or mode of `torch.compile`, weights as constants or not."""

    ours: bool
    mode: str
    frozen: bool = False

    @property
    def name(self) -> str:
        """`inductor max-autotune frozen`."""
        words = ["tilewright" if self.ours else "inductor", self.mode, *(["frozen"] if self.frozen else [])]
        return " ".join(words)


OWN_DOOR = "compile"
REDUCE, TUNED = "reduce-overhead", "max-autotune"
CONTESTANTS = (
    Contestant(True, OWN_DOOR, True),
    Contestant(False, REDUCE, True),
    Contestant(False, TUNED, True),
    Contestant(True, REDUCE),
    Contestant(False, REDUCE),
    Contestant(True, OWN_DOOR),
    Contestant(False, TUNED),
)
"""What is built, in this order."""


@dataclass
class Ready:
    """The contestants that were built, with the call that sees inputs move and the one that sees one stand still, and
    what is recorded of each."""

    calls: dict[Contestant, dict[str, Call]] = field(default_factory=dict[Contestant, dict[str, Call]])
    facts: dict[Contestant, Facts] = field(default_factory=dict[Contestant, Facts])


def build(contestant: Contestant, model: nn.Module, x: Tensor) -> Call:
    """The contestant as a function; what compiles does so at its first call."""
    if not contestant.ours:
        return Inductor(model, contestant.frozen, contestant.mode)
    if contestant.mode == OWN_DOOR:
        compile_ = importlib.import_module("tilewright").compile
        return compile_(model, (x,), freeze=contestant.frozen, options={"cuda_graphs": True})

    def run(x: Tensor) -> object:
        return model(x)

    return torch.compile(gpu_peers.fresh(run), backend="tilewright", dynamic=False, mode=contestant.mode)


@contextlib.contextmanager
def ending(at: float) -> Generator[None]:
    """Raises `TimeoutError` in what still runs at that time: one contestant must not cost the others their figures."""

    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError("no time left to build it to its end")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, at - time.time()), AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def build_all(
    model: nn.Module, inputs: Sequence[Tensor], until: float, tell: Callable[[Contestant, Facts], None]
) -> Ready:
    """Build every contestant before the time `until`, and judge its results by the fp64 rule. `tell` hears of each."""
    eager = measure.flatten(model(inputs[0]))
    exact = measure.flatten(accuracy.in_float64(model)(inputs[0]))
    release(inputs[0].device)
    ready = Ready()
    for contestant in CONTESTANTS:
        if time.time() > until:
            ready.facts[contestant] = {"not_available": "no time left to build it"}
            continue
        start = time.perf_counter()
        try:
            with ending(until):
                ready.calls[contestant], result = _built(contestant, model, inputs)
        except Exception as error:  # noqa: BLE001 - one contestant's failure must not stop the others
            ready.facts[contestant] = {"not_available": measure.one_line(error)}
            tell(contestant, ready.facts[contestant])
            continue
        accurate = gpu_peers.verdict(result, eager, exact)
        ready.facts[contestant] = {"build_s": time.perf_counter() - start, "accuracy": accurate}
        tell(contestant, ready.facts[contestant])
    return ready


def _built(
    contestant: Contestant, model: nn.Module, inputs: Sequence[Tensor]
) -> tuple[dict[str, Call], tuple[Tensor, ...]]:
    """The calls, and what the one with moving inputs finds for the first."""
    moving = standing = build(contestant, model, inputs[0])
    # Our own door sees which inputs stand still: what saw them move would treat one that stands as if it moved.
    if contestant.ours and contestant.mode == OWN_DOOR:
        standing = build(contestant, model, inputs[0])
    for n in range(REPEATS):
        moving(inputs[n % len(inputs)])
    result = tuple(t.clone() for t in measure.flatten(moving(inputs[0])))
    torch.cuda.synchronize()
    return {MOVING: moving, STANDING: standing}, result


def time_all(ready: Ready, inputs: Sequence[Tensor], rounds: int) -> dict[Contestant, Facts]:
    """Wall clock of all that was built, in microseconds, `rounds` calls in each pass. Needs the machine alone."""
    found: dict[Contestant, dict[str, list[tuple[float, float]]]] = {
        contestant: {MOVING: [], STANDING: []} for contestant in ready.calls
    }
    time.sleep(SETTLING_SECONDS)  # until nothing of building runs any more
    for _ in range(PASSES):
        for contestant, calls in ready.calls.items():
            for way, used in ((MOVING, inputs), (STANDING, inputs[:1])):
                run = turning(calls[way], used)
                wall_us(run, max(REPEATS, rounds // 10))  # the one before left the caches to this one
                found[contestant][way].append(wall_us(run, rounds))
    facts = {contestant: dict(known) for contestant, known in ready.facts.items()}
    for contestant, ways in found.items():
        for way, passes in ways.items():
            walls = [wall for wall, _ in passes]
            facts[contestant][way] = {
                "wall_us": statistics.median(walls),
                "host_us": statistics.median(host for _, host in passes),
                "passes_us": walls,
            }
    return facts


def child(name: str, arguments: argparse.Namespace) -> None:
    """Build, check and time one network."""
    device, network, turns = torch.device("cuda"), NETWORKS[name], Turns(arguments.turns)
    facts: Facts = {"phase": BUILDING, "network": name}

    def write(**news: record.Json) -> None:
        facts.update(news)
        record.write_json(arguments.child_json, facts)

    def tell(who: Contestant, known: Facts) -> None:
        write(contestants={**facts.get("contestants", {}), who.name: {**vars(who), **known}})

    with torch.no_grad(), turns.building():
        write()
        start = time.perf_counter()
        model, inputs, source = loaded(network, device)
        ready = build_all(model, inputs, arguments.build_until, tell)
        write(phase=TIMING, source=source, build_s=time.perf_counter() - start)
    with torch.no_grad(), turns.timing():
        timed = time_all(ready, inputs, arguments.rounds)
    write(phase=DONE, contestants={who.name: {**vars(who), **known} for who, known in timed.items()})


def loaded(network: Network, device: torch.device) -> tuple[nn.Module, list[Tensor], str]:
    """The network, inputs in memory of their own, and where the network is from."""
    found = load(network, device, torch.float16)
    model, x = found.model, network.inputs(1, device, torch.float16)
    if network.convolutional:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  (torch takes it)
        x = x.contiguous(memory_format=torch.channels_last)
    return model, [x.clone(memory_format=torch.preserve_format) for _ in range(INPUTS)], found.source


# --- what it comes to ------------------------------------------------------------

Times = Mapping[Contestant, float]


def times(row: Mapping[str, object], way: str) -> Times:
    """Microseconds of a network's contestants whose results are right; `way`: moving or standing."""
    found: dict[Contestant, float] = {}
    for facts in row.get("contestants", {}).values():  # type: ignore[attr-defined]
        if way in facts and facts["accuracy"]["passed"]:
            who = Contestant(facts["ours"], facts["mode"], facts["frozen"])
            found[who] = facts[way]["wall_us"]
    return found


def speed(timed: Times, *, torch_compile: bool = False) -> float | None:
    """How many times as fast as the best peer ours is, each at its best; or, where all go through `torch.compile` with
    weights as they are, ours there."""

    def best(ours: bool) -> float | None:
        fitting = [
            us
            for who, us in timed.items()
            if who.ours == ours and not (torch_compile and (who.frozen or who.mode == OWN_DOOR))
        ]
        return min(fitting, default=None)

    mine, peer = best(True), best(False)
    return peer / mine if mine and peer else None


def figures(networks: Mapping[str, Facts]) -> list[Figure]:
    """The lines of the table of wanted figures."""

    def judge(found: Sequence[float]) -> tuple[str, bool]:
        mean, least = measure.geomean(found), min(found)
        return (
            f"geomean {mean:.3f}x, least {least:.3f}x of {len(found)}",
            mean >= LEAST_MEAN and least >= LEAST,
        )

    made: list[Figure] = []
    for title, torch_compile in (("best settings", False), ("all by torch.compile, not frozen", True)):
        for way in (MOVING, STANDING):
            speeds = [speed(times(row, way), torch_compile=torch_compile) for row in networks.values()]
            known = [found for found in speeds if found is not None]
            name = f"calls at batch 1 over the best peer, {title}, inputs {way}"
            made.append(figure(name, known, judge, f"geomean >= {LEAST_MEAN}x, none < {LEAST}x"))
    return made


def table(networks: Mapping[str, Facts]) -> str:
    """A line for each network and way of inputs, in microseconds."""
    lines: list[list[str]] = []
    for name, row in networks.items():
        for way in (MOVING, STANDING):
            found = times(row, way)
            cells = [f"{found[who]:.0f}" if who in found else "-" for who in CONTESTANTS]
            whole = speed(found)
            lines.append([f"{name}, {way}", *cells, f"{whole:.2f}" if whole else "-"])
    heads = ["network, inputs", *(who.name for who in CONTESTANTS), "x best peer"]
    return gpu_report.text_table("fp16, batch 1, us of a call and a synchronise", heads, lines)


def main(given: Sequence[str] | None = None) -> int:
    """Run, print the table, write the JSON. Returns 2 without a GPU."""
    warnings.filterwarnings("ignore")
    parser = gpu_report.parser(__doc__)
    gpu_report.child_options(parser)
    arguments = parser.parse_args(given)
    for name in arguments.only:
        if name not in NETWORKS:
            parser.error(f"no {name!r}; there are: {', '.join(NETWORKS)}")
    if reason := gpu_report.unusable(torch.device("cuda")):
        print(reason, file=sys.stderr)
        return 2
    if arguments.child:
        child(arguments.child, arguments)
        return 0
    names = arguments.only or list(NETWORKS)
    head = gpu_report.provenance(torch.device("cuda"), arguments.commit) | {"rounds": arguments.rounds}

    def report(networks: Mapping[str, Facts]) -> None:
        if arguments.json is not None:
            found = [item.facts() for item in figures(networks)]
            record.write_json(arguments.json, head | {"figures": found, "networks": networks})

    limits = Limits(arguments.build or 0.6 * arguments.budget, arguments.budget, arguments.gpus)
    jobs = arguments.jobs or len(names)
    networks = gpu_turns.run(
        "benchmarks.user_calls", names, [f"--rounds={arguments.rounds}"], limits, jobs, report
    )
    print(table(networks))
    lines = [item.row() for item in figures(networks)]
    print(gpu_report.text_table("wanted figures", ["figure", "value", "wanted", ""], lines))
    failed = [(name, str(facts["failed"])) for name, facts in networks.items() if "failed" in facts]
    if failed:
        print(f"failed:\n{gpu_report.grouped(failed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
