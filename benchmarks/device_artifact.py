"""`python -m benchmarks.device_artifact`: artifacts with GPU kernels, on a GPU (30 s). One process saves, others load.

Each model is saved twice: compiled on the GPU, and compiled on the CPU with the GPU as a named target. Whoever loads
must compile nothing: Triton is not imported there, the cache is empty, and no C++ compiler is found. Results of the
first are held against those of the process that saved (equal), results of the second against eager on the GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Tensor, ...], dict[str, dict[int, str]]]


def _layers() -> Made:
    model = nn.Sequential(
        nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 64), nn.Softmax(-1)
    )
    return model, (torch.randn(48, 256),), {"input": {0: "batch"}}


def _rows() -> Made:
    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)

    return Rows(), (torch.randn(33, 1000),), {}


def _image() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.AdaptiveAvgPool2d(1)
    )
    return model, (torch.randn(4, 3, 32, 32),), {}


MODELS: Mapping[str, Callable[[], Made]] = {"layers": _layers, "rows": _rows, "image": _image}

_LOAD = """
import json, sys
import torch
sys.modules["triton"] = None  # an import fails; torch, which asks whether it is there, finds nothing
import tilewright
path, inputs, results = sys.argv[1:]
loaded = tilewright.load(path, rebuild=False, trust=True)
with torch.no_grad():
    made = [loaded(*(x.cuda() for x in given)) for given in torch.load(inputs, weights_only=True)]
assert all(x.is_cuda for x in made), "it did not run on the GPU"
torch.save([x.cpu() for x in made], results)
stats = tilewright.stats()
print(json.dumps({"compiled": stats.triton + stats.units + stats.graphs}))
"""


def load(path: Path, inputs: Path, folder: Path) -> tuple[list[Tensor], str]:
    """The results of another process, and what is wrong with how they came about."""
    results = folder / "results.pt"
    environ = dict(os.environ) | {
        "TILEWRIGHT_CACHE_DIR": str(folder / "empty"),
        "CXX": "/nowhere",
        "PATH": "/nowhere",
    }
    run = subprocess.run(
        [sys.executable, "-c", _LOAD, path, inputs, results], env=environ, capture_output=True, text=True, check=False
    )  # fmt: skip
    if run.returncode:
        return [], run.stderr.strip() or "it ended"
    told = json.loads(run.stdout.strip().splitlines()[-1])
    return torch.load(results, weights_only=True), "" if not told["compiled"] else f"compiled: {told}"


def check(name: str, folder: Path) -> list[str]:
    """What is wrong with one model."""
    import tilewright
    from tilewright.runtime.cuda.device import gpu_target

    torch.manual_seed(0)
    model, inputs, dims = MODELS[name]()
    model.eval()
    calls = [inputs] if not dims else [inputs, tuple(torch.randn(31, *x.shape[1:]) for x in inputs)]
    torch.save(calls, folder / "inputs.pt")
    wrong: list[str] = []
    there = tilewright.compile(model.cuda(), tuple(x.cuda() for x in inputs), dims=dims, freeze=True)
    with torch.no_grad():
        ours = [there(*(x.cuda() for x in given)).cpu() for given in calls]
        eager = [model(*(x.cuda() for x in given)).cpu() for given in calls]
    tilewright.save(there, folder / "gpu.tw")
    here = tilewright.compile(model.cpu(), inputs, dims=dims, freeze=True)
    tilewright.save(here, folder / "target.tw", targets=[_preset(gpu_target(0).arch)])
    made, said = load(folder / "gpu.tw", folder / "inputs.pt", folder)
    if said or not all(map(torch.equal, made, ours)):
        apart = [float((a - b).abs().max()) for a, b in zip(made, ours, strict=True)] if not said else []
        wrong.append(f"{name}, compiled on the GPU: {said or f'other results than before, by {apart}'}")
    made, said = load(folder / "target.tw", folder / "inputs.pt", folder)
    if said or not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(made, eager, strict=True)):
        wrong.append(f"{name}, with the GPU as a target: {said or 'other results than eager'}")
    return wrong


def _preset(arch: str) -> str:
    from tilewright.target import PRESETS

    same = [t for t in PRESETS.values() if t.backend == "cuda" and int(t.arch) <= int(arch)]
    return max(same, key=lambda t: int(t.arch)).name


def main() -> int:
    """Check all models; one line for each thing that is wrong."""
    wrong: list[str] = []
    for name in MODELS:
        with tempfile.TemporaryDirectory() as place:
            wrong += check(name, Path(place))
    for line in wrong:
        print(line)
    print(f"{len(MODELS)} models, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
