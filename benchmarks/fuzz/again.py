"""Runs the file of a finding."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

import torch

from benchmarks.fuzz.exact import judged_exactly
from benchmarks.fuzz.judge import Failure, Setting, judged
from benchmarks.fuzz.matrix_units import UNITS
from benchmarks.fuzz.program import Given, Program


class Text(Program):
    """A program that is given as text."""

    text: str

    def source(self) -> str:
        """As it was written."""
        return self.text


def told(
    forward: str, givens: Sequence[Given], sizes: Mapping[str, int], later: Mapping[str, int], setting: Setting,
    device: str = "cpu",
) -> Failure | None:  # fmt: skip
    """The failure of a finding, or None if it is mended."""
    outputs = tuple(re.findall(r"\w+", forward.rsplit("return", 1)[1]))
    program = Text(tuple(givens), (), outputs, sizes, later)
    object.__setattr__(program, "text", forward)
    if device != "cpu":
        torch.set_default_device(device)
    elif setting.schedules:
        return judged_exactly(program, setting)
    return judged(program, setting, device)


def again(
    forward: str,
    givens: Sequence[Given],
    sizes: Mapping[str, int],
    later: Mapping[str, int],
    setting: Setting,
) -> None:
    """Print what a finding does now; leaves with 1 if it still fails. An argument names the device."""
    failure = told(forward, givens, sizes, later, setting, *sys.argv[1:2])
    print(f"{failure.kind}: {failure.text}" if failure else "right")
    sys.exit(failure is not None and failure.kind != UNITS)
