"""Means and variances of columns in one pass: the law of their state, accuracy, and how a block advances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.rewrite.split.cut import HOPPER, cut, kernels
from tests.support.corpus import Case
from tests.support.one_kernel import capture, sizes_of
from tests.support.triton.harness import Job, build, interpret, print_triton, same_as_interpreter
from torch import Tensor

from tilewright import accuracy
from tilewright.analysis.size_hints import SizeHints
from tilewright.interp import EXACT, exact_random
from tilewright.interp.evaluate import over_slots
from tilewright.interp.exact import equal
from tilewright.ir.dtype import f32
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.program import Declare, Update
from tilewright.ir.schedule import Role
from tilewright.lower.variants import variants
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.rewrite.split import moments
from tilewright.rewrite.split.merge_laws import moments_of_chunks
from tilewright.schedule.solver import Solver
from tilewright.tuning.thresholds import ROW_CHUNKS

OF_CHUNKS = moments_of_chunks(f32)


def constant(value: float) -> np.ndarray:
    return EXACT.constant(value, f32).reshape(1)


def state(count: int, seed: int) -> list[np.ndarray]:
    """The state of some random elements, one merge at a time."""
    found = [constant(0.0)] * 4
    for x in exact_random((count,), seed=seed):
        one = [constant(1.0), x.reshape(1), constant(0.0), x.reshape(1)]
        found = over_slots(EXACT, OF_CHUNKS.merge, OF_CHUNKS, a=found, b=one)
    return found


@pytest.mark.parametrize("before", [0, 1, 7])
@pytest.mark.parametrize("count", [0, 1, 8])
def test_a_step_is_a_merge_with_a_chunk(before: int, count: int) -> None:
    old, chunk = state(before, 3), state(count, 5)
    lifted = over_slots(EXACT, OF_CHUNKS.lift, OF_CHUNKS, e=chunk)
    merged = over_slots(EXACT, OF_CHUNKS.merge, OF_CHUNKS, a=old, b=lifted)
    stepped = over_slots(EXACT, OF_CHUNKS.step, OF_CHUNKS, a=old, e=chunk)
    assert all(equal(x, y) for x, y in zip(merged, stepped, strict=True))


@pytest.mark.parametrize("sizes", [(4, 4), (1, 6), (5, 0), (0, 0)])
def test_pooled_states_add_up_to_their_merge(sizes: tuple[int, int]) -> None:
    parts = [state(n, seed) for seed, n in enumerate(sizes)]
    merged = over_slots(EXACT, OF_CHUNKS.merge, OF_CHUNKS, a=parts[0], b=parts[1])
    whole = [*(EXACT.apply("add", [x, y], f32, f32) for x, y in zip(*parts, strict=True))]
    pooled = [over_slots(EXACT, OF_CHUNKS.pooled, OF_CHUNKS, a=p, b=whole) for p in parts]
    for want, *own in zip(merged, *pooled, strict=True):
        assert equal(want, EXACT.apply("add", own, f32, f32))


@dataclass(frozen=True)
class Data:
    """Columns of a kind."""

    name: str
    mean: float = 0.0
    first: float | None = None
    """Every element of the first row."""

    def columns(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) + self.mean
        if self.first is not None:
            x[0] = self.first
        return x.to(dtype)


DATA = [
    Data("usual"),
    Data("far", 1e3),
    Data("outlier", first=1e4),
    Data("huge outlier", first=1e15),
    Data("far outlier", 1e3, -1e3),
]


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.float()
    mean = h.mean(0)
    return mean, (h - mean).square().mean(0)


class Columns(Case):
    """A case with inputs that nobody reads."""

    dtype = torch.float32

    def inputs(self, scale: int = 1, seed: int = 0) -> list[Tensor]:
        return [torch.zeros(s, dtype=self.dtype) for s in self.shapes]


class HalfColumns(Columns):
    """In half precision."""

    dtype = torch.float16


def run(
    folder: Path, case: Case, tensors: Sequence[Tensor], dynamic: bool, atol: float = 1e-4
) -> list[list[Tensor]]:
    """The results of the GPU's code for each of some tensors. It agrees with the interpreter but for `atol`."""
    graph = capture(case, dynamic)
    sizes = [sizes_of(graph, [x.numpy()]) for x in tensors]
    solver = Solver(HOPPER, Options(), hints=SizeHints(sizes[0]))
    cover = partition(cut(graph), solver.price, solver.hints)
    solved = [solver.solve(s, cover.layouts) for s in cover.steps if isinstance(s, Kernel)]
    (given,) = (v for v in graph.inputs if isinstance(v, Value))
    values: list[dict[Value, np.ndarray]] = [{given: x.numpy()} for x in tensors]
    for number, s in enumerate(solved):
        place = folder / str(number)
        place.mkdir()
        jobs = [Job(s.program, [v.get(p) for p in s.params], n) for v, n in zip(values, sizes, strict=True)]
        for job, outcome, known in zip(jobs, interpret(place, jobs), values, strict=True):
            same_as_interpreter(job, outcome, rtol=2e-4, atol=atol)
            known |= dict(zip(s.params, outcome.arrays, strict=True))
    made = [v for v in graph.outputs if isinstance(v, Value)]
    return [[torch.from_numpy(known[v].reshape(-1).copy()) for v in made] for known in values]


