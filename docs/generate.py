"""Writes the pages that follow from the code: `python docs/generate.py`. A test holds them against what this prints."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import FunctionType

import click
from torch._ops import OpOverload

import tilewright
from tilewright import errors
from tilewright.capture.aten import TABLE
from tilewright.capture.aten.registry import OpEntry
from tilewright.capture.onnx import ops as _  # noqa: F401  its import fills the table
from tilewright.capture.onnx.registry import known_operators
from tilewright.cli.command import cli
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


def commands_page() -> str:
    """What each verb of the command line says under `--help`."""
    lines = ["# The command line", "", "`tilewright VERB --help` prints the same.", ""]
    for name, verb in (("", cli), *cli.commands.items()):
        path = f"tilewright {name}".strip()
        lines += [f"## {path}", "", "```", _help(verb, path).rstrip(), "```", ""]
        if isinstance(verb, click.Group) and name:
            for below, command in verb.commands.items():
                lines += [
                    f"### {path} {below}",
                    "",
                    "```",
                    _help(command, f"{path} {below}").rstrip(),
                    "```",
                    "",
                ]
    return "\n".join(lines).rstrip() + "\n"


def _help(verb: click.Command, path: str) -> str:
    with click.Context(verb, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH) as context:
        return verb.get_help(context)


def interface_page() -> str:
    """What the package offers: functions and classes with what they say of themselves."""
    lines = [
        "# The Python interface",
        "",
        "All of `tilewright`, and the errors that it raises (`tilewright.errors`).",
        "",
    ]
    for name in tilewright.__all__:
        thing = getattr(tilewright, name)
        lines += [f"## {name}", "", *_told(name, thing)]
        if name == "CompiledModel":
            for member, value in sorted(vars(thing).items()):
                if not member.startswith("_") and isinstance(value, (property, FunctionType)):
                    lines += [f"### {name}.{member}", "", *_told(member, value)]
    lines += ["## Errors and warnings", ""]
    for name, kind in sorted(vars(errors).items()):
        if (
            isinstance(kind, type)
            and issubclass(kind, (Exception, Warning))
            and kind.__module__ == errors.__name__
        ):
            lines += [f"- `{name}`: {' '.join((inspect.getdoc(kind) or '').split())}"]
    return "\n".join(lines) + "\n"


def _told(name: str, thing: object) -> list[str]:
    signature = f"{name}{_signature(thing)}" if isinstance(thing, FunctionType) else ""
    shown = ["```python", signature, "```", ""] if signature else []
    return [*shown, *(inspect.getdoc(thing) or "").splitlines(), ""]


def _signature(function: FunctionType) -> str:
    """As it is written, which is the same under every Python."""
    given = inspect.signature(function)
    return str(given).replace("'", "").replace("typing.", "")


PAGES = {
    "options.md": options_page,
    "ops.md": ops_page,
    "commands.md": commands_page,
    "interface.md": interface_page,
}

if __name__ == "__main__":
    for page, text in PAGES.items():
        (FOLDER / page).write_text(text(), encoding="utf-8")
