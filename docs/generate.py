"""Writes the pages that follow from the code: `python docs/generate.py`. A test holds them against what this prints."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from torch._ops import OpOverload

from tilewright.capture.aten import TABLE
from tilewright.capture.aten.registry import OpEntry
from tilewright.capture.onnx import ops as _  # noqa: F401  its import fills the table
from tilewright.capture.onnx.registry import known_operators
from tilewright.options import PREFIX, Options

FOLDER = Path(__file__).parent
WIDTH = 120


def options_page() -> str:
    """Every option with its type, its default, its variable and its sentence, in the order of `Options`."""
    lines = [
        "# Options",
        "",
        "Given as `options={...}` to `tilewright.compile` and `torch.compile`, some as flags of the command line,",
        f"or as environment variables (`{PREFIX}` and the name in capitals). What is given in code goes first.",
        "",
        "| option | type | default | what it does |",
        "|---|---|---|---|",
    ]
    told = _sentences(Options)
    for f in fields(Options):
        kind = _type_of(str(f.type)).replace("|", "or")
        lines.append(f"| `{f.name}` | {kind} | `{f.default!r}` | {told[f.name]} |")
    return "\n".join(lines) + "\n"


def _type_of(annotation: str) -> str:
    """A type as a reader sees it: the words of a `Literal` instead of its name."""
    import tilewright.options

    named = getattr(tilewright.options, annotation, None)
    words = getattr(named, "__args__", None)
    return ", ".join(f"`{w}`" for w in words) if words else annotation


def _sentences(record: type) -> dict[str, str]:
    """The text below each field of a dataclass, on one line."""
    body = ast.parse(inspect.getsource(record)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
        ):
            found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def ops_page() -> str:
    """Every op that has a declaration, by the file that declares it."""
    families: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for overload, entry in TABLE.items():
        if isinstance(overload, OpOverload):
            name = overload._schema.name.removeprefix("aten::")
            families[entry.rule.__module__.rsplit(".", 1)[-1]][name] |= set(_marks(entry))
    lines = [
        "# Operators",
        "",
        f"{sum(map(len, families.values()))} ATen operators have a declaration, and with it kernels, fusion and,",
        "by torch's own formulas, gradients. Torch takes composite operators apart into these. Every other operator",
        "runs as a call of torch's, counted and named in `model.coverage`.",
        "",
        "*view*: no work where strides can say it. *call*: a call of a library by choice, unless a kernel around it is",
        "modelled as faster.",
    ]
    for family, names in sorted(families.items()):
        shown = [
            f"`{n}`" + (f" ({', '.join(sorted(marks))})" if marks else "")
            for n, marks in sorted(names.items())
        ]
        lines += ["", f"## {family}", "", *_wrapped(shown)]
    ours = [name for domain, name in known_operators() if not domain]
    others = [f"{domain}:{name}" for domain, name in known_operators() if domain]
    built = f"{len(ours)} operators of the standard, beside control flow, are built from the operators above:"
    lines += ["", "## ONNX", "", built, ""]
    lines += [*_wrapped([f"`{n}`" for n in ours])]
    if others:
        lines += ["", "And of other domains:", "", *_wrapped([f"`{n}`" for n in others])]
    return "\n".join(lines) + "\n"


def _marks(entry: OpEntry) -> Iterator[str]:
    if entry.view:
        yield "view"
    if entry.reason:
        yield "call"


def _wrapped(words: list[str]) -> Iterator[str]:
    line = ""
    for k, word in enumerate(words):
        word += "," if k + 1 < len(words) else "."
        if line and len(line) + 1 + len(word) > WIDTH:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


PAGES = {"options.md": options_page, "ops.md": ops_page}

if __name__ == "__main__":
    for page, text in PAGES.items():
        (FOLDER / page).write_text(text(), encoding="utf-8")
