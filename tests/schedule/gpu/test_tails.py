"""Sizes that no access divides: blocks in front need no masks, whatever the size is; running folds in registers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import one_kernel
from tests.support.triton.corpus import entry
from tests.support.triton.harness import build, interpret, print_triton

from tilewright.ir.program import Branch, Loop, Prefix
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.host import number
from tilewright.lower.variants import Variant, aligning, variants
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import preset


class Halves(Case):
    """Inputs in half precision."""

    def inputs(self, scale: int = 1, seed: int = 0) -> list[torch.Tensor]:
        return [x.half() for x in super().inputs(scale, seed)]


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + y)


BOTH = ({0: "n", 1: "m"}, {0: "n", 1: "m"})
FLAT = Halves("flat", add, ((137, 259), (137, 259)), BOTH)


@pytest.mark.parametrize("dynamic", [False, True])
def test_odd_sizes_have_the_widest_accesses(dynamic: bool, tmp_path: Path) -> None:
    """Of every pointwise kernel over whole tensors: only the block at the end has masks."""
    made = entry(FLAT, dynamic)
    program = made.scheduled.program
    assert variants(program)[0] == Variant(True, False) and aligning(program) == ()
    built = build(tmp_path, print_triton(program, made.symbols, preset("sm_90"), variants(program)[0], "k0"))
    half, tile = 16, next(s.tile for s in program.loops())
    per_thread = tile // (32 * program.warps) * half // 128
    assert built.accesses[128] == 3 * per_thread, "two loads and a store of whole blocks"


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_last_block_is_right(dynamic: bool, tmp_path: Path) -> None:
    for scale in (1, 2) if dynamic else (1,):
        made = entry(FLAT, dynamic)
        job = made.job(scale)
        (tmp_path / str(scale)).mkdir()
        (outcome,) = interpret(tmp_path / str(scale), [job])
        made.compare(job, outcome, scale)
    assert any(isinstance(s, Branch) for s in made.scheduled.program.statements())


def test_sizes_that_divide_need_no_second_block() -> None:
    even = entry(Halves("even", add, ((128, 256), (128, 256))), False).scheduled.program
    assert not any(isinstance(s, Branch) for s in even.statements())


CUMSUM = Case("cumsum", lambda x: torch.cumsum(x, -1), ((5, 300),), ({0: "n", 1: "m"},))


def test_a_running_fold_over_a_short_row_is_one_block(tmp_path: Path) -> None:
    static = entry(CUMSUM, False)
    statements = list(static.scheduled.program.statements())
    loops = [s for s in statements if isinstance(s, Loop)]
    assert all(dims.static(dims.sub(s.stop, s.start)) == s.tile for s in loops)
    assert sum(isinstance(s, Prefix) for s in statements) == 1
    job = static.job()
    (outcome,) = interpret(tmp_path, [job])
    static.compare(job, outcome)


def test_running_folds_over_rows_of_any_length(tmp_path: Path) -> None:
    """A program for each bucket of lengths, one for each of these if rows begin anywhere, and one for all."""
    made = entry(CUMSUM, True)
    scheduled = Solver(preset("sm_90"), Options()).solve(one_kernel(made.graph), made.graph.layouts)
    programs = [b.program for b in scheduled.buckets]
    (length,) = {s for b in scheduled.buckets for s in dims.symbols_of(b.condition)}
    held = {
        n: sum(number(b.condition, {repr(length): n}) for b in scheduled.buckets) for n in (1024, 1023, 16384)
    }
    assert len(programs) == 6 and held == {1024: 3, 1023: 6, 16384: 1}
    for place, program in enumerate([*programs[:2], scheduled.program]):
        job = made.job()
        (tmp_path / str(place)).mkdir()
        (outcome,) = interpret(
            tmp_path / str(place), [type(job)(program, job.inputs, job.sizes, job.symbols)]
        )
        made.compare(job, outcome)


def rotary(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    c, s = c[:, None], s[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), -1)


HALVED = Halves(
    "rotary",
    rotary,
    ((5, 3, 64), (5, 32), (5, 32)),
    ({0: "n", 1: "h", 2: "d"}, {0: "n", 1: "e"}, {0: "n", 1: "e"}),
)


def test_halves_of_rows_of_any_even_length(tmp_path: Path) -> None:
    """Joined and cut in the middle of a row: accesses of whole rows are as wide as in front of a known middle."""
    made = entry(HALVED, True)
    program = made.scheduled.program
    aligned = variants(program)[0]
    source = print_triton(program, made.symbols, preset("sm_90"), aligned, "k0")
    assert aligned.aligned and "tl.multiple_of(" in source.text
    built = build(tmp_path / "built", source)
    assert built.accesses[128] >= 4, built.accesses
    job = made.job(variant=aligned)
    (outcome,) = interpret(tmp_path, [job])
    np.testing.assert_allclose(
        outcome.arrays[-1].astype(np.float32).reshape(5, 3, 64),
        HALVED.run(*(x.float() for x in HALVED.inputs())).half().float().numpy(),
        rtol=2e-3, atol=2e-3,
    )  # fmt: skip


def test_long_rows_of_unknown_length_are_one_loop_a_pass() -> None:
    """A block is added as a tree in each step, so sums need no further levels, whose states would take registers."""
    dynamic = entry(
        Halves("softmax", lambda x: torch.softmax(x, -1), ((4, 40000),), ({0: "n", 1: "m"},)), True
    )
    program = dynamic.scheduled.program
    loops = [s for s in program.loops() if dims.static(dims.sub(s.stop, s.start)) is None]
    assert len(loops) == 3, "whole steps, and the rest with masks; the result"
    assert min(s.tile for s in loops) >= 4096


def test_rows_that_nothing_aligns_share_addresses(tmp_path: Path) -> None:
    """Each element has an access of its own, many at a known distance from the thread's first one."""
    rows = Halves("rows", lambda x: torch.softmax(x.float(), -1).half(), ((33, 4095),))
    made = entry(rows, False)
    program = made.scheduled.program
    built = build(tmp_path, print_triton(program, (), preset("sm_90"), variants(program)[0], "k0"))
    accesses = len(re.findall(r"(?:ld|st)\.global\.b16 ", built.text))
    known = len(re.findall(r"add\.s64\s+%rd\d+, %rd\d+, \d+;", built.text))
    assert accesses >= 16 and known >= accesses // 3, "constants that the assembler puts into the accesses"
    job = made.job()
    (outcome,) = interpret(tmp_path, [job])
    wanted = rows.run(*rows.inputs()).float().numpy()
    np.testing.assert_allclose(outcome.arrays[-1].astype(np.float32).reshape(33, 4095), wanted, rtol=2e-3)
