"""Model classes that nobody chose, compiled and judged.

    python -m benchmarks.zoo [--count 100] [--json FILE] [--workers 2] [--device cuda] [--budget SECONDS]
                             [--peer 100] [--onnx 30]

The rule: every entry of transformers' MODEL_MAPPING_NAMES, of torchvision's list_models() and one of each family of
timm.list_models() (where these are installed), in an order drawn once with a fixed seed. Each is made with random
weights from its own default configuration, made small by the names of its attributes (`small`), with inputs that its
signature names (`models`). One is passed over if no configuration or input of those makes eager give finite floats, if
these are others with another seed, if it has more than 40 million weights even so, or if its kind (encoder, decoder,
encoder-decoder, state-space, vision, audio, image and text) has a third of the places already. The first COUNT that
remain are the zoo. A part that eager itself refuses, as a training step without labels, is left out with its reason.

Each runs in a process of its own, with limits of time and memory: a forward and a training step (weights' gradients,
buffers), both memory formats where it takes images, by the fp64 rule, and the law of tensors that jump where eager in
other ways to round fails that rule itself (`chaos`); `--peer` also measures Inductor's CPU seconds of
compiling, `--onnx` judges the file that torch exports, for so many models, the first for which it can be done. A part
is right, wrong, or crashed. The JSON is written after each model; a run that finds it goes on where it ended. Several
`--workers` judge as many models at a time, which are taken in the order in which they end. A run that finds nothing
right fails: what dies before a model is made is left out, be it by our own import.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import record
from benchmarks.zoo.child import run
from benchmarks.zoo.models import names

BYTES = {"cpu": 10 << 30, "cuda": 16 << 30}
"""Most resident memory of a model's process, by device: a step in float64 takes twice what eager's does, and libraries
for graphics cards take gigabytes."""
SECONDS = 5400.0
"""Of a processor: a step of sam_hq takes 12 on one core, and its judge asks for two hundred. By the clock a model may
take `WAITING` times as long, as machines do other things as well."""
WAITING = 4


def outcome(facts: Mapping[str, object]) -> str:
    """right, wrong, or crash of one part; left out where there was nothing to judge."""
    if "left_out" in facts:
        return "left out"
    if "crash" in facts or facts.get("fallbacks"):
        return "crash"
    verdicts = [v for v in facts.values() if isinstance(v, Mapping) and "passed" in v]
    own = [facts[n] for n in ("results", "gradients", "buffers") if n in facts]
    return "right" if verdicts and all(v["passed"] for v in own) else "wrong"  # type: ignore[index]


def child(name: str, device: str, flags: list[str], seconds: float) -> record.Facts:
    """What a process of its own finds out about a model."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "facts.json", Path(folder) / "err"
        errors.touch()  # a process may die before it opens it
        given = [name, "--device", device, "--out", str(out), *flags]
        process = _processes(device).Process(target=run, args=(given, str(errors)))  # type: ignore[attr-defined]
        process.start()
        why = _waited(process, seconds, BYTES[device])
        if not out.exists():  # before anything was compiled
            said = errors.read_text().strip().splitlines()[-1:]
            return {"left_out": f"the process died while the model was made: {why or said}"}
        facts: record.Facts = json.loads(out.read_text())
    if why:
        for part in facts.get("parts", {}).values():  # type: ignore[union-attr]
            if part.get("crash") == "the process died":
                part["crash"] = why
    return facts


@functools.cache
def _processes(device: str) -> multiprocessing.context.BaseContext:
    """How processes start: as forks of one that has imported the packages, where their imports touch no device."""
    os.environ |= {
        "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "HF_HUB_OFFLINE": "1", "TILEWRIGHT_MEASURE": "0",
    }  # fmt: skip
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # forks cannot use what imports have opened
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.zoo.child"])
    return context


def _waited(process: multiprocessing.process.BaseProcess, seconds: float, most_bytes: int) -> str:
    """Why a process had to be stopped, or its status; empty if it ended well."""
    limit = time.monotonic() + WAITING * seconds
    while process.is_alive():
        why = ""
        if time.monotonic() > limit or _busy(process.pid or 0) > seconds:
            why = f"not finished after {seconds:.0f} s"
        if _resident(process.pid or 0) > most_bytes:
            why = f"more than {most_bytes >> 30} GiB of memory"
        if why:
            process.kill()
            process.join()
            return why
        process.join(0.5)
    return f"status {process.exitcode}" if process.exitcode else ""


