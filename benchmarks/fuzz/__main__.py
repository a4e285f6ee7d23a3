"""Random programs against the compiler.

    python -m benchmarks.fuzz --minutes N [--device cuda] [--workers N] [--seed S] [--found FOLDER] [--json FILE]

Each seed is one program of 5 to 40 statements (see `grow` and `ops`) and one setting: door, training, symbolic sizes,
options, and in some cases random decisions for every kernel. Eager judges values, gradients, what is written to inputs,
and layouts, by the fp64 rule (`judge`); with random decisions each kernel is judged by the exact oracle as well
(`exact`). What fails is shrunk and written to FOLDER as a file that runs by itself. An error that only matrix units
make is counted and told (`matrix_units`).

Without `--workers`, programs on the CPU run in forked children (`apart`); with it, and always on a device, in fresh
interpreters that stay (`workers`). A run that judged no program fails.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import queue
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.fuzz.apart import SECONDS, apart
from benchmarks.fuzz.contradiction import TAKEN_APART
from benchmarks.fuzz.exact import judged_exactly
from benchmarks.fuzz.grow import grown
from benchmarks.fuzz.judge import APART, CONTRADICTION, FAKE, PROMISE, REFUSED, Failure, Setting, judged
from benchmarks.fuzz.matrix_units import UNITS
from benchmarks.fuzz.program import Program, read
from benchmarks.fuzz.shrink import shrunk
from benchmarks.fuzz.workers import DEVICE_ERROR, Worker

SHRINKING = 240.0
"""Most seconds that one finding is shrunk."""
GRACE = 45.0
"""Seconds after the end for what is under way."""
TORCH = "torch's own"
ABOUT_FORMS = ("declared, torch has", "torch promised", ": dtype torch.", ": shape ")
"""In the text of a failure that tells of sizes or types."""
UNJUDGED = (REFUSED, TORCH, "cut off")
"""Kinds of verdicts that are none on the compiler."""

Case = tuple[int, Program, Setting]
"""A seed, its program, and how that is compiled."""

FILE = '''"""{title}"""

from benchmarks.fuzz.again import again
from benchmarks.fuzz.judge import Setting
from benchmarks.fuzz.program import Given

GIVENS = (
{givens}
)
SIZES, LATER = {sizes!r}, {later!r}
SETTING = {setting!r}

FORWARD = """
{source}"""

if __name__ == "__main__":
    again(FORWARD, GIVENS, SIZES, LATER, SETTING)
'''


def setting_of(seed: int, program: Program) -> Setting:
    """A random way to compile a program."""
    draw = random.Random(seed + 1)
    options: dict[str, object] = {}
    for name, values in {
        "fusion": ("none", "cover"), "contractions": ("inside", "library"), "rules": (False,), "trim": ("exact",),
        "round_intermediates": (True,), "threads": (1, 2),
    }.items():  # fmt: skip
        if draw.random() < 0.2:
            options[name] = draw.choice(values)
    training = any(g.grad for g in program.givens) and draw.random() < 0.7
    door = draw.choice(["backend", "backend", "direct"])
    dynamic = bool(program.later) and draw.random() < 0.9
    schedules = draw.randint(1, 1 << 20) if draw.random() < 0.4 else 0
    return Setting(door, training, dynamic, options, seed, schedules)


@dataclass(frozen=True)
class Forked:
    """Judges in forked children."""

    device: str = "cpu"

    def ask(
        self, program: Program, setting: Setting, backend: str = "tilewright", seconds: float = SECONDS
    ) -> Failure | None:
        """By the exact oracle where kernels are decided at random, else by eager."""
        if setting.schedules and backend == "tilewright":
            return apart(lambda: judged_exactly(program, setting), seconds)
        return apart(lambda: judged(program, setting, self.device, backend), seconds)

    def end(self) -> None:
        """Nothing lasts."""


def torch_fails(judge: Forked | Worker, program: Program, setting: Setting, failure: Failure) -> bool:
    """Whether what torch captures fails in the same way when it runs as it is, or raises the same as torch's own split
    of both passes does, or a result has not the form that torch promised while it was captured, or torch contradicts
    itself and we are right by its decompositions."""
    upstream = judge.ask(program, setting, "aot_eager")
    if upstream is not None and upstream.kind in (failure.kind, UNITS):
        return True
    if failure.kind == "crash":
        halves = judge.ask(program, setting, TAKEN_APART)
        if halves is not None and (halves.kind, halves.text) == (failure.kind, failure.text):
            return True
    if not any(words in failure.text for words in ABOUT_FORMS):
        if failure.kind != "wrong":
            return False
        told = judge.ask(program, setting, APART)
        return told is not None and told.kind == CONTRADICTION
    promise = judge.ask(program, setting, FAKE)
    return promise is not None and promise.kind == PROMISE


def written(folder: Path, seed: int, program: Program, setting: Setting, failure: Failure) -> Path:
    """The file of a finding."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{failure.kind}_{seed}.py"
    title = f"{failure.kind}: {failure.text}".replace('"""', "'''").replace("\\", "/")
    path.write_text(
        FILE.format(
            title=title, givens="\n".join(f"    {g!r}," for g in program.givens), sizes=dict(program.sizes),
            later=dict(program.later), setting=setting, source=program.source(),
        )
    )  # fmt: skip
    return path


