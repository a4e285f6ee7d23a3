"""Keeps a compiled model in a file, and runs it in another process that compiles nothing.

    python examples/artifact.py

The second process has no compiler on its PATH, and asks `load` to refuse rather than to build again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import tilewright

ELSEWHERE = """
import sys, torch, tilewright
model = tilewright.load(sys.argv[1], rebuild=False)
x = torch.load(sys.argv[2], weights_only=True)
torch.save(model(x), sys.argv[3])
print(tilewright.stats().graphs, "graphs were compiled here;", model.inputs[0])
"""


def main() -> float:
    """The largest difference between what both processes compute."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).eval()
    x = torch.randn(5, 32)
    compiled = tilewright.compile(model, (x,), dims={"input": {0: "batch"}})
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        paths = [Path(place) / name for name in ("model.tw", "x.pt", "y.pt")]
        tilewright.save(compiled, paths[0])
        torch.save(x, paths[1])
        environment = {**os.environ, "PATH": place}
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, *map(str, paths)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        print(done.stdout.strip())
        return float((torch.load(paths[2], weights_only=True) - model(x)).abs().max())


if __name__ == "__main__":
    print(f"the largest difference is {main():.2g}")
