"""Random programs against the compiler.

    python -m benchmarks.fuzz --minutes N [--device cuda] [--seed S] [--found FOLDER] [--json FILE]

Each seed is one program of 5 to 40 statements (see `grow` and `ops`) and one setting: door, training, symbolic sizes,
options, and in some cases random decisions for every kernel. Eager judges values, gradients, what is written to inputs,
and layouts, by the fp64 rule (`judge`); with random decisions each kernel is judged by the exact oracle as well
(`exact`). What fails is shrunk and written to FOLDER as a file that runs by itself.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.fuzz.apart import apart
from benchmarks.fuzz.exact import judged_exactly
from benchmarks.fuzz.grow import grown
from benchmarks.fuzz.judge import Failure, Setting, judged
from benchmarks.fuzz.program import Program
from benchmarks.fuzz.shrink import shrunk

SHRINKING = 240.0
"""Most seconds that one finding is shrunk."""

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


def judge(program: Program, setting: Setting, device: str) -> Failure | None:
    """By the exact oracle where kernels are decided at random, else by eager."""
    if device != "cpu":
        torch.set_default_device(device)
    elif setting.schedules:
        return judged_exactly(program, setting)
    return judged(program, setting, device)


def torch_fails(program: Program, setting: Setting, failure: Failure, device: str) -> bool:
    """Whether what torch captures fails in the same way when it runs as it is."""
    plain = replace(setting, door="backend")
    upstream = apart(lambda: judged(program, plain, device, "aot_eager"))
    return upstream is not None and upstream.kind == failure.kind


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
    import tilewright.compiler
    import tilewright.door  # noqa: F401


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1 << 30, help="at most so many programs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--found", type=Path, default=Path("out/fuzz"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--oracle", choices=("both", "exact", "eager"), default="both")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    warm()
    limit = time.monotonic() + 60 * arguments.minutes
    counts: Counter[str] = Counter()
    findings: list[record.Facts] = []
    start = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        if time.monotonic() > limit:
            break
        program = grown(seed)
        setting = setting_of(seed, program)
        if arguments.oracle != "both":
            setting = replace(setting, schedules=seed + 1 if arguments.oracle == "exact" else 0)
        failure = apart(lambda: judge(program, setting, arguments.device))  # noqa: B023
        if failure is not None and torch_fails(program, setting, failure, arguments.device):
            counts["torch's own"] += 1
            continue
        counts[failure.kind if failure else "right"] += 1
        if sum(counts.values()) % 25 == 0:
            print(f"{sum(counts.values())} programs, {time.monotonic() - start:.0f} s", flush=True)
        if failure is None:
            continue
        print(f"seed {seed}: {failure.kind}: {failure.text[:300]}", flush=True)
        if not arguments.no_shrink:
            (program, setting), failure = shrunk(
                program,
                setting,
                failure,
                lambda p, s: apart(lambda: judge(p, s, arguments.device)),
                SHRINKING,
            )
        path = written(arguments.found, seed, program, setting, failure)
        print(f"  {len(program.statements)} statements in {path}", flush=True)
        findings.append({"seed": seed, "kind": failure.kind, "text": failure.text, "file": str(path)})
    seconds = time.monotonic() - start
    print(f"{sum(counts.values())} programs in {seconds:.0f} s: {dict(counts)}")
    if arguments.json:
        facts = record.provenance(1) | {
            "device": arguments.device,
            "seconds": seconds,
            "counts": dict(counts),
        }
        record.write_json(arguments.json, facts | {"found": findings})
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
