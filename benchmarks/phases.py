"""`python -m benchmarks.phases --json FILE`: how much of the time of a command its named phases explain.

Each command is a process of its own, `compile` the first time with an empty cache. For `compile` and `run`, the phases
are held against the wall time of the process as its parent sees it; for `bench`, which times for as long as it is told,
against the time of building and of the first call. What a command calls `other` explains nothing. Of two runs with a
warm cache the shorter one is kept, which other processes disturbed less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from benchmarks import record, warm_start
from benchmarks.record import Facts

LEAST = 0.97
PROCESS_SECONDS = 600
Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Tagger(nn.Module):
    """A recurrent layer over many steps, which stay a loop, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = nn.LSTM(24, 32, batch_first=True)
        self.tags = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tags(self.reads(x)[0])


def small() -> Made:
    """A product and a norm."""
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.LayerNorm(32)), (torch.randn(4, 32),)


def tagger() -> Made:
    """Two texts of 300 steps."""
    return Tagger(), (torch.randn(2, 300, 24),)


PYTHON: Mapping[str, str] = {
    "small": "benchmarks.phases:small",
    "tagger with a loop": "benchmarks.phases:tagger",
    "transformer encoder": "benchmarks.warm_start:encoder",
}
EXPORTED: Mapping[str, Callable[[], Made]] = {
    "text line classifier": warm_start.classifier,
    "tagger": tagger,
}
FILES = ("ocr/detection.onnx",)
"""Of the demo, where they are."""
VERBS: Mapping[str, tuple[str, ...]] = {
    "compile": (),
    "run": (),
    "bench": ("--against", "none", "--seconds", "0.2"),
}


def timed(verb: str, model: str, folder: Path, *more: str) -> Facts:
    """One command: its wall time, how much of that is explained, and the longest phases."""
    path = folder / "told.json"
    command = [sys.executable, "-m", "tilewright", verb, model, *VERBS[verb], *more, "--json", str(path)]
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=record.ROOT, capture_output=True, text=True, check=False, timeout=PROCESS_SECONDS
    )
    wall = time.perf_counter() - start
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["it ended"])[-1]}
    told = json.loads(path.read_text(encoding="utf-8"))
    whole = told["seconds"] if verb == "bench" else wall
    phases: dict[str, float] = {}
    for phase in told["phases"]:
        phases[phase["name"]] = phases.get(phase["name"], 0.0) + phase["seconds"]
    longest = sorted(phases, key=lambda name: -phases[name])[:5]
    return {
        "seconds": round(whole, 3), "explained": round(sum(phases.values()) / whole, 4),
        "longest": {name: round(phases[name], 3) for name in longest},
    }  # fmt: skip


def shorter(verb: str, model: str, folder: Path) -> Facts:
    """Of two runs."""
    return min(
        (timed(verb, model, folder) for _ in range(2)), key=lambda f: float(str(f.get("seconds", "inf")))
    )


def of_model(model: str, folder: Path, *, keeps: bool) -> Facts:
    """All verbs on a model, and on an artifact of it if it `keeps` one."""
    found: Facts = {"compile, cold": timed("compile", model, folder)}
    found |= {verb: shorter(verb, model, folder) for verb in VERBS}
    if keeps:
        artifact = str(folder / "model.tw")
        found["compile -o"] = timed("compile", model, folder, "-o", artifact)
        found |= {f"{verb}, artifact": shorter(verb, artifact, folder) for verb in VERBS}
    return found


def exported(make: Callable[[], Made], path: Path) -> str:
    """The file of a model."""
    model, inputs = make()
    torch.onnx.export(model.eval(), inputs, os.fspath(path), dynamo=False)
    return str(path)


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    models: dict[str, Facts] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        paths = [str(record.ROOT / "src"), str(record.ROOT), os.environ.get("PYTHONPATH", "")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "TILEWRIGHT_CACHE_DIR": str(folder / "cache")}
        wanted = {name: (model, True) for name, model in PYTHON.items()}
        for name, make in EXPORTED.items():
            wanted[f"{name}, ONNX"] = (exported(make, folder / f"{name}.onnx"), True)
        wanted |= {f: (str(record.MODELS / f), False) for f in FILES if (record.MODELS / f).exists()}
        for name, (model, keeps) in wanted.items():
            models[name] = of_model(model, folder, keeps=keeps)
            print(name, json.dumps(models[name]), flush=True)
    shares = [f.get("explained") for m in models.values() for f in m.values() if isinstance(f, dict)]
    least = min((s if isinstance(s, float) else 0.0 for s in shares), default=0.0)
    print(f"at least {least:.1%} explained ({LEAST:.0%} wanted)")
    facts: Facts = {"load": list(os.getloadavg()), "least": least, "enough": least >= LEAST, "models": models}
    if arguments.json:
        record.write_json(arguments.json, {**record.provenance(torch.get_num_threads()), **facts})


if __name__ == "__main__":
    main()
