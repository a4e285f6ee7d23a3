"""`python -m benchmarks.convolutions`: convolutions of the library with what stands behind them, on a GPU.

The eleven layers of ResNet-34 (`C1` to `C11`) and ten of ResNet-50, fp16, channels innermost. Each row has microseconds
of one run in a replayed graph: the convolution alone; with a bias, as torch adds it; with bias and ReLU, and with a sum
before it, as torch's ops; and the library's own forms of both in one pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import record

aten = torch.ops.aten
RUNS, REPLAYS = 20, 9


@dataclass(frozen=True)
class Layer:
    """Channels in and out, the side of the input, the side of the kernel, stride, padding."""

    name: str
    channels: int
    features: int
    side: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0


LAYERS = (
    Layer("C1", 3, 64, 224, 7, 2, 3), Layer("C2", 64, 64, 56, 3, 1, 1), Layer("C3", 64, 128, 56, 3, 2, 1),
    Layer("C4", 128, 128, 28, 3, 1, 1), Layer("C5", 128, 256, 28, 3, 2, 1), Layer("C6", 256, 256, 14, 3, 1, 1),
    Layer("C7", 256, 512, 14, 3, 2, 1), Layer("C8", 512, 512, 7, 3, 1, 1), Layer("C9", 64, 128, 56, 1, 2),
    Layer("C10", 128, 256, 28, 1, 2), Layer("C11", 256, 512, 14, 1, 2), Layer("R1", 64, 64, 56),
    Layer("R2", 64, 256, 56), Layer("R3", 256, 64, 56), Layer("R4", 256, 128, 56), Layer("R5", 512, 128, 28),
    Layer("R6", 128, 512, 28), Layer("R7", 1024, 256, 14), Layer("R8", 256, 1024, 14), Layer("R9", 2048, 512, 7),
    Layer("R10", 512, 2048, 7),
)  # fmt: skip


def microseconds(run: Callable[[], object]) -> float:
    """Device time of one run: the median of several replays of a graph of some."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(RUNS):
                run()
    times: list[float] = []
    for _ in range(REPLAYS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / RUNS)
    return statistics.median(times)


def ways(layer: Layer, batch: int) -> dict[str, Callable[[], Tensor]]:
    """What is timed of a layer, by name."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").half().to(memory_format=torch.channels_last)

    x = drawn(batch, layer.channels, layer.side, layer.side)
    w = drawn(layer.features, layer.channels, layer.kernel, layer.kernel) / 30
    b = torch.randn(layer.features, device="cuda").half()
    s, p = layer.stride, layer.padding
    z = torch.randn_like(torch.conv2d(x, w, b, s, p))
    window = ((s, s), (p, p), (1, 1), 1)
    return {
        "alone": lambda: torch.conv2d(x, w, None, s, p),
        "with bias": lambda: torch.conv2d(x, w, b, s, p),
        "bias, relu": lambda: torch.relu_(torch.conv2d(x, w, b, s, p)),
        "bias, sum, relu": lambda: torch.relu_(torch.conv2d(x, w, b, s, p).add_(z)),
        "fused bias, relu": lambda: aten.cudnn_convolution_relu(x, w, b, *window),
        "fused bias, sum, relu": lambda: aten.cudnn_convolution_add_relu(x, w, z, 1.0, b, *window),
    }


def main() -> None:
    """Time every layer at every batch size and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batches", default="1,32,64")
    parser.add_argument("--search", action="store_true", help="torch.backends.cudnn.benchmark")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = given.search
    rows: list[record.Facts] = []
    for batch in map(int, given.batches.split(",")):
        for layer in LAYERS:
            times = {name: round(microseconds(run), 2) for name, run in ways(layer, batch).items()}
            rows.append({"layer": layer.name, "batch": batch, "us": times})
            print(layer.name, batch, times, flush=True)
    if given.json is not None:
        facts = record.provenance(0) | {"device": torch.cuda.get_device_name(), "layers": rows}
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
