"""What the GPU benchmarks share around their figures: options, the record of the device, plain tables."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.record import Facts

Judge = Callable[[Sequence[float]], tuple[str, bool]]
"""Puts measured values into words and says whether they are what is wanted."""

PACKAGES = ("triton", "torchvision", "timm", "transformers")


@dataclass(frozen=True)
class Figure:
    """One line of the table of wanted figures; `passed` is None where nothing was measured."""

    name: str
    value: str
    wanted: str
    passed: bool | None

    def facts(self) -> Facts:
        """As it is recorded."""
        return {"figure": self.name, "value": self.value, "wanted": self.wanted, "passed": self.passed}

    def row(self) -> tuple[str, str, str, str]:
        """As it is printed."""
        word = {True: "pass", False: "MISS", None: "not measured"}[self.passed]
        return self.name, self.value, self.wanted, word


def figure(
    name: str, values: Sequence[float], judge: Callable[[Sequence[float]], tuple[str, bool]], wanted: str
) -> Figure:
    """A figure from values, which `judge` puts into words and compares with what is wanted."""
    if not values:
        return Figure(name, "-", wanted, None)
    value, passed = judge(values)
    return Figure(name, value, wanted, passed)


def text_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table: the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([first, *rest]).rstrip()

    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    return "\n".join([title, line(columns), rule, *map(line, rows), ""])


def grouped(reasons: Sequence[tuple[str, str]], most: int = 24, width: int = 180) -> str:
    """Places and reasons as lines, each reason once, with how often and where it stood first."""
    places: dict[str, list[str]] = {}
    for place, reason in reasons:
        places.setdefault(reason, []).append(place)
    made = [
        f"  {found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''}: {reason}"[:width]
        for reason, found in places.items()
    ]
    more = [f"  and {len(made) - most} more reasons"] if len(made) > most else []
    return "\n".join([*made[:most], *more])


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all GPU benchmarks have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--device", default="cuda", help="cuda, or cpu for a smoke test")
    made.add_argument("--json", type=Path, help="write all figures there, after each row")
    made.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="some rows; may be repeated"
    )
    made.add_argument("--rounds", type=int, default=50, help="samples per contestant")
    made.add_argument("--commit", default="", help="recorded instead of the checkout's own")
    return made


def child_options(made: argparse.ArgumentParser) -> None:
    """The options of benchmarks that run in children."""
    made.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="end of the whole run")
    made.add_argument("--build", type=float, metavar="SECONDS", help="end of building; 60 %% of the budget")
    made.add_argument("--jobs", type=int, help="children at once; as many as there are rows")
    made.add_argument("--gpus", type=int, default=1, help="devices between which children are dealt out")
    made.add_argument("--child", help=argparse.SUPPRESS)
    made.add_argument("--child-json", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--build-until", type=float, help=argparse.SUPPRESS)


def provenance(device: torch.device, commit: str) -> Facts:
    """Device, versions, command, commit and date."""
    facts = record.provenance(torch.get_num_threads())
    facts["commit"] = commit or facts["commit"]
    versions: Facts = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return facts | {"device": device_facts(device), "packages": versions}


def device_facts(device: torch.device) -> Facts:
    """The accelerator, its driver and the CUDA version of torch."""
    if device.type != "cuda":
        return {"name": str(device)}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str:
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip().splitlines()[0] if result.stdout.strip() else "unknown"


def unusable(device: torch.device) -> str:
    """Why the device cannot be used here; empty if it can."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "torch finds no CUDA device (use --device cpu for a smoke test)"
    return ""
