"""Programs that tests write as text and run in processes of their own: what they import is there.

Many of these tests are long, so that a name that was changed long ago would be missed for weeks."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
IMPORT = re.compile(r"^\s*from (tilewright[\w.]*) import ([\w, ]+)$", re.MULTILINE)
ABOUT_IMPORTS = {"test_layers.py"}
"""Files whose texts are imports of packages that are not there."""


def imported() -> Iterator[tuple[str, str, str]]:
    """File, module and name of each import in a text."""
    for file in sorted(TESTS.rglob("*.py")):
        if file.name in ABOUT_IMPORTS:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for module, names in IMPORT.findall(node.value):
                    for name in names.split(","):
                        yield str(file.relative_to(TESTS)), module, name.split(" as ")[0].strip()


def is_there(module: str, name: str) -> bool:
    """Whether a module has a name, which may be that of another module."""
    try:
        return hasattr(importlib.import_module(module), name) or bool(
            importlib.import_module(f"{module}.{name}")
        )
    except ImportError:
        return False


def test_what_texts_import_is_there() -> None:
    found = set(imported())
    assert len(found) > 10
    assert [row for row in sorted(found) if not is_there(*row[1:])] == []


def test_what_is_not_there_is_noticed() -> None:
    assert not is_there("tilewright.runtime.store.cache", "Store")
    assert not is_there("tilewright.runtime.nowhere", "x")
