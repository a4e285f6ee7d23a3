"""What people get wrong: each bad input of the list gets one line, a hint, and the right exit code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.bad_inputs.__main__ import Outcome, called, judged, there, typed
from benchmarks.bad_inputs.cases import CALLED, TYPED, Called, Typed


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with there(tmp_path_factory.mktemp("files")):
        yield


def test_the_list_is_long_and_names_each_input_once() -> None:
    names = [case.name for case in (*TYPED, *CALLED)]
    assert len(names) == len(set(names)) >= 80


@pytest.mark.parametrize("case", TYPED, ids=lambda case: case.name)
def test_what_is_typed(case: Typed) -> None:
    outcome = typed(case)
    assert not outcome.wrong, outcome


@pytest.mark.parametrize("case", CALLED, ids=lambda case: case.name)
def test_what_is_called(case: Called) -> None:
    outcome = called(case)
    assert not outcome.wrong, outcome


def test_what_breaks_the_rules_is_seen() -> None:
    assert judged("x", "error: no. Hint: yes", "no") == Outcome("x", "error: no. Hint: yes", ())
    assert judged("x", "error: no\nmore", "other").wrong == ("2 lines", "no hint", "does not say 'other'")
    assert called(Called("x", lambda: None, CALLED[0].error, "")).wrong == ("nothing was raised",)
    assert called(Called("x", lambda: 1 / 0, CALLED[0].error, "")).wrong == ("no error of ours",)