def _busy(number: int) -> float:
    """Seconds of a processor that a process and its children that ended have taken."""
    try:
        facts = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, facts[11:15])) / os.sysconf("SC_CLK_TCK")


def _resident(number: int) -> int:
    try:
        pages = int(Path(f"/proc/{number}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * resource.getpagesize()


def judged_parts(models: Mapping[str, record.Facts]) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """Model, part and facts of all that was judged."""
    for name, facts in models.items():
        for part, found in facts.get("parts", {}).items():  # type: ignore[union-attr]
            yield name, part, found


def summary(models: Mapping[str, record.Facts]) -> record.Facts:
    """The figures of a run."""
    counts: dict[str, Counter[str]] = {}
    shares: list[float] = []
    ratios: dict[str, list[float]] = {}
    library: Counter[str] = Counter()
    ops = generated = needed = named = 0
    for _, part, facts in judged_parts(models):
        counts.setdefault(part, Counter())[outcome(facts)] += 1
        if facts.get("ops"):
            ops += int(facts["ops"])  # type: ignore[call-overload]
            generated += int(facts["generated"])  # type: ignore[call-overload]
            needed += int(facts.get("needed", 0))  # type: ignore[call-overload]
            named += int(facts["ops"]) if "library" in facts else 0  # type: ignore[call-overload]
            library.update(facts.get("library", {}))  # type: ignore[arg-type, call-overload]
            shares.append(facts["generated"] / facts["ops"])  # type: ignore[operator]
        if facts.get("inductor_cpu_s"):
            ratios.setdefault(part, []).append(facts["cpu_s"] / facts["inductor_cpu_s"])  # type: ignore[operator]
    kinds = Counter(str(f["kind"]) for f in models.values() if "kind" in f)
    return {
        "models": sum(kinds.values()), "kinds": dict(kinds), "parts": {p: dict(c) for p, c in counts.items()},
        "ops": ops, "generated": generated, "generated_share": generated / max(1, ops),
        "needed_share": needed / max(1, ops),
        "library": dict(library.most_common()), "library_of_ops": named,
        "generated_share_geomean": _geomean(shares),
        "compile_cpu_over_inductor": {p: _geomean(r) for p, r in ratios.items()},
    }  # fmt: skip


def _geomean(values: list[float]) -> float:
    return math.exp(sum(math.log(max(v, 1e-9)) for v in values) / len(values)) if values else 0.0


def _judged(facts: record.Facts, fact: str) -> bool:
    """Whether a model's file (`onnx`) or rival (`peer`) was had."""
    parts: Mapping[str, Mapping[str, object]] = facts.get("parts", {})  # type: ignore[assignment]
    if fact == "onnx":
        return "onnx" in parts and "left_out" not in parts["onnx"]
    return any("inductor_cpu_s" in p for p in parts.values())


@dataclass
class Zoo:
    """The models judged so far, and those that are being judged."""

    count: int
    device: str
    quota: Mapping[str, int]
    """Of how many models a file and a rival are wanted."""
    models: dict[str, record.Facts]
    before: Mapping[str, record.Facts] = field(default_factory=dict)
    """What was found before of models of which some parts are judged again, without these."""
    again: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Those parts."""
    running: dict[Future[record.Facts], tuple[str, list[str]]] = field(default_factory=dict)

    def kinds(self) -> Counter[str]:
        """How many models of each kind are in."""
        return Counter(str(f["kind"]) for f in self.models.values() if "kind" in f)

    def full(self) -> list[str]:
        """The kinds that have a third of the places."""
        return [kind for kind, number in self.kinds().items() if number >= -(-self.count // 3)]

    def places(self) -> int:
        """How many are free, if all that run are taken."""
        return self.count - self.kinds().total() - len(self.running)

    def start(self, pool: ThreadPoolExecutor, name: str) -> None:
        """Let a model be judged."""
        wanted: list[str] = []
        for fact, most in self.quota.items():
            done = sum(_judged(f, fact) for f in self.models.values())
            if done + sum(f"--{fact}" in asked for _, asked in self.running.values()) < most:
                wanted.append(f"--{fact}")
        flags = [*wanted, *(f"--full={kind}" for kind in self.full())]
        flags += [f"--part={part}" for part in self.again.get(name, ())]
        self.running[pool.submit(child, name, self.device, flags, SECONDS)] = name, wanted

    def take(self, done: Future[record.Facts]) -> None:
        """Note what was found out about a model, and tell it."""
        name, _ = self.running.pop(done)
        facts = {**done.result(), "commit": record.commit()}
        if facts.get("kind") in self.full():  # filled while it ran
            facts = {"left_out": f"enough of its kind: {facts['kind']}"}
        self.models[name] = _joined(self.before[name], facts) if name in self.before else facts
        told = {p: outcome(f) for p, f in facts.get("parts", {}).items()}  # type: ignore[union-attr]
        print(f"{name}: {told or facts.get('left_out')}", flush=True)
        for p, f in facts.get("parts", {}).items():  # type: ignore[union-attr]
            if outcome(f) in ("wrong", "crash"):
                print(f"  {p}: {json.dumps(f)[:500]}", flush=True)


def _joined(before: record.Facts, facts: record.Facts) -> record.Facts:
    """What was found before with the parts that were judged again, which say at which commit."""
    if "parts" not in facts:
        return facts
    found = {p: {**f, "commit": facts["commit"]} for p, f in facts["parts"].items()}  # type: ignore[union-attr]
    return {**before, "parts": {**before["parts"], **found}}  # type: ignore[dict-item]


def _again(models: dict[str, record.Facts]) -> dict[str, list[str]]:
    """The parts that are to be judged again, by model: those that were wrong or crashed."""
    found: dict[str, list[str]] = {}
    for name, part, facts in judged_parts(models):
        if outcome(facts) in ("wrong", "crash"):
            found.setdefault(name, []).append(part)
    return found


def _without(facts: record.Facts, parts: Sequence[str]) -> record.Facts:
    kept = {p: f for p, f in facts["parts"].items() if p not in parts}  # type: ignore[union-attr]
    return {**facts, "parts": kept}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--json", type=Path, default=Path("out/zoo.json"))
    parser.add_argument("--workers", type=int, default=1, help="models judged at a time")
    parser.add_argument("--device", choices=sorted(BYTES), default="cpu")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds after which no further model starts"
    )
    parser.add_argument("--peer", type=int, default=0, help="models that Inductor compiles as well")
    parser.add_argument("--onnx", type=int, default=0, help="models whose exported file is judged")
    parser.add_argument(
        "--only", action="append", help="entries whose name contains this; may be given again"
    )
    parser.add_argument(
        "--anew",
        action="store_true",
        help="judge again the parts that were wrong or crashed, or what --only names",
    )
    return parser.parse_args()


def main() -> int:
    """The command."""
    arguments = _arguments()
    order = names()
    random.Random(0).shuffle(order)
    kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    models: dict[str, record.Facts] = kept.get("models", {})
    asked = {n for n in order if not arguments.only or any(part in n for part in arguments.only)}
    again = _again(models) if arguments.anew and not arguments.only else {}
    before = {n: _without(models[n], parts) for n, parts in again.items()}
    if arguments.anew:
        models = {n: f for n, f in models.items() if n not in (asked if arguments.only else again)}
    quota = {"onnx": arguments.onnx, "peer": arguments.peer}
    zoo = Zoo(arguments.count, arguments.device, quota, models, before, again)
    waiting = iter([*again, *(n for n in order if n not in models and n not in again and n in asked)])
    end = time.monotonic() + arguments.budget
    with ThreadPoolExecutor(arguments.workers) as pool:
        while True:
            while len(zoo.running) < arguments.workers and zoo.places() > 0 and time.monotonic() < end:
                name = next(waiting, None)
                if name is None:
                    break
                zoo.start(pool, name)
            if not zoo.running:
                break
            for done in wait(zoo.running, return_when=FIRST_COMPLETED).done:
                zoo.take(done)
                head = record.provenance(1) | {"device": arguments.device, "summary": summary(models)}
                record.write_json(arguments.json, head | {"models": models})
    print(json.dumps(summary(models), indent=1))
    found = [outcome(f) for _, _, f in judged_parts(models)]
    return 0 if "right" in found and not {"wrong", "crash"}.intersection(found) else 1


if __name__ == "__main__":
    sys.exit(main())
