"""How far a training step's gradients jump when eager itself rounds in another way.

    python -m benchmarks.zoo.roundings MODEL... [--channels-last] [--json FILE]

At the edge of a ReLU the last bit of a sum decides whether an element's gradient passes, so a gradient may jump between
two ways to sum. Eager in the other memory format, with two threads, or without oneDNN stands here in the place of the
compiled model and is judged by the same rule beside eager with one thread. Where that fails as well, the rule's first
inputs tell nothing about the compiler, and further draws decide (`child.judged`).
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.zoo.child import SEED, Step, exact_step, step
from benchmarks.zoo.models import Made, made
from tilewright import accuracy


def in_format(found: Made, channels_last: bool) -> Made:
    """A copy of a model that trains, its images and weights in a memory format."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    model = copy.deepcopy(found.model).to(memory_format=form).train()
    inputs = {n: t.contiguous(memory_format=form) if t.dim() == 4 else t for n, t in found.inputs.items()}
    return Made(model, inputs, found.kind, found.plan)


def _stepped(found: Made) -> Step:
    torch.manual_seed(SEED)
    model = copy.deepcopy(found.model)
    return step(model, model, dict(found.inputs))


def roundings(found: Made, channels_last: bool) -> dict[str, record.Facts]:
    """By way to round: how many gradients of eager fail beside eager with one thread, and the worst relative k."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    own, other = (in_format(found, c) for c in (channels_last, not channels_last))
    eager = _stepped(own).gradients
    torch.manual_seed(SEED)
    exact = exact_step(copy.deepcopy(own.model).double(), dict(own.inputs)).gradients
    ways = {"the other memory format": _stepped(other).gradients}
    torch.set_num_threads(2)
    ways["two threads"] = _stepped(own).gradients
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of graphics cards that torch has no build for
        with torch.backends.mkldnn.flags(enabled=False):
            ways["without oneDNN"] = _stepped(own).gradients
    torch.set_num_threads(threads)
    return {way: _facts(got, eager, exact) for way, got in ways.items()}


def _facts(got: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> record.Facts:
    verdicts = [accuracy.compare(*trio) for trio in zip(got, eager, exact, strict=True)]
    return {
        "gradients": len(verdicts),
        "failed": sum(not v.passed for v in verdicts),
        "worst_relative_k": max(v.relative_k for v in verdicts),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo.roundings", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("models", nargs="+")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    models: dict[str, Mapping[str, record.Facts]] = {}
    for name in arguments.models:
        models[name] = roundings(made(name), arguments.channels_last)
        print(name, models[name], flush=True)
        if arguments.json:
            head = record.provenance(1) | {"channels_last": arguments.channels_last}
            record.write_json(arguments.json, head | {"models": models})
    return 0


if __name__ == "__main__":
    sys.exit(main())