def check(made: Sequence[Tensor], x: Tensor) -> None:
    """The fp64 rule."""
    verdict = accuracy.compare_trees(
        list(made), list(statistics(x)), list(accuracy.in_float64(statistics)(x))
    )
    assert verdict.passed, verdict


def test_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of columns of each kind; those with infinities have them where eager does."""
    monkeypatch.setattr(moments, "CASCADE_PARTS", replace(moments.CASCADE_PARTS, of_columns=(8,)))
    width = 16
    odd = Data("not finite").columns(1999, width, torch.float32)
    odd[0, 0], odd[1998, 1], odd[3, 2], odd[0, 3], odd[0, 4] = (
        torch.inf,
        -torch.inf,
        torch.nan,
        torch.nan,
        3e38,
    )
    kinds = [*(d.columns(1999, width, torch.float32) for d in DATA), odd]
    x = torch.cat(kinds, 1)
    # Where a column's first element is 1e4, the squares of a part without it have no more digits.
    (made,) = run(tmp_path, Columns("columns", statistics, (tuple(x.shape),)), [x], False, atol=0.1)
    for number, columns in enumerate(kinds[:-1]):
        check([m[number * width :][:width] for m in made], columns)
    for got, want in zip(made, statistics(x), strict=True):
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize("kind", [Columns, HalfColumns])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_equal_elements_have_that_mean_and_no_variance(
    kind: type[Columns], count: int, dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a sum over the number the mean would be next to it, in a chunk of five rows as well."""
    monkeypatch.setattr(moments, "CASCADE_PARTS", replace(moments.CASCADE_PARTS, of_columns=(count,)))
    x = torch.randn(1, 21, generator=torch.Generator().manual_seed(1)).expand(301, 21).to(kind.dtype)
    rows = [x[:301], x[:5]] if dynamic else [x]
    columns = kind("columns", statistics, ((301, 21),), ({0: "n", 1: "c"},))
    for few, made in zip(rows, run(tmp_path, columns, [r.contiguous() for r in rows], dynamic), strict=True):
        assert torch.equal(made[0], few[0].float()) and not made[1].any()


def test_what_columns_are_made_of_is_not_stored_for_their_first_element() -> None:
    case = HalfColumns("made", lambda x: statistics(torch.nn.functional.gelu(x.float())), ((1 << 18, 64),))
    graph, made = kernels(case, False)
    (x,) = (v for v in graph.inputs if isinstance(v, Value))
    assert len(made) == 2 and all(p is x or p.numel is not x.numel for s in made for p in s.params)


