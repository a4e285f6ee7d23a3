"""The benchmark of the report page says what it measured."""

from __future__ import annotations

import pytest

from benchmarks import report_page


def test_a_page_is_measured_without_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "chromium", lambda: None)
    found = report_page.measured(50, 3)
    size = found["bytes"]
    assert isinstance(size, int) and 20_000 < size < 1_000_000
    assert found["kernels"] == 50 and found["opens"] == []
