"""What is recorded is the same twice, and a change of what is decided or printed is named."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from tests.replay import recorder
from tests.replay.__main__ import main

ONE = ("--only", "^case-rms_norm$|^training-residual$", "--machine", "x86-64-v4", "--machine", "sm_90")


@pytest.fixture(autouse=True)
def _same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", "")  # is set by the command; comes back as it was


def test_a_change_is_named(tmp_path: Path) -> None:
    def run(*words: str | Path) -> tuple[int, str]:
        done = CliRunner().invoke(main, [str(w) for w in words], catch_exceptions=False)
        return done.exit_code, done.output

    for name in ("one", "two"):
        code, told = run("record", tmp_path / name, *ONE)
        assert code == 0 and len(told.splitlines()) == 4
    text = (tmp_path / "one" / "sm_90" / "training-residual.txt").read_text()
    assert (
        "=== 000.cover" in text
        and "=== 001.cover" in text
        and "@triton.jit" in text
        and "=== error" not in text
    )
    assert run("compare", tmp_path / "one", tmp_path / "two") == (0, "4 before, 4 after, 0 different\n")
    printed = recorder.sources
    with mock.patch.object(recorder, "sources", lambda *args: [t + "\n// other" for t in printed(*args)]):
        run("record", tmp_path / "three", *ONE)
    code, told = run("compare", tmp_path / "one", tmp_path / "three")
    assert code == 1 and "sm_90/case-rms_norm: source" in told and "4 different" in told
