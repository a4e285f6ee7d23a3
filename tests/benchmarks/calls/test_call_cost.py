"""What a call costs beyond its time on the GPU, by clocks that are set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from benchmarks import call_cost

HOST_US, DEVICE_US, WAIT_US = 20.0, 100.0, 7.0


class Clock:
    """A host and a device that work at once: a call takes the host some time, then runs on the device; to wait for it
    takes a little more."""

    def __init__(self) -> None:
        self.now = self.done = 0.0

    def call(self) -> None:
        self.now += HOST_US
        self.done = max(self.done, self.now) + DEVICE_US

    def wait(self) -> None:
        self.now = max(self.now, self.done) + WAIT_US


class Event:
    """The time at which the device has come so far."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, 0.0

    def record(self) -> None:
        self.at = max(self.clock.now, self.clock.done)

    def synchronize(self) -> None:
        self.clock.wait()

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) / 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(torch.cuda, "synchronize", made.wait)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(made))
    monkeypatch.setattr(call_cost.time, "perf_counter", lambda: made.now / 1e6)
    monkeypatch.setattr(call_cost.time, "sleep", lambda seconds: None)
    yield made


def test_a_call_costs_what_the_host_takes_before_and_behind_the_device(clock: Clock) -> None:
    found = call_cost.figures(clock.call)
    assert found["wall_us"] == pytest.approx(HOST_US + DEVICE_US + WAIT_US)
    assert found["host_us"] == pytest.approx(HOST_US)
    in_a_row = DEVICE_US + HOST_US / call_cost.IN_A_ROW  # the first one waits for the host
    assert found["device_us"] == pytest.approx(in_a_row)
    assert found["over_device_us"] == pytest.approx(HOST_US + WAIT_US, abs=1.0)


def test_inputs_come_in_turn() -> None:
    inputs, given = [torch.zeros(1) + k for k in range(3)], list[float]()

    def call(x: Tensor) -> None:
        given.append(x.item())

    run: Callable[[], object] = call_cost.turning(call, inputs)
    for _ in range(6):
        run()
    assert sorted(given[:3]) == [0, 1, 2] and given[3:] == given[:3]


def test_contestants_are_those_that_are_named() -> None:
    model, x = torch.nn.Linear(2, 2), torch.zeros(1, 2)
    assert tuple(call_cost.contestants(model, x, ())) == call_cost.CONTESTANTS
    assert tuple(call_cost.contestants(model, x, (call_cost.FROZEN,))) == (call_cost.FROZEN,)


def test_without_a_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call_cost.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--only", "--against"])
def test_what_is_not_there(option: str) -> None:
    with pytest.raises(SystemExit):
        call_cost.main([option, "nothing"])
