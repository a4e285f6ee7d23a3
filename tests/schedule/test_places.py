"""Kernels that store a line of a larger memory where a tensor of one element says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture, one_kernel
from tests.support.triton.harness import Job, interpret
from torch import Tensor

from tilewright.errors import IndexOutOfRange
from tilewright.interp.program import run_program
from tilewright.ir.dtype import DType, i32, i64
from tilewright.ir.expr import integer
from tilewright.ir.graph import Layout, Value
from tilewright.ir.program import Check, Store, TileProgram
from tilewright.ir.writes import PlaceFromData
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import preset

PLACES, WIDTH = 10, 48
MEMORY = (2, 3, PLACES, WIDTH)


def scaled(k: Tensor, w: Tensor) -> Tensor:
    """The line that is stored."""
    return torch.tanh(k) * w


CASE = Case("line", scaled, ((2, 3, 1, WIDTH), (WIDTH,)))


def program_for(machine: str, number: DType = i64, *, signed: bool = False) -> TileProgram:
    """Of parameters k, w, the place, and the memory in which the line lies."""
    graph = capture(CASE, False)
    index = Value(graph.fresh_id(), (integer(1),), number)
    place = PlaceFromData(index, integer(WIDTH), integer(PLACES), integer(int(np.prod(MEMORY))), signed)
    strides = Layout(tuple(integer(s) for s in (3 * PLACES * WIDTH, PLACES * WIDTH, WIDTH, 1)))
    kernel = replace(one_kernel(graph), lines=((0, place),))
    return (
        Solver(preset(machine), Options())
        .solve(kernel, {**graph.layouts, kernel.outputs[0]: strides})
        .program
    )


BEFORE = np.frombuffer(b"\x5a" * 4 * int(np.prod(MEMORY)), np.float32)
"""What the memory holds, as the harness fills outputs."""


def job_for(program: TileProgram, at: int) -> Job:
    k, w = (x.numpy().reshape(-1) for x in CASE.inputs())
    number = np.array([at], np.int32 if program.params[2].dtype is i32 else np.int64)
    return Job(program, [k, w, number, None], {}, name=f"place {at}")


def wanted(at: int) -> np.ndarray:
    memory = BEFORE.reshape(MEMORY).copy()
    memory[:, :, at] = scaled(*CASE.inputs()).numpy()[:, :, 0]
    return memory.reshape(-1)


def run(program: TileProgram, at: int) -> np.ndarray:
    """The memory after a run."""
    made: np.ndarray = run_program(program, [*job_for(program, at).inputs[:3], BEFORE])[3]
    return made


@pytest.mark.parametrize("machine", ["x86-64-v4", "sm_90"])
@pytest.mark.parametrize("number", [i32, i64], ids=str)
def test_a_line_is_stored_at_its_place(machine: str, number: DType) -> None:
    for signed, places in ((False, (0, 4, 9)), (True, (0, 9, -1, -10))):
        program = program_for(machine, number, signed=signed)
        for at in places:
            np.testing.assert_allclose(run(program, at), wanted(at), rtol=1e-5)


@pytest.mark.parametrize(("signed", "at"), [(False, 10), (False, -1), (True, 10), (True, -11)])
def test_places_outside_are_refused(signed: bool, at: int) -> None:
    program = program_for("x86-64-v4", signed=signed)
    with pytest.raises(IndexOutOfRange):
        run(program, at)


def test_a_gpu_stores_the_line_and_nothing_outside(tmp_path: Path) -> None:
    program = program_for("sm_90", signed=True)
    places = (0, 9, -10, 10, -11, 1 << 40)
    found = interpret(tmp_path, [job_for(program, at) for at in places])
    for at, outcome in zip(places, found, strict=True):
        inside = -10 <= at < 10
        assert outcome.error == (0 if inside else 1)
        np.testing.assert_allclose(outcome.arrays[3], wanted(at) if inside else BEFORE, rtol=1e-5)


def test_the_place_is_tested_before_anything_is_stored() -> None:
    body = list(program_for("x86-64-v4").statements())
    check = next(n for n, s in enumerate(body) if isinstance(s, Check))
    assert check < min(n for n, s in enumerate(body) if isinstance(s, Store))
