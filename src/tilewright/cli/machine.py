"""`env` and `cache`: what code is made with on this machine, and where it is kept."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch

from tilewright.errors import BuildError, InputError, TilewrightError
from tilewright.options import PREFIX, Options
from tilewright.report.environment import environment
from tilewright.report.texts import size
from tilewright.runtime.cpu.toolchain import find_compiler, host_target
from tilewright.runtime.cuda.device import gpu_target, missing
from tilewright.runtime.store.cache import default_root
from tilewright.runtime.store.listing import StoreEntry, clear, entries

from .request import ExitCode
from .show import Cell, Json, Screen

TELLING = ("CXX", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_LOGS", "TRITON_CACHE_DIR")
"""What else of the environment changes what we do."""


def show_environment(screen: Screen) -> int:
    """`env`: a table, and the same as JSON."""
    facts: dict[str, Json] = {"compiler": _compiler(), **_processor(), "devices": _devices()}
    facts |= {k: v for k, v in environment().items() if k not in ("cores", "cpu")}
    for package in ("triton", "onnxruntime"):
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    root, held = _root(), ()
    facts["cache"] = "switched off" if root is None else str(root)
    try:
        held = () if root is None else _held(root)
    except InputError as error:
        facts["cache"] = f"{root}: {error.message}"
    facts["cache_bytes"] = sum(e.bytes for e in held)
    facts["cache_entries"] = len(held)
    names = [PREFIX + f.name.upper() for f in fields(Options)]
    facts["variables"] = {n: os.environ[n] for n in (*names, *TELLING) if n in os.environ}
    rows: list[Sequence[Cell]] = []
    for name, value in facts.items():
        rows += [(name.replace("_", " "), text) for text in _texts(name, value)]
    screen.table("environment", ("what", "value"), rows)
    screen.facts["environment"] = facts
    return ExitCode.OK


def _texts(name: str, value: Json) -> list[str]:
    if isinstance(value, dict):
        return [f"{k}={v}" for k, v in value.items()] or ["-"]
    if isinstance(value, list):
        return [str(v) for v in value] or ["-"]
    return [size(value) if name.endswith("bytes") and isinstance(value, int) else str(value)]


def _compiler() -> str:
    try:
        found = find_compiler(Options.make())
    except TilewrightError as error:
        return error.message
    if found is None:
        return "none (install g++ or clang++); everything runs as library calls"
    return f"{' '.join(found.command)} ({found.version.split(' Copyright')[0]})"


def _processor() -> dict[str, Json]:
    target = host_target()
    caches = ", ".join(f"{level.name} {size(level.capacity)}" for level in target.levels)
    wide = f"{target.name}, vectors of {target.vector_bytes} bytes"
    return {
        "cpu": str(environment()["cpu"]), "isa": wide, "cores": target.cores,
        "threads": torch.get_num_threads(), "levels": caches,
    }  # fmt: skip


def _devices() -> list[Json]:
    """The GPUs, and what each is taken for."""
    found: list[Json] = []
    for k in range(torch.cuda.device_count()):
        name = f"cuda:{k} {torch.cuda.get_device_name(k)}"
        try:
            why = missing(f"cuda:{k}")
            found.append(f"{name}: {why or gpu_target(k).name}")
        except TilewrightError as error:
            found.append(f"{name}: {error.message}")
    return found or ["no GPU"]


def _root() -> Path | None:
    return default_root(Options.make())


def _held(root: Path) -> tuple[StoreEntry, ...]:
    try:
        return tuple(entries(root))
    except OSError as error:
        raise InputError(
            f"the cache cannot be read: {error.strerror}", phase="cli", place=str(root),
            hint=f"set {PREFIX}CACHE_DIR to a folder of your own",
        ) from error  # fmt: skip


def use_cache(screen: Screen, action: str) -> int:
    """`cache`: what it holds, by size, entry by entry, or checked; or remove it."""
    root = _root()
    if root is None:
        raise InputError("the cache is switched off", phase="cli", hint=f"unset {PREFIX}CACHE")
    held = _held(root)
    total = sum(e.bytes for e in held)
    screen.facts |= {"action": action, "folder": str(root), "entries": len(held), "bytes": total}
    if action == "clear":
        try:
            count, freed = clear(root)
        except OSError as error:
            raise BuildError(f"cannot clear the cache: {error}", phase="cache", place=str(root)) from error
        screen.line(f"removed {count} entries, {size(freed)}, of {root}", verdict=True)
        return ExitCode.OK
    if action == "list":
        _list(screen, held)
    screen.line(f"{len(held)} entries, {size(total)}, in {root}", verdict=action == "size")
    if action != "verify":
        return ExitCode.OK
    broken = [e for e in held if not e.whole]
    for e in broken:
        screen.line(f"broken: {e.folder}", style="red", verdict=True)
    screen.facts["broken"] = [str(e.folder) for e in broken]
    text = f"FAIL: {len(broken)} broken (never loaded; replaced when needed)" if broken else "PASS: all whole"
    screen.line(text, style="bold red" if broken else "green", verdict=True)
    return ExitCode.CHECK_FAILED if broken else ExitCode.OK


def _list(screen: Screen, held: Sequence[StoreEntry]) -> None:
    """Last used first."""
    ordered = sorted(held, key=lambda e: -e.used)
    rows: list[Sequence[Cell]] = [
        (
            e.key[:16],
            size(e.bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(e.used)),
            " ".join(e.files),
        )
        for e in ordered
    ]
    screen.table("entries", ("key", "size", "last used", "files"), rows)
    screen.facts["list"] = [
        {"key": e.key, "bytes": e.bytes, "used": e.used, "files": list(e.files)} for e in ordered
    ]
