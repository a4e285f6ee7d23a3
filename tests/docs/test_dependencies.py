"""What pyproject.toml declares is what the package imports, and constraints.txt pins what that pulls in."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORTED_AS = {"protobuf": "google"}
"""Distributions whose module has another name."""


def declared(extra: str = "") -> list[Requirement]:
    """The requirements of the package, or those of one extra."""
    listed = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return [Requirement(text) for text in listed]


def modules_of(folder: Path) -> set[str]:
    """Top modules outside the standard library that the files of a folder import."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names)


def test_every_dependency_is_imported_and_every_import_declared() -> None:
    needed = {IMPORTED_AS.get(r.name, r.name) for r in declared()}
    optional = {IMPORTED_AS.get(r.name, r.name) for r in declared("gpu")}
    imported = modules_of(ROOT / "src" / "tilewright") - {"tilewright"}
    assert imported == needed | optional


def test_the_demo_declares_what_it_imports() -> None:
    known = {IMPORTED_AS.get(r.name, r.name) for r in (*declared(), *declared("demo"))} | {
        "PIL",
        "tilewright",
        "demo",
    }
    assert modules_of(ROOT / "demo") <= known


def holds(requirement: Requirement, extra: str = "") -> bool:
    """Whether a requirement counts on this machine."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def test_constraints_pin_what_is_pulled_in() -> None:
    """Nothing that no requirement leads to, and a version for everything that one does."""
    wanted = [r for extra in ("", "gpu", "dev", "demo") for r in declared(extra) if holds(r)]
    reached: set[str] = set()
    seen: set[tuple[str, str]] = {
        ("tilewright", extra) for extra in ("", "gpu")
    }  # declared here, not as installed
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        reached.add(name)
        try:
            needs = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        for extra in {"", *requirement.extras} - {e for n, e in seen if n == name}:
            seen.add((name, extra))
            wanted += [r for r in needs if holds(r, extra)]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if line and not line.startswith("#")}
    assert not pinned - reached - ONLY_SOME_BUILDS
    assert not {n for n in reached - pinned - {"tilewright"} if not n.startswith("nvidia-")} - UNPINNED


ONLY_SOME_BUILDS = frozenset({"triton", "setuptools"})
"""Requirements of some builds of torch and not of others."""

UNPINNED = frozenset({"cuda-bindings", "cuda-toolkit"})
"""What builds of torch for GPUs bring in their own versions."""
