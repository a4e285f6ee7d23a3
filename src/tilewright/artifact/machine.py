"""For which machine and versions an artifact is, and how that differs from what is here."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from tilewright.ir.text.values import Json
from tilewright.options import Options
from tilewright.runtime.cpu import kernels, pool
from tilewright.runtime.cpu.toolchain import build_texts, host_target, texts_identity
from tilewright.runtime.cuda import driver
from tilewright.runtime.loops import native as loops
from tilewright.runtime.own import native as own
from tilewright.runtime.store.cache import ContentStore, digest
from tilewright.runtime.store.code_identity import package_version
from tilewright.target import Target

_WIDER: Mapping[str, tuple[str, ...]] = {
    "x86-64": ("x86-64", "x86-64-v3", "x86-64-v4"),
    "x86-64-v3": ("x86-64-v3", "x86-64-v4"),
}
"""Machines that run code for others."""
_WORDS = {"runtime": "another state of Tilewright's code,"}
_PACKAGE = Path(__file__).parents[1]
_RUNNING = ("artifact", "ir", "plan", "runtime", "target.py", "emit/native", "library/offers")
"""What decides how a plan is read and run: with another text of it, the plan of an artifact is not used."""


def versions() -> dict[str, Json]:
    """What plans and machine code depend on besides the machine."""
    return {"tilewright": package_version(), "runtime": _runtime(), "torch": _minor(torch.__version__)}


@cache
def _runtime() -> str:
    """A digest of what runs plans."""
    files = sorted(f for room in _RUNNING for f in _files(_PACKAGE / room))
    return digest(*(part for f in files for part in (str(f.relative_to(_PACKAGE)), f.read_bytes())))[:16]


def _files(room: Path) -> list[Path]:
    return [room] if room.is_file() else [f for f in room.rglob("*") if f.suffix in (".py", ".cpp", ".h")]


def _minor(text: str) -> str:
    return ".".join(text.split("+")[0].split(".")[:2])


def runs(name: str, host: str) -> bool:
    """Whether a CPU runs code for another."""
    return host in _WIDER.get(name, (name,))


def facts_of(target: Target) -> dict[str, Json]:
    """A machine, as far as code for it depends on it."""
    if target.backend:
        return {
            "name": target.name, "language": target.language, "device": target.backend, "arch": target.arch,
            "machine": platform.machine(), "system": platform.system(),
        }  # fmt: skip
    return {
        "name": target.name, "language": target.language, "flags": list(target.compiler_flags),
        "machine": platform.machine(), "system": platform.system(),
        "libraries": {"mkl": torch.backends.mkl.is_available(), "onednn": torch.backends.mkldnn.is_available()},
    }  # fmt: skip


def differences(made: Mapping[str, Json], target: Mapping[str, Json]) -> list[str]:
    """What of an artifact's versions and machine does not fit this process, in words."""
    here, host = versions(), facts_of(host_target())
    found = [
        f"{_WORDS.get(name, name)} {made.get(name)}, here {now}"
        for name, now in here.items()
        if made.get(name) != now
    ]
    name = str(target.get("name"))
    if "device" in target:
        return found + _gpu_differences(name, str(target.get("arch")), target, host)
    if not runs(name, str(host["name"])):
        found.append(f"code for {name}, here {host['name']}")
    return found + _others(target, host, "language", "machine", "system", "libraries")


def _gpu_differences(name: str, arch: str, target: Mapping[str, Json], host: Mapping[str, Json]) -> list[str]:
    """Machine code for a GPU runs on those of the same generation that are not older."""
    found = _others(target, host, "machine", "system")
    if torch.version.hip is not None or not torch.cuda.is_available():
        return [f"code for {name}, here no such GPU", *found]
    major, minor = torch.cuda.get_device_capability(0)
    same = arch.isdecimal() and int(arch) // 10 == major and int(arch) % 10 <= minor
    return found if same else [f"code for {name}, here sm_{major}{minor}", *found]


def _others(target: Mapping[str, Json], host: Mapping[str, Json], *facts: str) -> list[str]:
    return [
        f"{fact} {target.get(fact)}, here {host[fact]}" for fact in facts if target.get(fact) != host[fact]
    ]


def libraries(target: Target, options: Options, store: ContentStore) -> dict[str, Path]:
    """What every plan for a machine may need, by what it is built from. Raises what `build_texts` raises."""
    texts: list[tuple[str, tuple[str, ...]]] = [
        (pool.source(), ()),
        (kernels.launcher_text(), ()),
        (loops.SOURCE.read_text(encoding="utf-8"), ()),
        (own.source(), target.compiler_flags),
    ]
    if target.backend:
        texts = [(driver.launcher_text(), ())]
    return {
        texts_identity([text], words): build_texts([text], words, store, options) for text, words in texts
    }
