"""Layers of fp32 on the CPU, beside eager and ONNX Runtime, each in a process of its own: what the benchmarks of
convolutions and of products share."""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.models import judge
from benchmarks.record import Facts
from tilewright import measure
from tilewright.measure import PreparedContestant, Unavailable, Workload

OURS = "tilewright"


class Layer(Protocol):
    """A layer, of which `depth` stand in a chain."""

    @property
    def depth(self) -> int:
        """How many."""
        ...

    def chain(self) -> nn.Module:
        """The layers."""
        ...

    def given(self) -> Tensor:
        """An input."""
        ...

    @property
    def flops(self) -> int:
        """Operations of one layer, two for each product."""
        ...


def run(layer: Layer, threads: int, seconds: float, names: tuple[str, ...]) -> Facts:
    """All figures of one layer: a dict per contestant."""
    torch.manual_seed(0)
    workload = Workload("layer", layer.chain().eval(), (layer.given(),))
    contestants = {name: measure.prepare(name, workload, threads) for name in names}
    ready = {name: item for name, item in contestants.items() if isinstance(item, PreparedContestant)}
    verdicts = judge(ready, workload, threads)
    timings = measure.compare(ready, workload, threads, seconds=seconds)
    facts: dict[str, Facts] = {}
    for name, item in contestants.items():
        if isinstance(item, Unavailable):
            facts[name] = {"not_available": item.reason}
            continue
        timing = timings[name]
        facts[name] = {
            "layer_us": {
                "min": timing.minimum / layer.depth * 1e6,
                "median": timing.median / layer.depth * 1e6,
            },
            "gflops": layer.flops * layer.depth / timing.median / 1e9,
            "accuracy": verdicts.get(name, {}),
            "coverage": item.coverage,
        }
        for other in timings:
            facts[name][f"speed_over_{other}"] = measure.ratio(timings[other], timing)
    return {"contestants": facts}


def line(name: str, facts: Facts) -> str:
    """One line of the table."""
    if "contestants" not in facts:
        return f"{name:26} {facts.get('failed')}"
    cells: list[str] = []
    contestants: Mapping[str, Mapping[str, object]] = facts["contestants"]  # type: ignore[assignment]
    for who, item in contestants.items():
        if "layer_us" not in item:
            cells.append(f"{who} -")
            continue
        time: Mapping[str, float] = item["layer_us"]  # type: ignore[assignment]
        verdict: Mapping[str, object] = item["accuracy"]  # type: ignore[assignment]
        word = "" if not verdict else f" k {verdict['of_eager']:.2f}{'' if verdict['passed'] else ' FAIL'}"
        cells.append(f"{who} {time['median']:7.1f} us (min {time['min']:7.1f}){word}")
    ours = contestants.get(OURS, {})
    speed = (
        f"  x ONNX Runtime {ours['speed_over_onnxruntime']:.2f}" if "speed_over_onnxruntime" in ours else ""
    )
    return f"{name:26} {'; '.join(cells)}{speed}"


def main(module: str, what: str | None, layers_by_name: Mapping[str, Layer]) -> None:
    """Run the layers of a benchmark, which is called by `module`'s name for each, and print a line of each."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(layers_by_name), default=list(layers_by_name))
    parser.add_argument("--against", default="eager,onnxruntime")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="timing per contestant")
    parser.add_argument("--child-json", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    names = (*[name for name in measure.PEERS if name in chosen.against.split(",")], OURS)
    if chosen.child_json is not None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(chosen.threads)
        facts = run(layers_by_name[chosen.only[0]], chosen.threads, chosen.seconds, names)
        record.write_json(chosen.child_json, facts)
        return
    layers: dict[str, Facts] = {}
    for name in chosen.only:
        arguments = ["--against", chosen.against, "--seconds", str(chosen.seconds), "--only", name]
        layers[name] = record.cold_child(module, arguments, chosen.threads)
        print(line(name, layers[name]), flush=True)
        if chosen.json is not None:
            record.write_json(chosen.json, record.provenance(chosen.threads) | {"layers": layers})
    speeds = [speed for facts in layers.values() if (speed := _speed(facts)) is not None]
    if speeds:
        mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
        print(f"x ONNX Runtime: geometric mean {mean:.3f} of {len(speeds)}, least {min(speeds):.3f}")


def _speed(facts: Facts) -> float | None:
    contestants: Mapping[str, Mapping[str, object]] = facts.get("contestants", {})  # type: ignore[assignment]
    found = contestants.get(OURS, {}).get("speed_over_onnxruntime")
    return found if isinstance(found, float) else None
