"""The shared fixtures do what they promise."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import conftest
from tilewright.runtime.stats import STATS, Stats


def test_every_test_has_an_empty_cache_of_its_own() -> None:
    place = Path(os.environ["TILEWRIGHT_CACHE_DIR"])
    assert place.is_dir() and not list(place.iterdir())
    assert torch.get_num_threads() == 2


def test_golden_refuses_and_explains(
    golden: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if request.config.getoption("--update-goldens"):
        pytest.skip("goldens are being rewritten")
    monkeypatch.setattr(conftest, "GOLDENS", tmp_path)
    with pytest.raises(pytest.fail.Exception, match="no golden"):
        golden("a", "text")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    golden("a", "one\ntwo")
    with pytest.raises(pytest.fail.Exception, match=r"\+three"):
        golden("a", "one\nthree")


@pytest.mark.parametrize("turn", [1, 2])
def test_counters_start_at_zero(turn: int) -> None:
    STATS.fallbacks += 1
    assert STATS == Stats(fallbacks=1), f"turn {turn}"


def test_nobody_listens_to_torchs_structured_trace() -> None:
    """It would make every captured graph up as text."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    assert not logging.getLogger("torch.__trace").handlers
