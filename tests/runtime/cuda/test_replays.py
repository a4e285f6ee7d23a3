"""Timings of a device: all on one stream, one at a time, and the next one works after one that failed."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tilewright.runtime.cuda import replays


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The streams on which something was timed; the device is the one that is current."""
    seen: list[object] = []

    def timed(run: Callable[[], object], stream: object) -> float:
        assert replays._TIMING.locked()
        seen.append(stream)
        run()
        return 1.0

    monkeypatch.setattr(replays, "_replayed_seconds", timed)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: (device, object()))
    replays.timing_stream.cache_clear()
    return seen


def test_a_device_has_one_stream(streams: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        assert replays.replayed_seconds(lambda: None) == 1.0
    first, other, again = streams
    assert first is again and first is not other
    replays.timing_stream.cache_clear()


def test_one_that_fails_keeps_no_other_from_being_timed(
    streams: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        replays.replayed_seconds(fail)
    assert replays.replayed_seconds(lambda: None) == 1.0 and len(streams) == 2
    replays.timing_stream.cache_clear()
