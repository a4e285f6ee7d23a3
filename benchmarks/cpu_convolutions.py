"""`python -m benchmarks.cpu_convolutions --json FILE`: convolutions of fp32 on the CPU, beside eager and ONNX Runtime.

Each layer stands in a chain of several with weights of their own, as in a network: one weight alone would stay in a
cache, and a peer that turns its images around would do so for each layer. Times are of one layer of its chain. All
contestants run in turn, in one process per layer.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.models import judge
from benchmarks.record import Facts
from tilewright import measure
from tilewright.measure import PreparedContestant, Unavailable, Workload

OURS = "tilewright"


@dataclass(frozen=True)
class Layer:
    """Channels, the side of the images, the side of the kernel, groups, images, and how many stand in a chain."""

    channels: int
    side: int
    kernel: int = 3
    groups: int = 1
    images: int = 1
    depth: int = 8

    def chain(self) -> nn.Module:
        """The layers, with biases and ReLU."""
        layers: list[nn.Module] = []
        for _ in range(self.depth):
            convolution = nn.Conv2d(
                self.channels, self.channels, self.kernel, padding=self.kernel // 2, groups=self.groups
            )
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            layers += [convolution, nn.ReLU()]
        return nn.Sequential(*layers)

    def image(self) -> Tensor:
        """An input."""
        return torch.randn(self.images, self.channels, self.side, self.side)

    @property
    def flops(self) -> int:
        """Operations of one layer, two for each product."""
        return 2 * self.images * self.channels * self.side**2 * self.channels // self.groups * self.kernel**2


LAYERS: Mapping[str, Layer] = {
    "3x3 32 at 112": Layer(32, 112),
    "3x3 64 at 56": Layer(64, 56),
    "3x3 96 at 48": Layer(96, 48),
    "3x3 128 at 28": Layer(128, 28),
    "3x3 256 at 14": Layer(256, 14),
    "3x3 512 at 7": Layer(512, 7, depth=4),
    "3x3 100 at 37, 3 images": Layer(100, 37, images=3),
    "1x1 256 at 28": Layer(256, 28, kernel=1),
    "1x1 64 at 56": Layer(64, 56, kernel=1),
    "depthwise 3x3 32 at 112": Layer(32, 112, groups=32),
    "depthwise 3x3 144 at 56": Layer(144, 56, groups=144),
    "depthwise 3x3 192 at 28": Layer(192, 28, groups=192),
    "depthwise 3x3 384 at 14": Layer(384, 14, groups=384),
    "depthwise 3x3 960 at 7": Layer(960, 7, groups=960),
    "depthwise 5x5 120 at 28": Layer(120, 28, kernel=5, groups=120),
}


def run(layer: Layer, threads: int, seconds: float, names: tuple[str, ...]) -> Facts:
    """All figures of one layer: a dict per contestant."""
    torch.manual_seed(0)
    workload = Workload("layer", layer.chain().eval(), (layer.image(),))
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


def main() -> None:
    """Run the layers and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--against", default="eager,onnxruntime")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="timing per contestant")
    parser.add_argument("--child-json", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    names = (*[name for name in measure.PEERS if name in chosen.against.split(",")], OURS)
    if chosen.child_json is not None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(chosen.threads)
        facts = run(LAYERS[chosen.only[0]], chosen.threads, chosen.seconds, names)
        record.write_json(chosen.child_json, facts)
        return
    layers: dict[str, Facts] = {}
    for name in chosen.only:
        arguments = ["--against", chosen.against, "--seconds", str(chosen.seconds), "--only", name]
        layers[name] = record.cold_child("benchmarks.cpu_convolutions", arguments, chosen.threads)
        print(line(name, layers[name]), flush=True)
        if chosen.json is not None:
            record.write_json(chosen.json, record.provenance(chosen.threads) | {"layers": layers})


if __name__ == "__main__":
    sys.exit(main())
