"""What a clock says of a library's convolutions: from a tuning file, the store, or by measuring; told to who tunes."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import f16
from tilewright.ir.graph import LibraryCall, Operand, Value
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.runtime.cuda.convolutions import ConvolutionTimer
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.cache import ContentStore
from tilewright.runtime.store.tuned import Tuned, TuningSession, tuned_for, tuning
from tilewright.runtime.store.tuning_file import as_entry
from tilewright.target import preset

X = Value(0, tuple(map(dims.integer, (2, 8, 4, 4))), f16)
CALL = LibraryCall("convolution", torch.relu, (Operand(0),))


@pytest.fixture(autouse=True)
def clock() -> Iterator[mock.Mock]:
    """Seconds as a text, as `_measured` gives them."""
    said = mock.Mock(return_value="2.5e-05")
    with (
        mock.patch.object(ConvolutionTimer, "_measured", said),
        mock.patch.object(torch.cuda, "get_device_name", lambda device: "a device"),
    ):
        yield said


def timer(store: ContentStore, tuned: Tuned | None = None) -> ConvolutionTimer:
    return ConvolutionTimer(preset("sm_90"), store, SizeHints({}), "cuda:0", tuned or Tuned())


@pytest.mark.parametrize(("said", "seconds"), [("2.5e-05", 2.5e-5), ("", None)])
def test_what_one_process_found_another_takes(said: str, seconds: float | None, clock: mock.Mock) -> None:
    """(None: it cannot be run.)"""
    clock.return_value = said
    with tuning(TuningSession(1000)) as session:
        assert timer(ContentStore(None), tuned_for(Options(), "here")).seconds(CALL, [X], [None]) == seconds
    ((name, entry),) = session.found.devices["here"].items()
    assert name.startswith("convolution ") and as_entry("convolution", entry) and entry["seconds"] == seconds
    STATS.reset()
    other = timer(ContentStore(None), Tuned("here", {name: entry}))
    assert other.seconds(CALL, [X], [None]) == seconds and clock.call_count == 1 and STATS.timed == 0


def test_the_store_is_told_too(clock: mock.Mock) -> None:
    store = ContentStore(None)
    timer(store).seconds(CALL, [X], [None])
    with tuning(TuningSession(0)) as session:
        timer(store, tuned_for(Options(), "here")).seconds(CALL, [X], [None])
    assert clock.call_count == 1 and len(session.found.devices["here"]) == 1 and not session.unsettled


def test_without_time_it_is_no_way(clock: mock.Mock) -> None:
    with tuning(TuningSession(0)) as session:
        assert timer(ContentStore(None), tuned_for(Options(), "here")).seconds(CALL, [X], [None]) is None
    assert not clock.called and len(session.unsettled) == 1


def test_whether_a_fused_one_is_right(clock: mock.Mock) -> None:
    with tuning(TuningSession(1000)) as session:
        made = timer(ContentStore(None), tuned_for(Options(), "here"))
        for said in ("True", "False", ""):
            clock.return_value, made.known = said, {}
            made.store = ContentStore(None)
            made._found("right", CALL, [X], [None], lambda tensors: "")
            ((name, entry),) = session.found.devices["here"].items()
            assert name.startswith("fused_convolution ") and as_entry("fused_convolution", entry)
            assert entry["right"] is (said == "True")
            known = timer(ContentStore(None), Tuned("here", {name: entry}))
            assert known._found("right", CALL, [X], [None], lambda tensors: "") == str(said == "True")
