"""Merges of whole blocks at once, and sums of unknown lengths: what their Triton text has, and that it is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tests.emit.triton_harness import Job, interpret, same_as_interpreter
from tests.schedule.corpus import Case
from tests.schedule.run import capture, one_kernel, sizes_of
from torch import Tensor

from tilewright.emit.triton import emit_triton
from tilewright.emit.triton_collapse import Whole, joined
from tilewright.emit.variant import variants
from tilewright.ir import dims
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.program import Collapse, Loop, Update, Var
from tilewright.ir.reduction import argmax, sum_
from tilewright.options import Options
from tilewright.partition.fusion import partition
from tilewright.schedule.solver import Solver
from tilewright.schedule.split import split_folds
from tilewright.target import preset
from tilewright.tile.sizes import seen_sizes

HOPPER = preset("sm_90")
A, B = (Axis(name, dims.integer(8)) for name in "ab")


def chain(reduction: str, over: tuple[Axis, ...]) -> list[Collapse]:
    """A block merged along one axis after the other."""
    made: list[Collapse] = []
    part = Var(0, f32, (A, B))
    for k, a in enumerate(over, 1):
        merged = Var(k, f32, tuple(x for x in part.axes if x != a))
        of = sum_(f32) if reduction == "sum" else argmax(f32)
        made.append(Collapse((merged,), (part,), of, a))
        part = merged
    return made


def test_what_leaves_no_axis_is_one_merge() -> None:
    (whole,) = joined(chain("sum", (A, B)), {1: 1, 2: 1})
    assert isinstance(whole, Whole) and whole.parts[0].id == 0 and whole.vars[0].id == 2


def test_what_is_read_between_or_leaves_an_axis_stays() -> None:
    for statements, readers in (
        (chain("sum", (A, B)), {1: 2, 2: 1}),
        (chain("sum", (A,)), {1: 1}),
        (chain("argmax", (A, B)), {1: 1, 2: 1}),
    ):
        assert joined(statements, readers) == statements


def test_a_block_of_two_axes_is_summed_at_once(tmp_path: Path) -> None:
    case = Case("total", lambda x: x.sum((0, 2)), ((6, 5, 40),))
    graph = capture(case, False)
    program = Solver(HOPPER, Options()).solve(one_kernel(graph), graph.layouts).program
    assert "tl.sum(v1, None)" in emit_triton(program, [], HOPPER, variants(program)[0], "k0").text
    (x,) = case.inputs()
    job = Job(program, [x.numpy(), None], {})
    (outcome,) = interpret(tmp_path, [job])
    same_as_interpreter(job, outcome)
    np.testing.assert_allclose(outcome.arrays[1], x.double().sum((0, 2)).numpy(), rtol=1e-4, atol=1e-5)


def column_sums(x: Tensor) -> Tensor:
    return x.float().sum(0)


def test_sums_of_unknown_length_have_two_levels_and_no_masked_states(tmp_path: Path) -> None:
    case = Case("sums", column_sums, ((4096, 256),), ({0: "n", 1: "c"},))
    graph = capture(case, True)
    solver = Solver(HOPPER, Options())
    with seen_sizes(sizes_of(graph, [x.numpy() for x in case.inputs()])):
        cover = partition(split_folds(graph, solver.price, HOPPER), solver.price)
        solved = [solver.solve(s, cover.layouts) for s in cover.steps if isinstance(s, Kernel)]
    assert len(solved) == 2
    program = solved[0].program
    updates = [s for s in program.statements() if isinstance(s, Update)]
    assert len(updates) == 2 and all(u.mask is None for u in updates)
    assert sum(isinstance(s, Loop) and any(u in s.body for u in updates) for s in program.statements()) == 2
    rng = np.random.default_rng(0)
    tensors = [
        torch.from_numpy(rng.standard_normal(s, np.float32)) for s in ((4096, 256), (1001, 67), (3, 40))
    ]
    sizes = [sizes_of(graph, [x.numpy()]) for x in tensors]
    given, result = graph.inputs[0], graph.outputs[0]
    assert isinstance(given, Value) and isinstance(result, Value)
    values = [{given: x.numpy()} for x in tensors]
    for number, s in enumerate(solved):
        folder = tmp_path / str(number)
        folder.mkdir()
        jobs = [Job(s.program, [v.get(p) for p in s.params], n) for v, n in zip(values, sizes, strict=True)]
        for outcome, known in zip(interpret(folder, jobs), values, strict=True):
            known |= dict(zip(s.params, outcome.arrays, strict=True))
    for known, x in zip(values, tensors, strict=True):
        np.testing.assert_allclose(known[result], x.double().sum(0).numpy(), rtol=1e-4, atol=1e-4)
