"""The loops of kernels of every family as data, before a statement is written, which what is written follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from tests.support.families import kernels as families
from tests.support.families.kernels import floats, halves, indices, logits
from torch import Tensor

from tilewright.ir.form import Form
from tilewright.ir.program import TileProgram
from tilewright.ir.schedule import Schedule
from tilewright.lower import lower as lowering
from tilewright.lower.plan import plan_loops
from tilewright.schedule import mask_windows, solver


def by_mask(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return torch.softmax(torch.where(seen, logits(q, k), float("-inf")), -1).to(v.dtype) @ v


def by_length(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_mask(q, k, v, torch.arange(k.shape[-2]) < lengths[:, None, None, None])


def by_block(q: Tensor, k: Tensor, v: Tensor, some: Tensor) -> Tensor:
    """A table of flags per batch and block."""
    return by_mask(q, k, v, some.repeat_interleave(128, -2).repeat_interleave(128, -1)[:, None])


MORE: dict[str, families.Making] = {
    "attention_lengths": (by_length, (*(halves(2, 2, 256, 64),) * 3, indices(2))),
    "attention_blocks": (by_block, (*(halves(1, 2, 512, 32),) * 3, torch.zeros(1, 4, 4, dtype=torch.bool))),
    "attention_ids": (families.by_document, (*(floats(1, 2, 1024, 64),) * 3, indices(1024))),
}
PRODUCTS: dict[str, families.Making] = {
    "matmul": (lambda x, w: torch.relu(x @ w), (halves(256, 4096), halves(4096, 256))),
    "matmul_rows": (lambda x, w: torch.relu(x @ w), (floats(256, 4096), floats(4096, 256))),
}

# What a kernel does at each grid point; loops over the grid and over what is one block of it are not among it.
GOLDENS = {
    ("pointwise", "sm_90"): """
store p1
""",
    # Vectors of whole tiles, then the tail of 1000 values.
    ("row_sum", "x86-64-v4"): """
for c2 by 64, the rest apart
  advance $0 by sum
store p1
""",
    # No sum is one long chain.
    ("split_sum", "x86-64-v4"): """
for c2 by 64, in blocks of 4096, 512
  advance $0 by sum
store p1
""",
    ("rms_norm", "x86-64-v4"): """
for c5 by 64, the rest apart
  advance $0 by sum
for c5 by 64, the rest apart
  store p2
""",
    # The second pass leaves exponentials for the third one.
    ("softmax", "x86-64-v4"): """
keep exp((%0[((c1 * 1000) + c3)] - $(0, 0)[c1]))
for c3 by 64, the rest apart
  advance $0 by max
for c3 by 64, the rest apart
  advance $1 by sum
for c3 by 64, the rest apart
  store p1
""",
    ("matmul", "sm_90"): """
for c3 by 128, unmasked tiles apart
  advance $0 by sum
store p2
""",
    ("matmul_rows", "x86-64-v4"): """
for c2 by 256
  for c3 by 1, in blocks of 256, 16
    advance $0 by sum
  store p2
""",
    ("attention_causal", "sm_90"): """
for c6 by 128, unmasked tiles apart
  hidden unless (c6 <= c5)
  fold $0 by sum
  advance $1 by max
  advance $3 by sum, rescaled by $1
  advance $2 by sum, rescaled by $1
store p3
""",
    ("attention_window", "sm_90"): """
for c12 by 128, unmasked tiles apart
  hidden unless ((c12 <= c11) & ((c11 + (c12 * -1)) < 64))
  fold $0 by sum
  advance $1 by max
  advance $3 by sum, rescaled by $1
  advance $2 by sum, rescaled by $1
store p3
""",
    # A number from memory ends the loop.
    ("attention_lengths", "sm_90"): """
for c8 by 128, unmasked tiles apart
  hidden unless (c8 < %0[c21])
  fold $0 by sum
  advance $1 by max
  advance $3 by sum, rescaled by $1
  advance $2 by sum, rescaled by $1
store p4
""",
    # What other kernels found of a mask: here the tiles that it shows,
    ("attention_blocks", "sm_90"): """
for c3 by 128, unmasked tiles apart
  hidden unless %2[(((c2 // 128) * 4) + (c3 // 128))]
  tiles by the list %3[(((c2 // 64) * 4) + (c3 // 128))]
  fold $0 by sum
  advance $1 by max
  advance $3 by sum, rescaled by $1
  advance $2 by sum, rescaled by $1
store p7
""",
    # there the first and the last value that each row sees.
    ("attention_ids", "x86-64-v4"): """
for c5 by 64, unmasked tiles apart
  hidden unless (%0[c4] == %0[c5])
  hidden unless implied(((c5 >= i64(%3[c4])) & (c5 <= i64(%4[c4]))))
  jump unless (%0[c4] == %0[c5])
  fold $0 by sum
  advance $1 by max
  advance $3 by sum, rescaled by $1
  advance $2 by sum, rescaled by $1
store p6
""",
    ("running_sum", "x86-64-v4"): """
for c2 by 1
  advance $0 by sum
  store p1
""",
    ("average_pool", "x86-64-v4"): """
for c5 by 1
  for c6 by 4, the rest apart
    advance $0 by sum
store p1
""",
}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The families with those of this file; lists of tiles are made whatever that costs."""
    always = replace(mask_windows.MASKS, min_times_as_long=0, min_times_as_large=0)
    monkeypatch.setattr(mask_windows, "MASKS", always)
    with mock.patch.dict(families.KERNELS, MORE), mock.patch.dict(families.PRODUCTS, PRODUCTS):
        yield


def made_of(name: str, machine: str) -> list[tuple[Form, Schedule]]:
    """The forms and schedules of a function's kernels on a machine. Nothing is planned while they are written."""
    made: dict[int, tuple[TileProgram, Form, Schedule]] = {}

    def kept(form: Form, schedule: Schedule) -> TileProgram:
        with mock.patch.object(lowering, "plan_scope", side_effect=AssertionError("planned late")):
            program = lowering.lower(form, schedule)
        made[id(program)] = program, form, schedule
        return program

    with mock.patch.object(solver, "lower", kept):
        programs, _ = families.programs_for(machine, name)
    return [made[id(p)][1:] for p in programs]


@pytest.mark.parametrize(("name", "machine"), GOLDENS)
def test_the_loops_of(name: str, machine: str) -> None:
    kernels = made_of(name, machine)
    plans = plan_loops(*kernels[0 if name == "split_sum" else -1])
    assert "\n".join(map(str, plans)) == GOLDENS[name, machine].strip()


def test_a_plan_is_a_value() -> None:
    (made,) = made_of("attention_causal", "sm_90")
    assert plan_loops(*made) == plan_loops(*made)
