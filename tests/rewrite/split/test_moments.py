"""A mean and the squares of the distances from it in one pass: the law, the accuracy, what is left alone, the code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.rewrite.split.cut import HOPPER, cut, kernels
from tests.support.corpus import Case
from tests.support.one_kernel import capture
from tests.support.triton.harness import Job, build, interpret, print_triton
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.interp.graph import run_graph
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.program import Collapse
from tilewright.lower.variants import variants
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.rewrite.split import moments
from tilewright.schedule.solver import Solver
from tilewright.tuning.thresholds import SPLIT_MOMENTS


class Halves(Case):
    """Inputs in half precision, with channels that have a mean of their own."""

    def inputs(self, scale: int = 1, seed: int = 0) -> list[Tensor]:
        return [
            x.add(torch.arange(x.shape[1]).reshape(-1, *[1] * (x.dim() - 2))).half()
            for x in super().inputs(scale, seed)
        ]


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.float()
    over = tuple(d for d in range(x.dim()) if d != 1)
    mean = h.mean(over, keepdim=True)
    return mean, (h - mean).square().mean(over)


def mixed(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(1)
    return mean, ((x - mean[:, None]) ** 2).mean(1, keepdim=True)


def mixed_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(0)
    return mean, ((x - mean[None]) ** 2).mean(0, keepdim=True)


CASES = [
    Halves("images", statistics, ((40, 3, 19, 17),), ({0: "n", 2: "h", 3: "w"},)),
    Halves("columns", statistics, ((300, 70),), ({0: "n", 1: "c"},)),
    Case("columns, other dims", mixed_columns, ((300, 5),), ({0: "n"},)),
    Case("channels last", lambda x: torch.var_mean(x.permute(0, 3, 1, 2), (0, 2, 3)), ((9, 31, 17, 6),)),
    Case("columns in two dims", lambda x: torch.var_mean(x[:, :7], (0, 1)), ((40, 31, 6),)),
    Case("other dims", mixed, ((5, 300),), ({1: "n"},)),
    Case("var_mean", lambda x: torch.var_mean(x, (0, 2)), ((33, 6, 700),), ({0: "n", 2: "k"},)),
    Case("std of all", lambda x: x.std(), ((130, 129),)),
    Case("double", lambda x: torch.var_mean(x.double(), 1), ((3, 9000),)),
    Case("computed", lambda x: torch.var(torch.relu(x + 1), (0, 2, 3)), ((40, 3, 19, 17),)),
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_same_meaning_in_parts(case: Case, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "SPLIT_MOMENTS", replace(moments.SPLIT_MOMENTS, min_column_part_rows=1))
    for part, count in ((SPLIT_MOMENTS.max_row_part_elements, 1), (64, 4)):
        monkeypatch.setattr(
            moments, "SPLIT_MOMENTS", replace(moments.SPLIT_MOMENTS, max_row_part_elements=part)
        )
        monkeypatch.setattr(moments, "CASCADE_PARTS", replace(moments.CASCADE_PARTS, of_columns=(count,)))
        graph = capture(case, dynamic)
        parted = cut(graph)
        parted.verify()
        assert any(op.name.endswith("_part") for op in parted.ops) or part > 64
        wanted = case.run(*case.inputs(1))
        for got, want in zip(
            run_graph(parted, case.inputs(1)), wanted if isinstance(wanted, tuple) else (wanted,), strict=True
        ):
            rtol = 1e-12 if want.dtype is torch.float64 else 2e-5
            np.testing.assert_allclose(
                np.asarray(got, np.float64), want.double().numpy(), rtol=rtol, atol=rtol
            )


def other_mean(x: Tensor) -> Tensor:
    return (x - x.mean(0, keepdim=True)).square().mean(1)


def other_data(x: Tensor) -> Tensor:
    return (x * 2 - x.mean(1, keepdim=True)).square().mean(1)


def other_count(x: Tensor) -> Tensor:
    return (x - x.sum(1, keepdim=True) / 7).square().sum(1)


def cubes(x: Tensor) -> Tensor:
    d = x - x.mean(1, keepdim=True)
    return (d * d * d).sum(1)


def of_columns(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: run(x.mT)


OTHERS = [other_mean, other_data, other_count, cubes]


@pytest.mark.parametrize("run", [*OTHERS, *map(of_columns, OTHERS)])
def test_what_is_no_variance_is_left_alone(run: Callable[[Tensor], Tensor]) -> None:
    graph = capture(Case("other", run, ((64, 3000),)), False)
    assert cut(graph) is graph


LARGE = [
    Halves("images", statistics, ((512, 64, 32, 32),), ({0: "n", 2: "h", 3: "w"},)),
]


def described(case: Case) -> Case:
    """The same with inputs that nobody writes or reads."""

    class Empty(Case):
        def inputs(self, scale: int = 1, seed: int = 0) -> list[Tensor]:
            return [torch.empty(s, dtype=torch.float16) for s in self.shapes]

    return Empty(case.name, case.run, case.shapes, case.dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", LARGE, ids=lambda c: c.name)
def test_a_large_input_is_read_once(case: Case, dynamic: bool, tmp_path: Path) -> None:
    graph, made = kernels(described(case), dynamic)
    (x,) = (v for v in graph.inputs if isinstance(v, Value))
    readers = [s for s in made if x in s.params]
    assert len(made) == 2 and len(readers) == 1
    program = readers[0].program
    source = print_triton(program, [str(s) for s in graph.symbols()], HOPPER, variants(program)[0], "k0")
    assert source.text.count("tl.load(p0") == 1 and "for " not in source.text.split("def k0")[1]
    built = build(tmp_path, source)
    assert built.accesses[128] and not built.facts.spills, built.accesses


def test_many_rows_stay_whole() -> None:
    """Each is one block's work; what follows finds it there."""
    _, made = kernels(described(Case("rows", lambda x: torch.var(x.float(), 1), ((4096, 4096),))))
    assert len(made) == 1


