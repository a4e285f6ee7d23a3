"""How the check of random numbers on a GPU judges, here on the CPU."""

from __future__ import annotations

import pytest
import torch
from benchmarks.device_random import FUNCTIONS, drawn, judge
from torch import Tensor

import tilewright


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_compiled_programs_pass(number: int) -> None:
    torch._dynamo.reset()
    tilewright.reset()
    function = FUNCTIONS[number]
    run = torch.compile(function, backend=tilewright.backend)
    judge(drawn(run, "cpu", trains=True), drawn(function, "cpu", trains=True))


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_a_number_more_is_seen(number: int) -> None:
    function, calls = FUNCTIONS[number], 0

    def run(h: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            torch.rand(1)
        return function(h, w)

    with pytest.raises(AssertionError):
        judge(drawn(run, "cpu", trains=False), drawn(function, "cpu", trains=False))