def warm() -> None:
    """Import and start what every child would import and start again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f = torch.compile(lambda x: (x * 2).sum(), backend="aot_eager")
        f(torch.ones(3, requires_grad=True)).backward()
        torch._dynamo.reset()


@dataclass
class Campaign:
    """Seeds that several judges work through, and what they found."""

    arguments: argparse.Namespace
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[record.Facts] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.limit = self.start + 60 * self.arguments.minutes
        self.maker = Worker("cpu") if self.arguments.workers else None

    @property
    def judged(self) -> int:
        """Programs that were compiled and compared."""
        return sum(n for kind, n in self.counts.items() if kind not in UNJUDGED)

    def left(self) -> float:
        """Seconds for what is under way when the time is over."""
        return max(1.0, self.limit + GRACE - time.monotonic())

    def patience(self) -> float:
        """Seconds for one program."""
        return min(SECONDS, self.left())

    def made(self, seed: int) -> Program | None:
        """A random program; None where torch dies while it is made, which an interpreter of its own survives."""
        if self.maker is None:
            return grown(seed)
        text = self.maker.grow(seed)
        return None if text is None else read(text)

    def write(self) -> None:
        """The figures so far to their file: a run may be ended from outside."""
        if self.arguments.json:
            facts = record.provenance(1) | {
                "device": self.arguments.device, "workers": self.arguments.workers,
                "seconds": time.monotonic() - self.start, "judged": self.judged, "counts": dict(self.counts),
            }  # fmt: skip
            record.write_json(self.arguments.json, facts | {"found": self.findings})

    def cases(self) -> Iterator[Case]:
        """Programs until the time or their number is over."""
        for seed in range(self.arguments.seed, self.arguments.seed + self.arguments.count):
            if time.monotonic() > self.limit:
                return
            program = self.made(seed)
            if program is None:
                with self.lock:
                    self.counts[TORCH] += 1
                print(f"seed {seed}: {TORCH}: torch died while the program was made", flush=True)
                continue
            setting = setting_of(seed, program)
            if self.arguments.device != "cpu":
                setting = replace(setting, schedules=0)
            elif self.arguments.oracle != "both":
                setting = replace(setting, schedules=seed + 1 if self.arguments.oracle == "exact" else 0)
            yield seed, program, setting

    def work(self, judge: Forked | Worker, cases: Iterable[Case]) -> None:
        """Judge until nothing is left."""
        try:
            for case in cases:
                self.one(judge, *case)
        finally:
            judge.end()

    def share(self, judges: Sequence[Worker]) -> None:
        """Give programs to judges that work side by side. This thread has them made."""
        waiting: queue.Queue[Case | None] = queue.Queue(len(judges))
        with ThreadPoolExecutor(len(judges)) as threads:
            working = [threads.submit(self.work, j, iter(waiting.get, None)) for j in judges]
            ended = (None for _ in judges)
            for case in chain(self.cases(), ended):
                while not all(w.done() for w in working):
                    with contextlib.suppress(queue.Full):
                        waiting.put(case, timeout=1.0)
                        break
            for done in working:
                done.result()
        if self.maker is not None:
            self.maker.end()

    def one(self, judge: Forked | Worker, seed: int, program: Program, setting: Setting) -> None:
        """Judge a program; what it finds is shrunk and written."""
        failure = judge.ask(program, setting, seconds=self.patience())
        if failure is not None and failure.kind == "slow" and time.monotonic() > self.limit:
            failure = Failure("cut off", failure.text)
        found = failure is not None and failure.kind not in UNJUDGED
        if found and failure is not None and torch_fails(judge, program, setting, failure):
            failure, found = Failure(TORCH, failure.text), False
        with self.lock:
            self.counts[failure.kind if failure else "right"] += 1
            total = sum(self.counts.values())
            if total % 25 == 0:
                print(f"{total} programs, {time.monotonic() - self.start:.0f} s", flush=True)
                self.write()
        if failure is not None and (
            failure.kind in (UNITS, TORCH) or (failure.kind == REFUSED and DEVICE_ERROR in failure.text)
        ):
            print(f"seed {seed}: {failure.kind}: {failure.text[:200]}", flush=True)
        if not found or failure is None or failure.kind == UNITS:
            return
        print(f"seed {seed}: {failure.kind}: {failure.text[:300]}", flush=True)
        if not self.arguments.no_shrink:
            (program, setting), failure = shrunk(
                program, setting, failure, partial(self.of_ours, judge), min(SHRINKING, self.left())
            )
        with self.lock:
            path = written(self.arguments.found, seed, program, setting, failure)
            print(f"  {len(program.statements)} statements in {path}", flush=True)
            self.findings.append(
                {"seed": seed, "kind": failure.kind, "text": failure.text, "file": str(path)}
            )

    def of_ours(self, judge: Forked | Worker, program: Program, setting: Setting) -> Failure | None:
        """How a relative of what was found fails, unless torch fails so: a smaller program could be another's fault."""
        failure = judge.ask(program, setting, seconds=self.patience())
        judged = failure is not None and failure.kind not in UNJUDGED
        if judged and failure is not None and torch_fails(judge, program, setting, failure):
            return Failure(TORCH, failure.text)
        return failure


def parsed() -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1 << 30, help="at most so many programs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, help="interpreters that stay (default: 0 on the CPU, else 4)")
    parser.add_argument("--found", type=Path, default=Path("out/fuzz"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--oracle", choices=("both", "exact", "eager"), default="both")
    arguments = parser.parse_args()
    if arguments.workers is None:
        arguments.workers = 0 if arguments.device == "cpu" else 4
    if arguments.device != "cpu" and arguments.workers < 1:
        parser.error("a device needs --workers of at least 1: its driver does not survive a fork")
    return arguments


def main() -> int:
    """The command."""
    arguments = parsed()
    campaign = Campaign(arguments)
    if arguments.workers:
        campaign.share([Worker(arguments.device) for _ in range(arguments.workers)])
    else:
        warm()
        campaign.work(Forked(), campaign.cases())
    seconds = time.monotonic() - campaign.start
    counts = dict(campaign.counts)
    print(f"{sum(counts.values())} programs in {seconds:.0f} s, {campaign.judged} judged: {counts}")
    campaign.write()
    if not campaign.judged:
        print("no program was judged")
    return 1 if campaign.findings or not campaign.judged else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    sys.exit(main())
