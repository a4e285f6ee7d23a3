"""What matrix units cut off is told from what is wrong."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from benchmarks.fuzz import judge
from benchmarks.fuzz.judge import MOST, Failure, Setting
from benchmarks.fuzz.matrix_units import UNITS, cuts_off, rounding_units, takes_pieces
from benchmarks.fuzz.outcome import Draw, Outcome
from benchmarks.fuzz.program import Given, Program
from torch import Tensor

from tilewright.options import Options
from tilewright.pipeline import compiler
from tilewright.pipeline.place import DevicePlace
from tilewright.target import preset


def _exact() -> Tensor:
    return torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1


def test_what_is_cut_off_is_small_and_of_one_sign() -> None:
    exact = _exact()
    cut = (exact * (1 - 3 * 2.0**-23)).float()
    assert cuts_off(cut, exact)
    assert not cuts_off((exact * (1 - 20 * 2.0**-23)).float(), exact)
    other = cut.clone()
    other[7] = 0.0  # one element that is lost, which no mean would show
    assert not cuts_off(other, exact)
    signs = torch.ones(4096).double()
    signs[::2] = -1
    assert not cuts_off((exact * (1 - signs * 3 * 2.0**-23)).float(), exact)
    assert not cuts_off(cut.double(), exact)
    other[7] = torch.nan
    assert not cuts_off(other, exact)


def test_which_machine_takes_pieces() -> None:
    assert not takes_pieces("cpu", {})
    for name, pieces in (("sm_90", True), ("sm_80", False)):
        with mock.patch.object(compiler, "machine_of", lambda place, options, name=name: preset(name)):
            assert takes_pieces("cuda", {}) is pieces and not takes_pieces(
                "cuda", {"contractions": "library"}
            )
            with rounding_units():
                target = compiler.machine_of(DevicePlace("cuda"), Options())
            assert target.singles == ("ieee" if pieces else preset(name).singles)
            assert [u.flops for u in target.matrix_units] == [u.flops for u in preset(name).matrix_units]


@pytest.mark.parametrize("turned", [False, True])
def test_it_hides_no_other_result(turned: bool) -> None:
    exact = [_exact()[:64], _exact()[:64]]
    ours = [(exact[0] * (1 - 5 * 2.0**-23)).float(), torch.zeros(64)]
    if turned:
        ours.reverse()
    outcomes = [Outcome(list(ts), [], []) for ts in (ours, [t.float() for t in exact], exact)]
    draws = [Draw(0, (outcomes[0], outcomes[1], outcomes[2]))] * MOST
    program = Program((Given("x0", (2,), "float32", "contiguous", False, 2),), (), ("x0",), {}, {})
    with (
        mock.patch.object(judge, "firm", lambda *args: torch.ones(64, dtype=torch.bool)),
        mock.patch.object(judge, "is_chance", return_value=False),
        mock.patch.object(judge, "_as_stepwise", return_value=False),
        mock.patch.object(judge, "_is_right_rounded", return_value=True),
    ):
        both = judge._pooled(program, Setting(), draws, ["results 0", "results 1"], False, "cuda")
        one = judge._pooled(program, Setting(), draws, [f"results {int(turned)}"], False, "cuda")
    assert isinstance(both, Failure) and both.kind == "wrong"
    assert isinstance(one, Failure) and one.kind == UNITS
