"""The rooms of the package, lowest layer first, and what their files import."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "tilewright"
# Rooms, lowest layer first. A file imports rooms of lower layers, and rooms of its own layer without a cycle.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "options", "tuning", "allocate", "arrays", "machine_memory", "progress"),
    ("ir",),
    ("interp", "accuracy"),
    ("capture",),
    ("analysis", "target"),
    ("tilegraph",),
    ("rewrite",),
    ("library",),
    ("partition",),
    ("form",),
    ("lower",),
    ("schedule",),
    ("emit",),
    ("plan",),
    ("runtime", "report", "_build"),
    ("pipeline",),
    ("artifact",),
    ("measure", "peak_memory", "api", "ways", "keep", "bisection", "cli"),
    ("__init__", "__main__"),
)
Sources = Mapping[str, str]
"""Module name inside the package (`ir.expr`, `ir.__init__`, `errors`) to its text."""


@functools.cache
def parsed(text: str, name: str) -> ast.Module:
    """The syntax of a source, which every check reads."""
    return ast.parse(text, name)


def read_package() -> dict[str, str]:
    """All Python files of the package."""
    files = sorted(ROOT.rglob("*.py"))
    return {".".join(f.relative_to(ROOT).with_suffix("").parts): f.read_text(encoding="utf-8") for f in files}


def imports(name: str, text: str, modules: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Modules of the package that `name` imports anywhere, also inside functions, each with its line."""

    def resolve(dotted: str) -> str:
        if dotted in modules:
            return dotted
        return f"{dotted}.__init__" if dotted else "__init__"

    for node in ast.walk(parsed(text, name)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tilewright":
                    yield resolve(alias.name.removeprefix("tilewright").lstrip(".")), node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folder = name.split(".")[: -node.level]
                base = ".".join(["tilewright", *folder, *([base] if base else [])])
            if base.split(".")[0] != "tilewright":
                continue
            inside = base.removeprefix("tilewright").lstrip(".")
            for alias in node.names:
                child = f"{inside}.{alias.name}".lstrip(".")
                known = child in modules or f"{child}.__init__" in modules
                yield resolve(child if known else inside), node.lineno
