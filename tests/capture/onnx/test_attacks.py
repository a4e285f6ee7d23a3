"""Hostile files through the whole compiler: each ends in an error of Tilewright's own or in the right result, in
bounded time and memory, and nothing outside the model's folder is read."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.capture.onnx.attacks import ATTACKS, SECRET

import tilewright
from tilewright.errors import TilewrightError

CPU_SECONDS = 60.0
PEAK_BYTES = 2 << 30
LONG = frozenset(
    {"functions_that_double", "chain_of_100000_sizes", "chain_of_100000_constants", "inputs_by_the_thousand"}
)
"""Many seconds each."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in ATTACKS]
)
def test_attack_ends_in_an_error_of_ours_or_the_right_result(name: str, tmp_path: Path) -> None:
    attack = ATTACKS[name](tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    try:
        with torch.no_grad():
            got = np.asarray(tilewright.compile(attack.path)(*attack.inputs))
    except TilewrightError as error:
        assert attack.result is None, str(error)
        assert error.phase and error.place and error.hint
        text = str(error)
        assert "\n" not in text and text.isprintable() and len(text) < 6000
        assert SECRET.decode("latin-1") not in text
    else:
        assert attack.result is not None, f"accepted: {got}"
        np.testing.assert_allclose(got, attack.result(), rtol=1e-5)
    assert time.process_time() - start < CPU_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < PEAK_BYTES


def test_there_are_enough() -> None:
    assert len(ATTACKS) >= 25


def test_the_secret_would_be_seen(tmp_path: Path) -> None:
    """The same file, where it may lie, is read."""
    attack = ATTACKS["external_offset_past_the_end"](tmp_path)
    own = attack.path.parent / "own.bin"
    own.write_bytes(b"\0" * 20 + SECRET * 6)
    assert np.asarray(tilewright.compile(attack.path)()).tobytes() == SECRET * 6
