"""What calls of networks come to, from figures that are set."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from benchmarks.record import Facts
from benchmarks.user_calls import CONTESTANTS, MOVING, STANDING, Contestant, Ready

from benchmarks import user_calls

OURS, OURS_FROZEN = Contestant(True, user_calls.REDUCE), Contestant(True, user_calls.OWN_DOOR, True)
PEER, PEER_FROZEN = Contestant(False, user_calls.TUNED), Contestant(False, user_calls.TUNED, True)


def row(wall_us: dict[Contestant, tuple[float, float]], wrong: tuple[Contestant, ...] = ()) -> Facts:
    """A network's record: microseconds with moving and standing inputs."""
    made = {
        who.name: {
            **vars(who),
            "accuracy": {"passed": who not in wrong},
            MOVING: {"wall_us": moving},
            STANDING: {"wall_us": standing},
        }
        for who, (moving, standing) in wall_us.items()
    }
    return {"contestants": made}


def test_each_at_its_best() -> None:
    found = row({OURS: (200, 190), OURS_FROZEN: (120, 100), PEER: (300, 330), PEER_FROZEN: (240, 250)})
    assert user_calls.speed(user_calls.times(found, MOVING)) == 240 / 120
    assert user_calls.speed(user_calls.times(found, STANDING)) == 250 / 100


def test_torch_compile_beside_torch_compile_with_weights_as_they_are() -> None:
    found = row({OURS: (200, 190), OURS_FROZEN: (120, 100), PEER: (300, 330), PEER_FROZEN: (240, 250)})
    assert user_calls.speed(user_calls.times(found, MOVING), torch_compile=True) == 300 / 200


def test_wrong_results_count_for_nothing() -> None:
    found = row({OURS: (200, 190), OURS_FROZEN: (120, 100), PEER: (300, 300)}, wrong=(OURS_FROZEN,))
    assert user_calls.speed(user_calls.times(found, MOVING)) == 300 / 200


def test_without_a_peer_there_is_no_speed() -> None:
    assert user_calls.speed(user_calls.times(row({OURS: (200, 190)}), MOVING)) is None
    missing: Facts = {"contestants": {PEER.name: {**vars(PEER), "not_available": "no time left to build it"}}}
    assert user_calls.times(missing, MOVING) == {}
    assert user_calls.times({"failed": "exit code 1"}, MOVING) == {}


@pytest.mark.parametrize(("ours", "passed"), [((100, 100), True), ((60, 151), False), ((120, 120), False)])
def test_the_mean_and_the_least_decide(ours: tuple[float, float], passed: bool) -> None:
    networks = {f"n{i}": row({OURS: (us, us), PEER: (150, 150)}) for i, us in enumerate(ours)}
    figures = user_calls.figures(networks)
    assert [figure.passed for figure in figures] == [passed] * 4
    assert "of 2" in figures[0].value


def test_a_table_has_a_column_for_each() -> None:
    text = user_calls.table({"resnet50": row({OURS: (200, 190), PEER: (300, 330)})})
    assert all(who.name in text for who in CONTESTANTS)
    assert "resnet50, moving" in text and "1.50" in text and "1.74" in text
    assert len({who.name for who in CONTESTANTS}) == len(CONTESTANTS)


def test_moving_calls_get_all_inputs_and_standing_ones_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(user_calls.time, "sleep", lambda seconds: None)
    seen: dict[str, list[int]] = {MOVING: [], STANDING: []}

    def calls(way: str) -> Callable[[torch.Tensor], object]:
        return lambda x: seen[way].append(int(x))

    ready = Ready(
        {OURS: {way: calls(way) for way in seen}}, {OURS: {"build_s": 1.0}, PEER: {"not_available": ""}}
    )
    inputs = [torch.tensor(i) for i in range(3)]
    found = user_calls.time_all(ready, inputs, rounds=30)
    assert set(seen[MOVING]) == {0, 1, 2} and set(seen[STANDING]) == {0}
    assert len(seen[MOVING]) == user_calls.PASSES * (30 + user_calls.REPEATS)
    assert len(found[OURS][MOVING]["passes_us"]) == user_calls.PASSES and found[OURS]["build_s"] == 1.0
    assert found[PEER] == {"not_available": ""}


def test_what_takes_too_long_is_ended_even_if_it_catches_an_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_calls, "AGAIN_SECONDS", 0.01)
    caught = 0
    with pytest.raises(TimeoutError), user_calls.ending(at=time.time() + 0.01):
        try:
            time.sleep(10)
        except TimeoutError:
            caught += 1
        time.sleep(10)
    assert caught == 1
    time.sleep(0.03)  # nothing comes behind it


def test_what_is_built_in_time_is_not_interrupted() -> None:
    with user_calls.ending(at=time.time() + 0.02):
        pass
    time.sleep(0.03)


def test_one_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def build(
        contestant: Contestant, model: torch.nn.Module, x: torch.Tensor
    ) -> Callable[[torch.Tensor], object]:
        if not contestant.ours:
            raise RuntimeError("it does not build")
        return model

    monkeypatch.setattr(user_calls, "build", build)
    told: list[str] = []
    inputs = [torch.randn(2, 4) for _ in range(3)]
    ready = user_calls.build_all(
        torch.nn.Linear(4, 4), inputs, time.time() + 60, lambda who, known: told.append(who.name)
    )
    assert set(ready.calls) == {who for who in CONTESTANTS if who.ours}
    assert told == [who.name for who in CONTESTANTS]
    assert ready.facts[PEER] == {"not_available": "RuntimeError: it does not build"}
    assert ready.facts[OURS]["accuracy"]["passed"]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert user_calls.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_network_that_is_not_there() -> None:
    with pytest.raises(SystemExit):
        user_calls.main(["--only", "nothing"])
