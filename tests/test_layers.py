"""The laws that the whole package obeys, read from its syntax: arrows, sizes, names, documentation.

Every check is a function from sources to a list of violations, so that it is tested itself on planted ones.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "tilewright"

# Rooms, lowest layer first. A file imports rooms of lower layers, and rooms of its own layer without a cycle.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "options", "allocate", "arrays"),
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
    ("runtime", "_build"),
    ("pipeline",),
    ("measure", "peak_memory", "api", "files", "bisection", "cli"),
    ("__init__",),
)
LAYER = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}

MAX_FILE = 500
MAX_NATIVE_FILE = 600
MAX_FUNCTION = 60
MAX_FOLDER = 15
OP_DECLARATIONS = frozenset({"ir.ops", "capture.aten", "capture.onnx.ops"})
"""Folders that have a file for each family of ops."""

# Where a file outside capture/ may write one of the two words below, and why.
FRONTEND_WORDS = re.compile(r"(?<![a-z])(aten|onnx)(?![a-z])", re.IGNORECASE)
FRONTEND_ALLOWED: Mapping[str, str] = {
    "__init__": "says in one line what can be compiled",
    "api": "the suffix of a model file chooses the importer",
    "files": "what the importer read",
    "cli.command": "the help says which files it takes, and names a peer",
    "cli.model": "the suffix of a model file chooses the importer",
    "measure": "a peer's model format",
}
MODEL_WORDS = re.compile(
    r"(?<![a-z])(bert|distilbert|roberta|llama|resnet|resnext|convnext|mobilenet|mobilevit|swin|minilm|gpt|h2o"
    r"|gemma|qwen|mistral|vit|deit|whisper|yolo|unet|rapidocr|paddleocr|efficientnet|vgg|alexnet|densenet)(?![a-z])",
    re.IGNORECASE,
)
BANNED_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"})
BANNED_CALLS = frozenset({"hasattr", "eval", "torch.load", "torch.save"})

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


# --- arrows ------------------------------------------------------------


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


def wrong_arrows(sources: Sources) -> list[str]:
    """Imports upwards, and files in no room."""
    modules = frozenset(sources)
    found: list[str] = []
    for name, text in sources.items():
        room = name.split(".")[0]
        if room not in LAYER:
            found.append(f"{name}: no layer is declared for room {room!r}")
            continue
        for other, line in imports(name, text, modules):
            target = other.split(".")[0]
            if target in LAYER and LAYER[target] > LAYER[room]:
                found.append(f"{name}:{line}: imports {other}, which is above it")
    return found


def cycles(sources: Sources) -> list[str]:
    """Each import cycle once, as `a -> b -> a`."""
    modules = frozenset(sources)
    graph = {name: sorted({m for m, _ in imports(name, text, modules)}) for name, text in sources.items()}
    done: set[str] = set()
    found: list[str] = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done and name in graph:
            for other in graph[name]:
                visit(other, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return found


# --- sizes, bans, names, documentation ------------------------------------------------------------

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def too_long(sources: Sources) -> list[str]:
    """Files above MAX_FILE lines and functions above MAX_FUNCTION."""
    found: list[str] = []
    for name, text in sources.items():
        lines = len(text.splitlines())
        if lines > MAX_FILE:
            found.append(f"{name}: {lines} lines")
        for node in ast.walk(parsed(text, name)):
            if isinstance(node, FunctionNode) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION:
                found.append(
                    f"{name}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
                )
    return found


def too_wide(sources: Sources) -> list[str]:
    """Folders with more than MAX_FOLDER files."""
    folders = Counter(name.rpartition(".")[0] for name in sources)
    return [
        f"{name or 'the package'}: {n} files"
        for name, n in folders.items()
        if n > MAX_FOLDER and name not in OP_DECLARATIONS
    ]


def banned(sources: Sources) -> list[str]:
    """Modules and calls that the package does without, and bare excepts."""
    found: list[str] = []
    for name, text in sources.items():
        for node in ast.walk(parsed(text, name)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.ExceptHandler) and node.type is None:
                found.append(f"{name}:{node.lineno}: bare except")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in BANNED_CALLS:
                found.append(f"{name}:{node.lineno}: calls {ast.unparse(node.func)}")
            found += [f"{name}:{node.lineno}: imports {n}" for n in names if n in BANNED_MODULES]
    return found


def foreign_names(sources: Sources) -> list[str]:
    """Words of a front end outside capture/, and names of models anywhere."""
    found: list[str] = []
    for name, text in sources.items():
        free = name.split(".")[0] == "capture" or name in FRONTEND_ALLOWED
        for number, line in enumerate(text.splitlines(), 1):
            if not free and (word := FRONTEND_WORDS.search(line)):
                found.append(f"{name}:{number}: says {word[0]!r} outside capture/")
            if word := MODEL_WORDS.search(line):
                found.append(f"{name}:{number}: names the model {word[0]!r}")
    return found


def undocumented(sources: Sources) -> list[str]:
    """Modules, public classes and public functions without a docstring; parameters without a type."""
    found: list[str] = []
    for name, text in sources.items():
        tree = parsed(text, name)
        if tree.body and not ast.get_docstring(tree):
            found.append(f"{name}: no docstring")
        for node in tree.body:
            if isinstance(node, FunctionNode | ast.ClassDef) and not node.name.startswith("_"):
                overloaded = any(ast.unparse(d).endswith("overload") for d in node.decorator_list)
                if not ast.get_docstring(node) and not overloaded:
                    found.append(f"{name}:{node.lineno}: {node.name} has no docstring")
        found += [f"{name}:{line}: {what}" for line, what in _untyped(tree)]
    return found


def _untyped(tree: ast.Module) -> Iterator[tuple[int, str]]:
    methods = {id(f) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
    for node in ast.walk(tree):
        if not isinstance(node, FunctionNode):
            continue
        a = node.args
        given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]
        static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
        first = 1 if id(node) in methods and not static else 0
        missing = [x.arg for x in given[first:] if x.annotation is None]
        if missing:
            yield node.lineno, f"{node.name} leaves {', '.join(missing)} untyped"
        if node.returns is None:
            yield node.lineno, f"{node.name} has no return type"


CHECKS = (wrong_arrows, cycles, too_long, too_wide, banned, foreign_names, undocumented)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package(check: Callable[[Sources], list[str]]) -> None:
    found = check(read_package())
    assert not found, f"{len(found)} violations:\n" + "\n".join(found)


def test_native_files_are_short() -> None:
    files = [f for end in ("*.h", "*.cpp") for f in ROOT.rglob(end)]
    long = {
        str(f.relative_to(ROOT)): n for f in files if (n := len(f.read_text().splitlines())) > MAX_NATIVE_FILE
    }
    assert not long


# --- the checks themselves ------------------------------------------------------------

DOC = '"""Doc."""\n'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("from tilewright.schedule.search import x", "schedule.search"),
        ("import tilewright.schedule.search", "schedule.search"),
        ("from tilewright.schedule import search", "schedule.search"),
        ("from ..schedule import search", "schedule.search"),
        ("from ..schedule.search import best", "schedule.search"),
        ("def f():\n    from tilewright.schedule import other", "schedule.__init__"),
        ("if TYPE_CHECKING:\n    from tilewright import schedule", "schedule.__init__"),
        ("from tilewright import compile", "__init__"),
    ],
)
def test_an_import_upwards_is_found_however_written(text: str, wanted: str) -> None:
    sources = {
        "ir.expr": text,
        "ir.__init__": "",
        "schedule.__init__": "",
        "schedule.search": "",
        "__init__": "",
    }
    assert [v for v in wrong_arrows(sources) if f"imports {wanted}, which" in v]


def test_imports_downwards_and_outside_are_fine() -> None:
    sources = {
        "schedule.search": "from tilewright.ir.expr import a\nfrom .lower import b\nimport tilewrighty",
        "schedule.lower": "from tilewright.errors import e",
        "ir.expr": "",
        "errors": "",
    }
    assert not wrong_arrows(sources) and not cycles(sources)


def test_a_room_without_a_layer_is_found() -> None:
    assert wrong_arrows({"misc.helpers": ""}) and not wrong_arrows({"plan.data": ""})


def test_a_cycle_is_found() -> None:
    sources = {
        "ir.a": "from tilewright.ir.b import x",
        "ir.b": "def f():\n    from . import c",
        "ir.c": "import tilewright.ir.a",
    }
    assert cycles(sources) == ["ir.a -> ir.b -> ir.c -> ir.a"]


def test_long_files_and_functions_are_found() -> None:
    assert too_long({"errors": "\n" * 501}) and not too_long({"errors": "\n" * 500})
    body = "def f():\n" + "    x = 1\n" * 59
    assert not too_long({"errors": body})
    assert "f has 61 lines" in too_long({"errors": body + "    x = 1\n"})[0]


def test_wide_folders_are_found() -> None:
    files = {f"schedule.gpu.f{n}": "" for n in range(15)}
    assert not too_wide(files | {"schedule.cpu.f": ""})
    assert too_wide(files | {"schedule.gpu.g": ""}) == ["schedule.gpu: 16 files"]
    assert not too_wide({f"ir.ops.f{n}": "" for n in range(30)})


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "try:\n    pass\nexcept:\n    pass",
        "hasattr(x, 'y')",
        "torch.load('f')",
        "def f():\n    import dill",
    ],
)
def test_bans(text: str) -> None:
    assert len(banned({"errors": text})) == 1
    assert not banned({"errors": "try:\n    pass\nexcept ValueError:\n    pass\nimport json"})


@pytest.mark.parametrize("line", ["# calls aten.add", "x = ONNX_OPS", "'aten::mm'"])
def test_front_end_words_stay_in_capture(line: str) -> None:
    assert foreign_names({"emit.cpp": line})
    assert not foreign_names({"capture.anything": line})


@pytest.mark.parametrize("line", ["concatenated", "import onnxruntime", "latent"])
def test_other_words_are_fine(line: str) -> None:
    assert not foreign_names({"emit.cpp": line})


@pytest.mark.parametrize("line", ["# as in BERT", "def is_resnet50(g): ...", "llama_attention", "vit_small"])
def test_no_model_is_named(line: str) -> None:
    assert foreign_names({"capture.torch": line})
    assert not foreign_names({"capture.torch": "bertrand, invite, swing, revitalise"})


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        DOC + "def f() -> None: ...",
        DOC + "class A: ...",
        DOC + "def _f(x) -> None: ...",
        DOC + "def _f(*x: int, **y) -> None: ...",
        DOC + "def _f(): ...",
        DOC + "class _A:\n    @staticmethod\n    def f(x) -> None: ...",
    ],
)
def test_gaps_of_documentation_are_found(text: str) -> None:
    assert len(undocumented({"errors": text})) == 1


def test_documented_code_is_fine() -> None:
    text = (
        DOC + 'class A:\n    """D."""\n    def f(self, x: int) -> None: ...\ndef _g(y: int) -> int: return y'
    )
    assert not undocumented({"errors": text})
