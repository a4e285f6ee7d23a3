"""The documents say what is there: rooms and phases in order, and every path that they name exists."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from tests.support.layers import LAYERS

import tilewright
from tilewright.ir.schedule import LaunchConfig, Math, Memory, Reductions, Tiling
from tilewright.pipeline.phases import PHASES
from tilewright.target import Target

TOP = Path(__file__).parents[2]
PACKAGE = TOP / "src" / "tilewright"
ARCHITECTURE = TOP / "docs" / "architecture.md"
DOCUMENTS = (TOP / "README.md", TOP / "CHANGELOG.md", *sorted((TOP / "docs").rglob("*.md")))
FOLDERS = frozenset({"src", "tests", "docs", "benchmarks", "demo", "examples"})
ROOMS = frozenset(room for layer in LAYERS for room in layer)
OUTSIDE = re.compile(r"^(docs|src|tests|benchmarks|demo|examples)/[\w./*<>-]+$")
INSIDE = re.compile(r"^([a-z_]+)([/.]\w+)+/?$")
FIELD = re.compile(r"^(Tiling|Reductions|Memory|Math|Launch|Target)\.(\w+)$")
RECORDS: Mapping[str, type] = {
    c.__name__: c for c in (Tiling, Reductions, Memory, Math, LaunchConfig, Target)
}
ENDS = (".py", ".h", ".cpp", ".json")


def inline_code(text: str) -> Iterator[str]:
    """The words between single backticks, outside of blocks of code."""
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", text)):
        yield from span.split()


def is_there(word: str) -> bool:
    """Whether a path, or a name in a module, exists; True for what is neither."""
    if "<" in word:
        return True
    if OUTSIDE.match(word):
        return any(TOP.glob(word.rstrip("/")))
    if field := FIELD.match(word):
        record = RECORDS[field[1]]
        return field[2] in {f.name for f in fields(record)} | set(dir(record))
    match = INSIDE.match(word)
    if match and match[1] in FOLDERS:
        return _leads_somewhere(TOP, word)
    return not match or match[1] not in ROOMS or _leads_somewhere(PACKAGE, word)


def _leads_somewhere(start: Path, word: str) -> bool:
    """Whether folders and files from `start` on have these names, and what follows a file's is a word in it."""
    if word.endswith(ENDS):
        return (start / word).is_file()
    place, names = start, [n for n in re.split(r"[/.]", word) if n]
    while names and (place / names[0]).is_dir():
        place /= names.pop(0)
    module = place / f"{names[0]}.py" if names else place
    if names and module.is_file():
        names.pop(0)
    else:
        module = place / "__init__.py"
    if not names or not module.is_file():
        return not names
    tree = ast.parse(module.read_text(encoding="utf-8"))
    code = "\n".join(map(ast.unparse, tree.body[1:] if ast.get_docstring(tree) else tree.body))
    return all(re.search(rf"\b{name}\b", code) for name in names)


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    below = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in below.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names_in(cell: str) -> tuple[str, ...]:
    """The names between backticks."""
    return tuple(name.rstrip("/") for name in re.findall(r"`([^`]+)`", cell))


def test_the_table_of_rooms_is_the_layers_lowest_first() -> None:
    told = tuple(names_in(row[1]) for row in rows(ARCHITECTURE.read_text(encoding="utf-8"), "The rooms"))
    assert told == LAYERS


def test_the_table_of_phases_names_what_the_pipeline_runs() -> None:
    told = [
        name
        for row in rows(ARCHITECTURE.read_text(encoding="utf-8"), "The phases")
        for name in names_in(row[0])
    ]
    text = "".join(f.read_text(encoding="utf-8") for f in (PACKAGE / "pipeline").rglob("*.py"))
    recorded = {phase.name for phase in PHASES if phase.shown is not None}
    assert len(set(told)) == len(told)
    assert set(told) == recorded | set(re.findall(r'\brun\("(\w+)"', text))


def test_the_table_of_phases_has_them_in_order() -> None:
    told = [names_in(row[0])[0] for row in rows(ARCHITECTURE.read_text(encoding="utf-8"), "The phases")]
    model = tilewright.compile(lambda x: torch.softmax(x, -1) @ x, (torch.randn(8, 8),))
    ran = [phase.name for phase in model.trace.phases if phase.name in told]
    first = list(dict.fromkeys(ran))
    assert first == [name for name in told if name in first] and len(first) > 8


def test_the_architecture_is_short() -> None:
    lines = ARCHITECTURE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(TOP)))
def test_paths_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = [word for word in inline_code(text) if not is_there(word)]
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    missing += [link for link in links if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize(
    ("word", "there"),
    [
        ("ir/graph", True),
        ("ir/graph.py", True),
        ("ir.graph", True),
        ("rewrite/split/", True),
        ("partition/greedy.Afar", True),
        ("emit/native/dot.h", True),
        ("tests/docs/test_documents.py", True),
        ("benchmarks.fuzz", True),
        ("tests.replay", True),
        ("Tiling.lane", True),
        ("Tiling.warps", False),
        ("Target.nothing", False),
        ("torch.compile", True),
        ("fast.coverage", True),
        ("ir/nothing", False),
        ("ir.nothing", False),
        ("ir/graph.Nothing", False),
        ("ir/graph.h", False),
        ("emit/native/nothing.h", False),
        ("tests/nothing.py", False),
        ("benchmarks.nothing", False),
    ],
)
def test_what_is_there(word: str, there: bool) -> None:
    assert is_there(word) is there


def test_words_are_found_outside_of_blocks() -> None:
    text = "a `b/c` and `python -m d.e`\n```\n`f`\n```\n`g`"
    assert list(inline_code(text)) == ["b/c", "python", "-m", "d.e", "g"]


@pytest.mark.parametrize("page", ["options.md", "ops.md"])
def test_pages_that_follow_from_the_code_do(page: str) -> None:
    space = runpy.run_path(str(TOP / "docs" / "generate.py"))
    assert (TOP / "docs" / page).read_text(encoding="utf-8") == space["PAGES"][page](), "run docs/generate.py"