@pytest.mark.parametrize("kind", [Columns, HalfColumns])
def test_any_size(kind: type[Columns], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "CASCADE_PARTS", replace(moments.CASCADE_PARTS, of_columns=(4,)))
    sizes = ((300, 70), (257, 64), (64, 130), (33, 5))
    tensors = [Data("apart", 3.0).columns(*size, kind.dtype) for size in sizes]
    for x, made in zip(
        tensors,
        run(tmp_path, kind("columns", statistics, sizes[:1], ({0: "n", 1: "c"},)), tensors, True),
        strict=True,
    ):
        check(made, x)


def test_a_tail_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known sizes: the last part has rows of its own number, and columns end within a block."""
    monkeypatch.setattr(moments, "CASCADE_PARTS", replace(moments.CASCADE_PARTS, of_columns=(4,)))
    x = Data("apart", 3.0).columns(301, 67, torch.float16)
    (made,) = run(tmp_path, HalfColumns("columns", statistics, ((301, 67),)), [x], False)
    check(made, x)


def test_whole_steps_count_once_for_all_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells have counts of their own only in the step in which a part ends."""
    monkeypatch.setattr(moments, "CASCADE_PARTS", replace(moments.CASCADE_PARTS, of_columns=(16,)))
    for rows in (8192, 8200):
        _, made = kernels(HalfColumns("columns", statistics, ((rows, 4096),)), False)
        program = made[0].program
        counts = [s.vars[0] for s in program.statements() if isinstance(s, Declare)]
        loops = [s for s in program.loops() if any(isinstance(u, Update) for u in s.body)]
        assert counts[0].axes == () and [len(c.axes) for c in counts[1:]] == [1] * (len(loops) - 1)
        assert len(loops) == (2 if rows % 4096 else 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_large_columns_are_read_once_without_a_division_per_element(dynamic: bool, tmp_path: Path) -> None:
    graph, made = kernels(HalfColumns("columns", statistics, ((8192, 4096),), ({0: "n"},)), dynamic)
    (x,) = (v for v in graph.inputs if isinstance(v, Value))
    readers = [s for s in made if x in s.params]
    assert len(made) == 2 and readers[0] is made[0]
    program = readers[0].program
    if len(readers) > 1:  # of the first row alone
        last = readers[1].program
        text = print_triton(last, [str(s) for s in graph.symbols()], HOPPER, variants(last)[0], "k1").text
        assert text.count(f"tl.load(p{readers[1].params.index(x)}") == 1 and "for " not in text
    source = print_triton(program, [str(s) for s in graph.symbols()], HOPPER, variants(program)[0], "k0")
    loops = [s for s in program.loops() if any(isinstance(u, Update) for u in s.body)]
    assert len(loops) == 1 + dynamic
    assert source.text.count("tl.load(p0") == 1 + ROW_CHUNKS.rows * len(loops)  # the first row, too
    built = build(tmp_path, source)
    assert built.accesses[128] and not built.facts.spills, built.accesses
    assert built.text.count("div.full.f32") < 10 < built.text.count("fma.rn.f32")


def test_few_rows_are_read_twice() -> None:
    """What nearest memory holds anyway needs no parts."""
    graph = capture(Columns("columns", statistics, ((40, 64),)), False)
    assert not any(op.name.endswith("_part") for op in cut(graph).ops)


@pytest.mark.parametrize(("rows", "count"), [(128, 1), (8192, 2)])
def test_parts_are_made_where_there_are_many_rows(rows: int, count: int) -> None:
    """Few rows take one kernel, in blocks narrow enough for all cores; a merge holds all parts of its columns."""
    _, made = kernels(HalfColumns("columns", statistics, ((rows, 4096),)), False)
    assert len(made) == count
    first, last = made[0].schedule, made[-1].schedule
    assert not any(c.role is Role.STREAMED for c in last.tiling.classes)
    assert first.tiling.lane is not None and first.plan(first.tiling.lane).tile == (32 if count == 1 else 64)


def test_few_rows_are_added_up_by_a_block_for_each_core() -> None:
    _, made = kernels(HalfColumns("columns", lambda x: x.float().sum(0), ((2048, 4096),)), False)
    (schedule,) = [s.schedule for s in made]
    assert (
        schedule.tiling.lane is not None
        and schedule.plan(schedule.tiling.lane).tile == 32
        and schedule.launch.warps == 16
    )
