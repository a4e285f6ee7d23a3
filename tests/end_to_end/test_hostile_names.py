"""Names that models bring never reach generated text: sources, reports and logs are those of the renamed model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.support.onnx_models import model, node, value

import tilewright
from tilewright.cli.command import cli
from tilewright.errors import TilewrightError, shown

HOSTILE = {
    "quotes": '"""',
    "newline": "a\nb",
    "end of comment": "*/",
    "backslash": "\\",
    "line splice": "x\\\n#include </etc/passwd>",
    "shell": "$(touch pwned)`touch pwned`",
    "markup": "<script>alert(1)</script>",
    "right to left": "\u202eabc",
    "control": "\x1b[31mred\x07",
    "format": "{0}%s%n{x!r}",
    "rich": "[bold]x[/bold]",
    "python": "self",
    "dunder": "__class__",
    "path": "../../etc/passwd",
    "long": "x" * 1_000_000,
}


def save(folder: Path, name: str) -> Path:
    """A small network whose every name is made of `name`. The path does not depend on it."""
    nodes = [
        node("MatMul", ["in" + name, "w" + name], ["m" + name], name="mm" + name),
        node("Softmax", ["m" + name], ["s" + name], name=name),
        node("NonZero", ["s" + name], ["i" + name], name="nz" + name),
        node("Cast", ["i" + name], ["f" + name], name="c" + name, to=1),
        node("ReduceSum", ["f" + name], ["r" + name], name="r" + name),
        node("Add", ["s" + name, "r" + name], ["out" + name], name="a" + name),
    ]
    m = model(
        nodes,
        [value("in" + name, ["batch" + name, 3])],
        ["out" + name],
        {"w" + name: np.eye(3, dtype=np.float32)},
    )
    m.graph.name = name
    m.producer_name = m.doc_string = m.domain = name
    for n in m.graph.node:
        n.doc_string = name
    path = folder / "m.onnx"
    path.write_bytes(m.SerializeToString())
    return path


def told(path: Path) -> tuple[object, ...]:
    """Everything generated from a file but names of nodes that run as library calls."""
    compiled = tilewright.compile(path)
    got = compiled(np.ones((2, 3), np.float32))
    sources = tuple((k.name, k.source, k.ops) for k in compiled.kernels)  # type: ignore[attr-defined]
    return sources, np.asarray(got).tobytes()


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_sources_are_those_of_the_renamed_model(kind: str, tmp_path: Path) -> None:
    plain = told(save(tmp_path, "plain"))
    assert plain[0]
    assert told(save(tmp_path, HOSTILE[kind])) == plain
    assert not Path("pwned").exists()


SHOWN = ["newline", "right to left", "control", "rich", "long"]
"""Names that would change what a terminal shows."""


@pytest.mark.parametrize("kind", SHOWN)
def test_reports_are_short_and_printable(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A node that runs as a library call is named, in a form that a terminal and a log survive."""
    path = save(tmp_path, HOSTILE[kind])
    with caplog.at_level(logging.INFO, "tilewright"):
        compiled = tilewright.compile(path)
        compiled(np.ones((2, 3), np.float32))
    for text in (str(compiled.coverage), *map(str, compiled.calls), *caplog.messages):
        assert text.isprintable() and len(text) < 10_000
    got = CliRunner().invoke(cli, ["explain", str(path), "--shape", f"in{HOSTILE[kind]}=2x3"])
    assert len(got.output) < 50_000
    assert all(c.isprintable() or c == "\n" for c in got.output)


@pytest.mark.parametrize("kind", SHOWN)
def test_errors_are_one_short_line(kind: str, tmp_path: Path) -> None:
    compiled = tilewright.compile(save(tmp_path, HOSTILE[kind]))
    for call in (
        lambda: compiled(np.ones((2, 4), np.float32)),
        lambda: compiled(),
        lambda: compiled(**{HOSTILE[kind] + "x": 1}),
        lambda: tilewright.compile(save(tmp_path, HOSTILE[kind]), dims={HOSTILE[kind]: {0: "n"}})(
            np.ones((2, 3), "f")
        ),
    ):
        with pytest.raises(TilewrightError) as caught:
            call()
        text = str(caught.value)
        assert text.isprintable() and len(text) < 6000


@pytest.mark.parametrize("kind", [k for k in HOSTILE if k not in ("long", "path", "dunder")])
def test_names_of_modules_and_functions(kind: str) -> None:
    """Through `torch.compile`: modules, parameters and functions of hostile names, files of hostile paths."""

    def build(name: str) -> Callable[..., object]:
        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.add_module(name.replace(".", "_") or "m", torch.nn.LayerNorm(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for child in self.children():
                    x = child(x)
                return torch.softmax(x * 2, -1)

        return Net()

    def sources(name: str) -> list[str]:
        torch._dynamo.reset()
        tilewright.reset()
        fast = torch.compile(build(name), backend="tilewright")
        with torch.no_grad():
            fast(torch.ones(2, 3))
        return [k.source for c in tilewright.compilations() for k in c.kernels]  # type: ignore[attr-defined]

    assert sources(HOSTILE[kind]) == sources("plain") != []


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_shown_is_one_printable_line(kind: str) -> None:
    text = shown(HOSTILE[kind], 400)
    assert text.isprintable() and len(text) < 500