def test_a_large_mean_costs_no_digits(tmp_path: Path) -> None:
    """The code itself, of both kernels, beside float64."""
    case = Case("far", lambda x: torch.var_mean(x, (0, 2)), ((24, 2, 1024),))
    graph = capture(case, False)
    solver = Solver(HOPPER, Options())
    x = (torch.randn(24, 2, 1024, generator=torch.Generator().manual_seed(0)) + 4096).numpy()
    parted = cut(graph)
    values = {v: x for v in graph.inputs if isinstance(v, Value)}
    cover = partition(parted, solver.price, NO_HINTS)
    for number, step in enumerate(s for s in cover.steps if isinstance(s, Kernel)):
        s = solver.solve(step, cover.layouts)
        folder = tmp_path / str(number)
        folder.mkdir()
        (outcome,) = interpret(folder, [Job(s.program, [values.get(v) for v in s.params], {})])
        values |= dict(zip(s.params, outcome.arrays, strict=True))
    variance, mean = (values[v] for v in graph.outputs if isinstance(v, Value))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(variance.reshape(-1), wide.var((0, 2), ddof=1), rtol=1e-5)
    np.testing.assert_allclose(mean.reshape(-1), wide.mean((0, 2)), rtol=1e-6)


def test_parts_of_unknown_size_know_their_number() -> None:
    """How many elements a part has is the same for all its lanes, and not added up; few parts have a schedule."""
    case = Halves("images", statistics, ((511, 64, 31, 31),), ({0: "n", 2: "h", 3: "w"},))
    _, made = kernels(case, True)
    first = made[0].program
    folded = [s.reduction.combiner for s in first.statements() if isinstance(s, Collapse)]
    assert folded == ["add", "add"]
    conditions = [str(b.condition) for b in made[1].buckets]
    assert conditions[0].endswith("<= 64)") and conditions[1].endswith("<= 1024)")
