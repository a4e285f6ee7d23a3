"""The loops of kernels of every family as data, before a statement is written."""

from __future__ import annotations

from unittest import mock

import torch
from tests.end_to_end.test_golden_kernels import KERNELS, halves, indices, logits, programs_for
from torch import Tensor

from tilewright.ir.form import Form
from tilewright.ir.program import TileProgram
from tilewright.ir.schedule import Schedule
from tilewright.lower import lower as lowering
from tilewright.lower.plan import plan_loops
from tilewright.schedule import solver


def by_length(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    seen = torch.arange(k.shape[-2]) < lengths[:, None, None, None]
    return torch.softmax(torch.where(seen, logits(q, k), float("-inf")), -1).to(v.dtype) @ v


MORE = {
    "lengths": (by_length, (*(halves(2, 2, 256, 64),) * 3, indices(2))),
}


def loops_of(name: str, machine: str) -> str:
    """The loops of a function's last kernel under the schedule that a machine gets, and the program follows them."""
    made: dict[int, tuple[TileProgram, Form, Schedule]] = {}

    def kept(form: Form, schedule: Schedule) -> TileProgram:
        program = lowering.lower(form, schedule)
        made[id(program)] = program, form, schedule
        return program

    with mock.patch.object(solver, "lower", kept), mock.patch.dict(KERNELS, MORE):
        programs, _ = programs_for(machine, name)
    texts = []
    for p in programs:
        _, form, schedule = made[id(p)]
        texts.append("\n".join(map(str, plan_loops(form, schedule))))
    return "\n--\n".join(texts)
