"""`python -m benchmarks.gluon --json FILE`: loops of the machine by hand in Gluon, beside the text Triton compiles.

Would a printer of Gluon pay? A product and an attention are written by hand as the best kernels for Hopper are: a warp
that loads through a ring of buffers, warps that keep a product under way while they do something else. Beside them, in
one process: cuBLAS, cuDNN, flash attention, and our generated kernels, which leave all that to Triton. In replayed
graphs over cold inputs, in turn; every result is held against fp32. A kernel that hangs or kills the process costs a
new process and is left out from then on. With `--device cpu` the kernels by hand are built for sm_90 and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import gpu_report, record
from benchmarks.gpu_clock import release
from benchmarks.record import Facts

LOST = 3
"""Exit code of a child whose device does not answer any more."""

LATER = 30.0
"""Seconds after the end of the budget by which the last row has ended."""

STILL = 60.0
"""Seconds without news after which a child is taken to hang: building and timing take less."""


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = gpu_report.parser(__doc__)
    parser.add_argument("--budget", type=float, default=90.0, metavar="SECONDS", help="no row starts later")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(rounds=20)
    return parser.parse_args(given)


# --- without a GPU ---------------------------------------------------------------


def count_all() -> dict[str, Facts]:
    """What is in the machine code of each kernel by hand, built for a GPU that is not here."""
    from benchmarks.gluon.building import counts
    from benchmarks.gluon.variants import ATTENTIONS, PRODUCTS

    builds = {f"product: {name}": variant.build for name, variant in PRODUCTS.items()}
    for causal, word in ((False, "full"), (True, "causal")):
        for name, variant in ATTENTIONS.items():
            if variant.persistent:  # the same code as with a tile a program
                builds[f"attention {word}: {name}"] = lambda v=variant, c=causal: v.build(c)
    found: dict[str, Facts] = {}
    for name, build in builds.items():
        start = time.perf_counter()
        try:
            found[name] = counts(build())
        except Exception as error:  # noqa: BLE001 - what does not build is told beside the others
            print(f"{name}:\n{traceback.format_exc()}", file=sys.stderr)
            found[name] = {"not_available": f"{type(error).__name__}: {error}"[:300]}
        found[name] |= {"build_s": time.perf_counter() - start}
        print(name, json.dumps(found[name]), flush=True)
    return found


# --- with one --------------------------------------------------------------------


def child(arguments: argparse.Namespace) -> int:
    """Run all rows that the file does not have yet; the file also says who is not to run."""
    from benchmarks.gluon import rows

    state: dict[str, Facts] = json.loads(arguments.child.read_text(encoding="utf-8"))
    device = torch.device(arguments.device)
    done: dict[str, Facts] = dict(state["rows"])  # type: ignore[arg-type]
    state["device"] = gpu_report.device_facts(device)
    for name in arguments.only or list(rows.ROWS):
        if done.get(name, {}).get("done"):
            continue

        def write(facts: Facts, name: str = name) -> None:
            done[name] = facts
            record.write_json(arguments.child, state | {"rows": done})

        if time.time() > float(state["until"]):  # type: ignore[arg-type]
            write({"not_available": "no time left", "done": True})
            continue
        try:
            rows.run(rows.ROWS[name](), device, arguments.rounds, state["refused"], write)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - the next row may do, in this process or in another
            print(f"{name}, {done.get(name, {}).get('trying', '')}:\n{traceback.format_exc()}", flush=True)
            write(done.get(name, {}) | {"failed": traceback.format_exc()})
            if isinstance(error, rows.Lost) or not answers(device):
                os._exit(LOST)  # else the end of the process would wait for the device
        write(done[name] | {"done": True})
        release(device)
    return 0


def answers(device: torch.device) -> bool:
    """Whether the device can still be used by this process."""
    from benchmarks.gluon import rows

    try:
        rows.check_device(device)
    except rows.Lost:
        return False
    return True


def measure_all(arguments: argparse.Namespace) -> dict[str, Facts]:
    """All rows, in as many processes as it takes."""
    head = gpu_report.provenance(torch.device("cpu"), arguments.commit) | {"rounds": arguments.rounds}
    until = time.time() + arguments.budget
    state: dict[str, object] = {"rows": {}, "refused": {}, "until": until}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.json"
        for _ in range(8):
            record.write_json(path, state)  # type: ignore[arg-type]
            code = run_child(arguments, path, until, head)
            state = json.loads(path.read_text(encoding="utf-8"))
            found: dict[str, Facts] = state["rows"]  # type: ignore[assignment]
            if arguments.json is not None:
                record.write_json(arguments.json, head | state)  # type: ignore[operator]
            if code == 0 or time.time() > until:
                break
            blame(state, code)
    return found


def run_child(arguments: argparse.Namespace, path: Path, until: float, head: Facts) -> int:
    """A process that goes through the rows that are left; its exit code."""
    command = [sys.executable, "-m", "benchmarks.gluon", "--child", str(path)]
    command += [f"--device={arguments.device}", f"--rounds={arguments.rounds}"]
    command += [f"--only={name}" for name in arguments.only]
    process = subprocess.Popen(command, cwd=record.ROOT)
    while process.poll() is None:
        time.sleep(0.2)
        if time.time() > min(until + LATER, path.stat().st_mtime + STILL):
            process.kill()
            process.wait()
            return -1
        if arguments.json is not None:
            found = json.loads(path.read_text(encoding="utf-8"))
            record.write_json(arguments.json, head | found | {"unfinished": True})
    return process.returncode


def blame(state: dict[str, object], code: int) -> None:
    """Leave out from now on who was tried when the process ended, and do that row again; where nobody was, the row is
    as good as done."""
    found: dict[str, Facts] = state["rows"]  # type: ignore[assignment]
    refused: dict[str, str] = state["refused"]  # type: ignore[assignment]
    for facts in found.values():
        if facts.get("done"):
            continue
        if "trying" in facts:
            reason = str(facts.get("failed", f"the process ended with code {code}")).strip().splitlines()[-1]
            refused[str(facts["trying"])] = reason[:300]
        else:
            facts["done"] = True


def summary(found: Mapping[str, Facts]) -> str:
    """A table of each row."""
    texts: list[str] = []
    for name, facts in found.items():
        contestants: Mapping[str, Facts] = facts.get("contestants", {})  # type: ignore[assignment]
        lines = [
            [
                who,
                f"{f['median_us']:.1f}",
                f"{f['TFLOP_per_s']:.0f}",
                f"{f['error']:.1e}",
                "" if f["right"] else "WRONG",
            ]
            if "median_us" in f
            else [who, "-", "-", "-", str(f.get("not_available", "-"))[:60]]
            for who, f in sorted(contestants.items(), key=lambda item: item[1].get("median_us", 1e9))  # type: ignore[arg-type,return-value]
        ]
        head = f"{name}  {facts.get('not_available', facts.get('failed', ''))!s:.200}".rstrip()
        texts.append(gpu_report.text_table(head, ["contestant", "us", "TFLOP/s", "error", ""], lines))
        told = ("best_by_hand", "best_of_ours", "best_library", "hand_over_ours", "hand_over_library")
        texts.append("  ".join(f"{key}: {facts[key]}" for key in told if key in facts) + "\n")
    return "\n".join(texts)


def main(given: Sequence[str] | None = None) -> int:
    """Run, print tables, write the JSON."""
    warnings.filterwarnings("ignore")
    arguments = parse(given)
    device = torch.device(arguments.device)
    if arguments.child is not None:
        return child(arguments)
    if device.type != "cuda":
        found = count_all()
        if arguments.json is not None:
            record.write_json(
                arguments.json, gpu_report.provenance(device, arguments.commit) | {"kernels": found}
            )
        return int(any("not_available" in facts for facts in found.values()))
    if reason := gpu_report.unusable(device):
        print(reason, file=sys.stderr)
        return 2
    print(summary(measure_all(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
