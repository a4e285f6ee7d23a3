"""Errors render as one line with their parts."""

from __future__ import annotations

from typing import Any

import pytest

import tilewright
from tilewright import errors


def test_one_line_with_all_parts() -> None:
    error = errors.InputError("wrong\nrank.", phase="bind", op="x", place="model.py:3", hint="pass 4 dims")
    assert str(error) == "[bind] wrong rank (op x, at model.py:3). Hint: pass 4 dims"


def test_empty_parts_are_left_out() -> None:
    assert str(errors.ModelError("file is cut short", phase="onnx")) == "[onnx] file is cut short"
    assert str(errors.ModelError("bad", phase="onnx", place="m.onnx")) == "[onnx] bad (at m.onnx)"


def test_index_error_is_also_the_builtin() -> None:
    with pytest.raises(IndexError):
        raise errors.IndexOutOfRange("index 9 is out of range", phase="run")


def test_a_refused_schedule_names_its_law() -> None:
    error = errors.IllegalSchedule("class a stands for two axes", law="one class, one axis of an instance")
    assert error.phase == "schedule"
    assert str(error).endswith("[law: one class, one axis of an instance]")


@pytest.mark.parametrize(
    "kind",
    [
        errors.InputError,
        errors.ModelError,
        errors.UnsupportedError,
        errors.BuildError,
        errors.CompilerMissing,
    ],
)
def test_all_are_one_family(kind: type[errors.TilewrightError]) -> None:
    assert issubclass(kind, errors.TilewrightError)
    assert issubclass(errors.CacheWarning, Warning)


@pytest.mark.parametrize("call", [tilewright.load, tilewright.save, tilewright.compile])
def test_unknown_keywords_are_named(call: Any) -> None:
    with pytest.raises(errors.UnknownKeyword, match="takes no 'target"):
        call("x", targetz=[])
