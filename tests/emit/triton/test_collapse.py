"""Merges of whole blocks at once, and sums of unknown lengths: what their Triton text has, and that it is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture, one_kernel, sizes_of
from tests.support.triton.harness import Job, interpret, print_triton, same_as_interpreter
from torch import Tensor

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.program import Collapse, Loop, Update
from tilewright.lower.variants import variants
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.rewrite.split.reduction import split_reductions
from tilewright.schedule.solver import Solver
from tilewright.target import preset

HOPPER = preset("sm_90")


def collapses(machine: str, run: Callable[[Tensor], Tensor], *shape: int) -> list[Collapse]:
    """The merges in the program of one kernel for a machine."""
    case = Case("reductions", run, (shape,))
    graph = capture(case, False)
    program = Solver(preset(machine), Options()).solve(one_kernel(graph), graph.layouts).program
    return [s for s in program.statements() if isinstance(s, Collapse)]


def test_threads_that_share_a_block_merge_what_leaves_no_axis_at_once() -> None:
    (whole,) = collapses("sm_90", lambda x: x.sum((0, 2)), 6, 5, 40)
    assert len(whole.axes) == 2 and not whole.vars[0].axes


def test_one_thread_a_tuple_or_an_axis_that_stays_is_merged_axis_by_axis() -> None:
    for machine, run, shape in (
        ("x86-64-v4", lambda x: x.sum((0, 2)), (6, 5, 40)),
        ("sm_90", lambda x: x.argmax(), (5, 40)),
        ("sm_90", lambda x: x.sum(1), (64, 40)),
    ):
        assert all(len(s.axes) == 1 for s in collapses(machine, run, *shape))


def test_a_block_of_two_axes_is_summed_at_once(tmp_path: Path) -> None:
    case = Case("total", lambda x: x.sum((0, 2)), ((6, 5, 40),))
    graph = capture(case, False)
    program = Solver(HOPPER, Options()).solve(one_kernel(graph), graph.layouts).program
    assert re.search(
        r"tl\.sum\(v\d+, None\)", print_triton(program, [], HOPPER, variants(program)[0], "k0").text
    )
    (x,) = case.inputs()
    job = Job(program, [x.numpy(), None], {})
    (outcome,) = interpret(tmp_path, [job])
    same_as_interpreter(job, outcome)
    np.testing.assert_allclose(outcome.arrays[1], x.double().sum((0, 2)).numpy(), rtol=1e-4, atol=1e-5)


def test_the_mean_of_equal_singles_is_that_single(tmp_path: Path) -> None:
    """A sum of three, rounded before it is divided, may be a bit beside: times 316, where nothing varies in a norm."""
    case = Case("norm", lambda x: torch.nn.functional.layer_norm(x, (3,)), ((64, 3),))
    graph = capture(case, False)
    program = Solver(HOPPER, Options()).solve(one_kernel(graph), graph.layouts).program
    rows = np.random.default_rng(0).standard_normal((64, 1), np.float32)
    assert np.any((rows + rows + rows) / np.float32(3) != rows)
    job = Job(program, [np.repeat(rows, 3, 1), None], {})
    (outcome,) = interpret(tmp_path, [job])
    same_as_interpreter(job, outcome)
    assert not outcome.arrays[1].any()


def column_sums(x: Tensor) -> Tensor:
    return x.float().sum(0)


def test_sums_of_unknown_length_have_two_levels_and_no_masked_states(tmp_path: Path) -> None:
    case = Case("sums", column_sums, ((4096, 256),), ({0: "n", 1: "c"},))
    graph = capture(case, True)
    hints = SizeHints(sizes_of(graph, [x.numpy() for x in case.inputs()]))
    solver = Solver(HOPPER, Options(), hints=hints)
    split = split_reductions(graph, solver.price, HOPPER, solver.scheduler.splits, hints)
    cover = partition(split, solver.price, hints)
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
