"""`python -m benchmarks.warm_start`: from a started process to the first result, with everything compiled before.

Each figure is the median over fresh processes of the seconds from the end of `import torch` to the first result: the
imports of the contestant, loading, the first call. For the ONNX file, torch's parts that our imports need (its sizes as
symbols, with sympy) are imported before the clock starts; `with_parts_of_torch` has them on the clock too.
`cpu_seconds` are those of all threads of the process in that time, which other processes do not lengthen by much.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import record
from benchmarks.record import Facts

PROCESS_SECONDS = 300

_START = """
import json, sys, time
import torch
model, inputs = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
"""
_END = """
done, worked = time.perf_counter(), time.process_time() - began
made = list(made) if isinstance(made, (tuple, list)) else [made]
sums = [float(torch.as_tensor(x).double().sum()) for x in made]
print(json.dumps({"seconds": done - start, "cpu_seconds": worked, "parts": parts, "sums": sums}))
"""
_PARTS = """
import torch._functorch._aot_autograd.schemas, torch.fx.experimental.symbolic_shapes
"""
CONTESTANTS: Mapping[str, tuple[str, str, str]] = {
    "artifact": (
        "tw",
        "",
        """
import tilewright
loaded = tilewright.load(model, rebuild=False)
opened = time.perf_counter()
made = loaded(*inputs)
parts = {"import and load": opened - start, "first call": time.perf_counter() - opened}
""",
    ),
    "ONNX file": (
        "onnx",
        _PARTS,
        """
import tilewright
compile = tilewright.compile
opened = time.perf_counter()
made = compile(model)(*inputs)
parts = {"import": opened - start, "compile and first call": time.perf_counter() - opened}
""",
    ),
    "ONNX Runtime": (
        "onnx",
        "",
        """
import onnxruntime
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
opened = time.perf_counter()
names = [i.name for i in session.get_inputs()]
made = session.run(None, {n: x.numpy() for n, x in zip(names, inputs)})
parts = {"import and load": opened - start, "first call": time.perf_counter() - opened}
""",
    ),
}
"""The file that each takes, what is imported before the clock starts, and what is on the clock."""


class Classifier(nn.Module):
    """A small network of depthwise convolutions on lines of text, as those that tell how a line is turned."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (
            (16, 16, 1),
            (16, 24, 2),
            (24, 24, 1),
            (24, 40, 2),
            (40, 40, 1),
            (40, 48, 1),
            (48, 96, 2),
            (96, 96, 1),
        )
        self.stem = _convolution(3, 16, 3, 2)
        self.body = nn.Sequential(
            *(
                nn.Sequential(_convolution(a, a, 3, s, groups=a), _convolution(a, b, 1, 1))
                for a, b, s in sizes
            )
        )
        self.head = nn.Linear(96, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3))).softmax(-1)


def _convolution(a: int, b: int, kernel: int, stride: int, groups: int = 1) -> nn.Module:
    layer = nn.Conv2d(a, b, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(b), nn.Hardswish())


def classifier() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Six lines of text."""
    return Classifier(), (torch.randn(6, 3, 48, 192),)


def encoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Six layers of a transformer, 384 wide, on 128 places."""
    layer = nn.TransformerEncoderLayer(384, 12, 1536, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), (torch.randn(1, 128, 384),)


MODELS: Mapping[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "text line classifier": classifier,
    "transformer encoder": encoder,
}


def prepare(name: str, folder: Path) -> Mapping[str, Path]:
    """The files of a model: an ONNX file, an artifact of that, inputs."""
    import tilewright

    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    paths = {kind: folder / f"model.{kind}" for kind in ("onnx", "tw", "pt")}
    torch.save(inputs, paths["pt"])
    torch.onnx.export(model.eval(), inputs, os.fspath(paths["onnx"]), dynamo=False)
    compiled = tilewright.compile(paths["onnx"])
    compiled(*inputs)
    tilewright.save(compiled, paths["tw"])
    return paths


def start(name: str, paths: Mapping[str, Path], *, parts_on_the_clock: bool = False) -> Facts:
    """One fresh process."""
    kind, before, body = CONTESTANTS[name]
    clock = "start, began = time.perf_counter(), time.process_time()\n"
    code = _START + (clock + before if parts_on_the_clock else before + clock) + body + _END
    run = subprocess.run(
        [sys.executable, "-c", code, paths[kind], paths["pt"]], capture_output=True, text=True, check=False,
        timeout=PROCESS_SECONDS,
    )  # fmt: skip
    if run.returncode:
        return {"failed": (run.stderr.strip().splitlines() or ["it ended"])[-1]}
    return json.loads(run.stdout.strip().splitlines()[-1])


def figures(name: str, paths: Mapping[str, Path], rounds: int) -> Facts:
    """Medians over fresh processes, the first of which only warms caches."""
    runs = [start(name, paths) for _ in range(rounds + 1)][1:]
    failed = next((r for r in runs if "failed" in r), None)
    if failed is not None:
        return failed
    seconds = [float(str(r["seconds"])) for r in runs]
    facts: Facts = {
        "seconds": statistics.median(seconds), "least": min(seconds),
        "cpu_seconds": statistics.median(float(str(r["cpu_seconds"])) for r in runs), "all": seconds,
        "parts": sorted(runs, key=lambda r: float(str(r["seconds"])))[len(runs) // 2]["parts"], "sums": runs[0]["sums"],
    }  # fmt: skip
    if CONTESTANTS[name][1]:
        more = [start(name, paths, parts_on_the_clock=True) for _ in range(rounds)]
        facts["with_parts_of_torch"] = statistics.median(float(str(r["seconds"])) for r in more)
    return facts


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="processes per figure")
def main(path: Path | None, threads: int, rounds: int) -> None:
    """Start every contestant on every model and print one table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    facts: dict[str, Facts] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ |= {
            "TILEWRIGHT_CACHE_DIR": os.fspath(folder / "cache"), "OMP_NUM_THREADS": str(threads),
            "PYTHONPYCACHEPREFIX": os.fspath(folder / "bytecode"),
            "PYTHONPATH": os.pathsep.join([str(record.ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
        for name in MODELS:
            paths = prepare(name, folder)
            facts[name] = {each: figures(each, paths, rounds) for each in CONTESTANTS}
            facts[name]["bytes"] = {kind: p.stat().st_size for kind, p in paths.items() if kind != "pt"}
    table = Table(title="seconds from torch to the first result, warm", title_justify="left")
    for column in ("", *CONTESTANTS):
        table.add_column(column, justify="right")
    for name, item in facts.items():
        cells = [item[each] for each in CONTESTANTS]
        texts = [
            f"{c['seconds']:.3f}" if "seconds" in c else str(c["failed"])
            for c in cells
            if isinstance(c, dict)
        ]
        table.add_row(name, *texts)
    Console().print(table)
    if path is not None:
        record.write_json(path, {**record.provenance(threads), "models": facts})


if __name__ == "__main__":
    main()
