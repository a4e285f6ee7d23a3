"""ONNX's own backend suite: every node case passes, or stands in `excluded.txt` with a reason."""

from __future__ import annotations

import collections
import re

import pytest
from benchmarks.onnx_suite.cases import cases, exclusions, is_expanded, reason_for
from tests.capture.onnx import suite
from tests.capture.onnx.suite import Outcome

# The suite itself divides by zero and overflows while its expected values are made and compared.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """All cases, run once."""
    return {case.name: suite.run_case(case) for case in cases()}


def test_no_mismatch_and_no_error(outcomes: dict[str, Outcome]) -> None:
    """Cases in scope pass; those out of scope are refused clearly, never answered wrongly."""
    wrong = {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome.status != "pass" and not reason_for(name)
    }
    assert not wrong, "\n".join(f"{n}: {o.status} {o.detail}" for n, o in wrong.items())
    refused = {n: o for n, o in outcomes.items() if reason_for(n) and not reason_for(n).startswith("random")}
    answered = {n: o.status for n, o in refused.items() if o.status in ("mismatch", "error")}
    assert not answered


def test_reach(outcomes: dict[str, Outcome]) -> None:
    """At least 95 % of the base cases outside the families left out, and 90 % of all base cases."""
    base = {n: o for n, o in outcomes.items() if not is_expanded(n)}
    counts = collections.Counter(o.status for o in base.values())
    inside = [o for n, o in base.items() if not reason_for(n)]
    passed = sum(o.status == "pass" for o in inside)
    print(f"base cases: {len(base)}, {dict(counts)}; in scope {len(inside)}, passed {passed}")
    assert passed >= 0.95 * len(inside)
    assert counts["pass"] >= 0.9 * len(base)


def test_list_is_minimal(outcomes: dict[str, Outcome]) -> None:
    """Each line of the list matches a case that does not pass, and no passing case is on it."""
    passing = [n for n, o in outcomes.items() if o.status == "pass" and reason_for(n)]
    random = re.compile("bernoulli|training_dropout")
    assert not [n for n in passing if not random.search(n)]
    unused = [p.pattern for p, _ in exclusions() if not any(p.search(n) for n in outcomes)]
    assert not unused
