"""Tracebacks of what a program raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright


def test_what_a_program_raises_shows_its_own_frames() -> None:
    """Ours are not between those of the program and of who called it, but for what is called."""

    class Refuses(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 7:
                raise KeyError("mine")
            return x + 1

    with pytest.raises(KeyError) as caught:
        tilewright.compile(Refuses())(torch.zeros(7))
    names = [
        e.path.name
        for e in caught.traceback
        if "tilewright" in str(e.path.parent) and "tests" not in str(e.path)
    ]
    assert not names and caught.traceback[-1].name == "forward"
