"""A fresh interpreter that makes or judges one program after the other: JSON lines in, JSON lines out (see
`workers`)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import sys
import warnings

import torch

import tilewright
from benchmarks.fuzz.exact import judged_exactly
from benchmarks.fuzz.grow import grown
from benchmarks.fuzz.judge import REFUSED, Failure, Setting, judged
from benchmarks.fuzz.program import read


def answer(asked: dict[str, str], device: str) -> Failure | None:
    """The verdict that is asked for. What compiles no graph was not judged."""
    program = read(asked["program"])
    setting = eval(asked["setting"], {"Setting": Setting})
    if setting.schedules and device == "cpu" and asked["backend"] == "tilewright":
        return judged_exactly(program, setting)
    before = tilewright.stats().graphs
    found = judged(program, setting, device, asked["backend"])
    if found is None and asked["backend"] == "tilewright" and tilewright.stats().graphs == before:
        return Failure(REFUSED, "no graph was compiled")
    return found


def main() -> None:
    """Answer until there are no more lines. What programs print goes to the error output."""
    device = sys.argv[1]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    if device != "cpu":
        torch.set_default_device(device)
        torch.ones(1).item()  # a device that is not there ends the worker here
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        if "seed" in asked:
            replies.write(json.dumps(repr(grown(asked["seed"]))) + "\n")
            replies.flush()
            continue
        try:
            found = answer(asked, device)
        except BaseException as error:  # noqa: BLE001 - a judge that fails is a finding as well
            found = Failure("crash", f"{type(error).__name__}: {str(error)[:600]}")
        with contextlib.suppress(BaseException):
            torch._dynamo.reset()
        replies.write(json.dumps([found.kind, found.text[:3000]] if found else []) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
