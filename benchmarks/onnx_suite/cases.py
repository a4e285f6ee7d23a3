"""The node cases of ONNX's backend suite, and those that are left out, with the reasons."""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path

from onnx import ModelProto, TensorProto, numpy_helper
from onnx.backend.test.case.test_case import TestCase

EXCLUDED = Path(__file__).with_name("excluded.txt")
OLDEST_OPSET = 7


@cache
def cases() -> tuple[TestCase, ...]:
    """All node cases of the installed onnx, base and expanded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        return tuple(load_model_tests(kind="node"))


@cache
def exclusions() -> tuple[tuple[re.Pattern[str], str], ...]:
    """The families of `excluded.txt`: pattern of the case name, reason."""
    rows = [line.split("#", 1)[0].strip() for line in EXCLUDED.read_text(encoding="utf-8").splitlines()]
    pairs = [row.split(None, 1) for row in rows if row]
    return tuple((re.compile(pattern), reason) for pattern, reason in pairs)


def reason_for(name: str) -> str:
    """Why a case is left out, or an empty string."""
    return next((reason for pattern, reason in exclusions() if pattern.search(name)), "")


def is_expanded(name: str) -> bool:
    """Whether a case is another one with its function body inlined."""
    return "_expanded" in name


def opset_of(model: ModelProto) -> int:
    """The version of the standard operators that a case is written for."""
    return next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), OLDEST_OPSET)


def plain(value: object) -> object:
    """A tensor proto as an array; anything else unchanged."""
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value
