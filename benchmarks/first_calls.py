"""`python -m benchmarks.first_calls --json FILE`: the first call at a new size, of one compiled model whose batch is
free: under CUDA graphs, beside the same without. Wall clock of the call and a synchronise. The library's own first
calls at these sizes were made before, by a model that is compiled for nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tilewright
from benchmarks import gpu_report, record
from benchmarks.record import Facts

SIZES = tuple(range(3, 33, 2))
WARM = (8, 16)
WIDTH, TOKENS, LAYERS = 512, 64, 4


def model_on(device: torch.device) -> nn.Module:
    """A small encoder."""
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(device).half().eval()


def first_calls_us(call: Callable[[Tensor], object], inputs: Sequence[Tensor]) -> list[float]:
    """Microseconds of one call with each input."""
    found = list[float]()
    for x in inputs:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(x)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e6)
    return found


def measure(device: torch.device) -> Facts:
    """All figures: of first calls and of second ones, without graphs and with them."""
    model = model_on(device)
    inputs = [torch.randn(n, TOKENS, WIDTH, device=device).half() for n in SIZES]
    warm = [torch.randn(n, TOKENS, WIDTH, device=device).half() for n in WARM for _ in range(3)]
    made: dict[str, Facts] = {}
    for name in ("library", "plain", "cuda graphs"):
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
        options: dict[str, Any] = {"cuda_graphs": name == "cuda graphs", "tune_seconds": 0}
        call = tilewright.compile(model, (warm[0],), dims={"src": {0: "batch"}}, options=options)
        for x in warm:
            call(x)
        first, second = first_calls_us(call, inputs), first_calls_us(call, inputs)
        made[name] = {
            "first_us": first, "second_us": second,
            "first_median_us": statistics.median(first), "second_median_us": statistics.median(second),
        }  # fmt: skip
        print(
            name,
            round(statistics.median(first)),
            round(statistics.median(second)),
            call.cuda_graphs,
            flush=True,
        )
    plain, graphs = (float(str(made[name]["first_median_us"])) for name in ("plain", "cuda graphs"))
    return {"sizes": list(SIZES), "ways": made, "graphs_over_plain": graphs / plain}


def main(arguments: Sequence[str]) -> None:
    """Time all, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    device = torch.device("cuda")
    if why := gpu_report.unusable(device):
        sys.exit(why)
    warnings.filterwarnings("ignore")
    # Torch's own layer in one op, which some torches cannot trace.
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        found = measure(device)
    print("graphs over plain", found["graphs_over_plain"])
    if given.json is not None:
        record.write_json(given.json, gpu_report.provenance(device, "") | found)


if __name__ == "__main__":
    main(sys.argv[1:])
