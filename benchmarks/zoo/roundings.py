"""How far a training step's gradients jump when eager itself rounds in another way.

    python -m benchmarks.zoo.roundings MODEL... [--channels-last] [--json FILE]

Eager in other ways to round (`chaos.ways`) stands here in the place of the compiled model and is judged by the same
rule beside eager with one thread. Where that fails as well, the rule's first inputs tell nothing about the compiler,
and further draws decide (`child.judged`).
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
from benchmarks.zoo import chaos
from benchmarks.zoo.draws import Step
from benchmarks.zoo.models import Made, made
from benchmarks.zoo.runs import SEED, exact_step, step
from tilewright import accuracy


def _stepped(found: Made) -> Step:
    torch.manual_seed(SEED)
    model = copy.deepcopy(found.model)
    return step(model, model, dict(found.inputs))


def _in_format(found: Made, channels_last: bool) -> Made:
    model = chaos.in_format(found.model, channels_last).train()
    return Made(model, chaos.inputs_in_format(found.inputs, channels_last), found.kind, found.plan)


def roundings(found: Made, channels_last: bool) -> dict[str, record.Facts]:
    """By way to round: how many gradients of eager fail beside eager with one thread, and the worst relative k."""
    own, other = (_in_format(found, c) for c in (channels_last, not channels_last))
    with chaos.rounding(""):
        eager = _stepped(own).gradients
    torch.manual_seed(SEED)
    exact = exact_step(copy.deepcopy(own.model).double(), dict(own.inputs)).gradients
    ways: dict[str, record.Facts] = {}
    for way in chaos.ways(found.pixels):
        if way == chaos.CAPTURED:
            continue
        with chaos.rounding(way):
            ways[way] = _facts(_stepped(other if way == chaos.FORMAT else own).gradients, eager, exact)
    return ways


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
