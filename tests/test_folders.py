"""The laws of the tests' own folders: they mirror the package's, and tests share through helpers alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS, PACKAGE = ROOT / "tests", ROOT / "src" / "tilewright"

BY_SUBJECT = frozenset(
    {
        "benchmarks",
        "contract",
        "demo",
        "examples",
        "distributed",
        "docs",
        "end_to_end",
        "fuzz",
        "golden",
        "papers",
        "replay",
        "support",
    }
)
"""Folders of tests that look at no single room: whole paths, promises, what stands beside the package, helpers."""

MAX_FOLDER = 22


def strangers(folders: Iterable[str], rooms: frozenset[str]) -> list[str]:
    """Folders (`capture/loops`) that mirror no room and have no subject."""
    return [f for f in folders if f.split("/")[0] not in BY_SUBJECT and f not in rooms]


def wrong_imports(sources: Mapping[str, str]) -> list[str]:
    """Imports of test modules by other modules, and of helpers by modules that stand in another folder.

    A helper serves its own folder and those below it. Everyone may use `tests.support` and `tests.replay`.
    """
    found: list[str] = []
    for name, text in sources.items():
        for module in _imported(text, sources):
            folder = module.rpartition(".")[0]
            if module.rpartition(".")[2].startswith("test_"):
                found.append(f"{name} imports the test module {module}")
            elif module.split(".")[1] not in {"support", "replay"} and not name.startswith(f"{folder}."):
                found.append(f"{name} imports {module}, a helper of another folder")
    return found


def _imported(text: str, known: Iterable[str]) -> list[str]:
    modules = frozenset(known)
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            children = [f"{node.module}.{a.name}" for a in node.names]
            found += [child if child in modules else node.module for child in children]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names]
    return [m for m in dict.fromkeys(found) if m in modules]


def too_wide(files: Iterable[str]) -> list[str]:
    """Folders with more than MAX_FOLDER files."""
    held: dict[str, int] = {}
    for file in files:
        folder = file.rpartition(".")[0]
        held[folder] = held.get(folder, 0) + 1
    return [f"{folder}: {n} files" for folder, n in held.items() if n > MAX_FOLDER]


def read_tests() -> dict[str, str]:
    """Module name (`tests.ir.test_identity`) to its text."""
    files = [f for f in sorted(TESTS.rglob("*.py")) if f.stem != "__init__"]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts): f.read_text(encoding="utf-8") for f in files}


def test_folders_mirror_rooms() -> None:
    rooms = frozenset(str(p.relative_to(PACKAGE).with_suffix("")) for p in PACKAGE.rglob("*"))
    folders = {
        name.rpartition(".")[0].replace(".", "/").removeprefix("tests").lstrip("/") for name in read_tests()
    }
    assert not strangers(folders - {""}, rooms)


def test_tests_share_through_helpers() -> None:
    found = wrong_imports(read_tests())
    assert not found, "\n".join(found)


def test_no_folder_is_wide() -> None:
    assert not too_wide(read_tests())


def test_a_folder_that_mirrors_no_room_is_found() -> None:
    rooms = frozenset({"capture", "capture/loops"})
    assert strangers(["capture/loops", "end_to_end/attention"], rooms) == []
    assert strangers(["attention", "loops"], rooms) == ["attention", "loops"]


def test_wrong_imports_are_found() -> None:
    sources = {
        "tests.ir.test_a": "",
        "tests.ir.helper": "",
        "tests.support.corpus": "",
        "tests.ir.ops.test_b": "",
    }
    for text in ("from tests.ir.test_a import f", "from tests.ir import test_a", "import tests.ir.test_a"):
        assert wrong_imports(sources | {"tests.ir.test_c": text}) == [
            "tests.ir.test_c imports the test module tests.ir.test_a"
        ]
    shared = "from tests.ir.helper import f\nfrom tests.support.corpus import g"
    assert wrong_imports(sources | {"tests.ir.ops.test_b": shared}) == []
    assert wrong_imports(sources | {"tests.lower.test_c": shared}) == [
        "tests.lower.test_c imports tests.ir.helper, a helper of another folder"
    ]


def test_wide_folders_are_found() -> None:
    files = [f"tests.ir.test_{n}" for n in range(MAX_FOLDER)]
    assert not too_wide(files) and too_wide([*files, "tests.ir.more"]) == [
        f"tests.ir: {MAX_FOLDER + 1} files"
    ]


def test_no_file_is_a_link() -> None:
    """A link into one machine's folders leads nowhere on another."""
    root = Path(__file__).parents[1]
    rooms = ("src", "tests", "docs", "demo", "benchmarks", "examples")
    assert not [p for room in rooms for p in (root / room).rglob("*") if p.is_symlink()]
