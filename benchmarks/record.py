"""What every benchmark shares: a cold child process per case, the record of where a figure comes from, JSON
files.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tilewright.report.environment import environment

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".models"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TILEWRIGHT_CACHE_DIR")
CHILD_SECONDS = 1800

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
Facts = dict[str, Json]


def provenance(threads: int) -> Facts:
    """Device, versions, threads and whether they wait passively, command, commit and date of a run."""
    return {
        "environment": dict(environment()),
        "threads": threads,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "command": " ".join([Path(sys.executable).name, "-m", module_name(), *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def module_name() -> str:
    """The dotted name that this process was started with."""
    spec = sys.modules["__main__"].__spec__
    name = spec.name if spec is not None else Path(sys.argv[0]).stem
    return name.removesuffix(".__main__")


def commit() -> str:
    """The commit of the checkout, `+` if tracked files differ from it, empty outside a checkout."""

    def git(*arguments: str) -> str:
        try:
            result = subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            return ""
        return result.stdout.strip() if result.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no") else "")


def write_json(path: Path, facts: Mapping[str, Json]) -> None:
    """Write by rename, so that an interrupted run leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def child(module: str, arguments: Sequence[str], threads: int, caches: Path) -> Facts:
    """Run `python -m module arguments --child-json FILE` in a process of its own and return what it wrote.

    Kernel caches lie under `caches`: cold if it is empty. A crash or a time limit becomes {"failed": reason}.
    """
    environment = os.environ | {name: str(caches / name.lower()) for name in CACHES}
    paths = [str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            module,
            *arguments,
            "--threads",
            str(threads),
            "--child-json",
            str(path),
        ]
        try:
            result = subprocess.run(
                command,
                env=environment,
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=CHILD_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not finished after {CHILD_SECONDS} s"}
        if not path.exists():
            lines = result.stderr.strip().splitlines()
            return {"failed": f"exit code {result.returncode}: {lines[-1] if lines else 'no message'}"}
        facts: Facts = json.loads(path.read_text(encoding="utf-8"))
        return facts


def cold_child(module: str, arguments: Sequence[str], threads: int) -> Facts:
    """`child` with empty kernel caches that are deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="cold-") as folder:
        return child(module, arguments, threads, Path(folder))
