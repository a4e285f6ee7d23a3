"""What `import tilewright` gives."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import tilewright


def test_the_door_opens_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tilewright.api", types.SimpleNamespace(compile=1, stats=2, reset=3))
    assert (tilewright.compile, tilewright.stats, tilewright.reset) == (1, 2, 3)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tilewright.nothing  # type: ignore[attr-defined]


def test_version_and_entry_points_agree_with_the_project_file() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["version"] == tilewright.__version__
    backends = importlib.metadata.entry_points(group="torch_dynamo_backends")
    assert [point.value for point in backends if point.name == "tilewright"] == ["tilewright.api:backend"]


def test_every_pin_lies_in_the_stated_range() -> None:
    from packaging.requirements import Requirement

    root = Path(__file__).parents[1]
    pins = dict(line.lower().split("==") for line in (root / "constraints.txt").read_text().splitlines()[1:])
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    extra_names = Requirement(extras["dev"][0]).extras
    stated = [*project["dependencies"], *extras["dev"][1:], *extras["demo"]]
    stated += [text for name in extra_names for text in extras[name]]
    for text in stated:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[wanted.name.lower()]), text


def test_files_are_compiled_and_loaded_without_dynamo() -> None:
    """It takes a second to import, and Inductor comes with it."""
    code = (
        "import sys, tilewright as t; t.compile, t.load, t.stats, t.compilations, t.CompiledModel;"
        "print(*(m for m in ('torch._dynamo', 'torch._inductor', 'torch.distributed.tensor', 'triton') "
        "if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
    assert tilewright.backend is importlib.import_module("tilewright.api").backend


def test_artifacts_are_loaded_without_symbolic_shapes() -> None:
    """Half a second of imports, of which most are sympy's: only captures need them."""
    code = (
        "import sys, tilewright as t; t.load;"
        "print(*(m for m in ('torch.fx.experimental.symbolic_shapes', 'sympy', 'torch._dynamo', 'onnx') "
        "if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_the_collector_does_not_look_at_what_was_imported() -> None:
    code = (
        "import gc, tilewright as t; gc.collect(); seen = [];"
        "gc.callbacks.append(lambda phase, info: seen.append(phase)); t.compile;"
        "print(len(seen), gc.isenabled(), gc.get_freeze_count(), max(map(len, map(gc.get_objects, (0, 1)))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seen, enabled, frozen, young = done.stdout.split()
    assert (seen, enabled, frozen) == ("0", "True", "0")
    assert int(young) < 5000  # thousands of modules' objects are old ones


def test_what_a_program_has_frozen_stays_frozen() -> None:
    code = "import gc, tilewright as t; gc.freeze(); t.stats; print(gc.get_freeze_count() > 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
