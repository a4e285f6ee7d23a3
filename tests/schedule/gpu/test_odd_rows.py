"""Kernels over rows that begin anywhere: what masked lanes load, blocks of their own, and what alignment is worth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.harness import Job, interpret, same_as_interpreter
from torch import Tensor

from tilewright.ir.program import Load
from tilewright.lower.variants import variants
from tilewright.runtime.cuda.kernels import needed, usual


def _scaled(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


CASES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.argmax(-1),
    lambda x: x.argmin(-1),
    lambda x: x.amax(-1),
    lambda x: x.sum(-1),
    lambda x: x.cumsum(-1),
    lambda x: torch.softmax(x, -1),
    lambda x: x.sum(-1) * x.amax(-1),
    lambda x: x.amax(-1) - x.amin(-1),
    lambda x: (x - x.amax(-1, keepdim=True)).exp().sum(-1) + x.sum(-1),
    _scaled,
]


@pytest.mark.parametrize("run", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_results(run: Callable[[Tensor], Tensor], dynamic: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = -3 - torch.rand(5, 1001, dtype=torch.float32)  # the worst value of a maximum or a sum would not be 0
    (made,), _ = compiled(run, [x.to(dtype)], [(0, 1)] if dynamic else ()).run([x.to(dtype)])
    wanted = run(x.to(dtype))
    if wanted.dtype.is_floating_point:
        near = 1e-4 if dtype is torch.float32 else 2e-3
        torch.testing.assert_close(made, wanted, rtol=near, atol=near)
    else:
        assert torch.equal(made, wanted)


@pytest.mark.parametrize("extreme", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_places_in_rows_of_one_value(extreme: float, name: str, dynamic: bool) -> None:
    """Lanes that are masked hold the worst value, which may be the row's only one."""
    x = torch.full((3, 1001), extreme)
    x[1, 500:] = 1.0
    x[2] = -1.0
    run = lambda x: getattr(x, name)(-1)  # noqa: E731
    (made,), _ = compiled(run, [x], [(0, 1)] if dynamic else ()).run([x])
    assert torch.equal(made, run(x))


@pytest.mark.parametrize(("run", "idle"), [(CASES[0], -torch.inf), (CASES[3], 0.0)])
def test_masked_lanes_load_what_a_fold_ignores(run: Callable[[Tensor], Tensor], idle: float) -> None:
    (kernel,) = compiled(run, [torch.empty(64, 4095)]).kernels
    (load,) = [s for s in kernel.program.statements() if isinstance(s, Load)]
    assert load.other is not None and load.other.value == idle


def test_a_load_serves_one_fold_s_masked_lanes() -> None:
    (kernel,) = compiled(CASES[6], [torch.empty(64, 4095)]).kernels
    loads = [s for s in kernel.program.statements() if isinstance(s, Load)]
    assert len(loads) == 1 and loads[0].other is not None and loads[0].other.value in (0.0, -torch.inf)


@pytest.mark.parametrize(("columns", "aligned"), [(4095, False), (4094, True), (4096, True)])
def test_alignment_of_vectors_alone_is_not_used(columns: int, aligned: bool) -> None:
    """Threads would hold neighbours for the sake of the weights, with gaps in every access to rows."""
    inputs = [torch.empty(64, columns, dtype=torch.float16), torch.empty(columns, dtype=torch.float16)]
    (kernel,) = compiled(lambda x, w: x.relu() * w, inputs).kernels
    assert any(v.aligned for v in variants(kernel.program)) is aligned
    for built in (usual(kernel.program), needed(kernel.program, {})):
        assert [v.aligned for v in built] == [aligned]
    (kernel,) = compiled(lambda x, w: x.relu() + 1, inputs).kernels
    assert any(v.aligned for v in variants(kernel.program))


def test_rows_of_singles_that_begin_anywhere_have_blocks_of_their_own() -> None:
    (kernel,) = compiled(CASES[4], [torch.empty(64, 4095)], [(0, 1)]).kernels
    found = {b.program.warps for b in kernel.buckets if "4096" in repr(b.condition)}
    assert len(found) == 2


def test_threads_of_blocks_over_several_unknown_lengths_hold_more() -> None:
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean((1, 2), keepdim=True) + 1e-6) * w[:, None]

    inputs = [torch.empty(512, 4, 1024), torch.empty(4)]
    (static,) = compiled(scaled, inputs).kernels
    (dynamic,) = compiled(scaled, inputs, [(0, 1, 2), (0,)]).kernels
    fits = [
        b.program.warps
        for b in dynamic.buckets
        if "1024" in repr(b.condition) and "%" not in repr(b.condition)
    ]
    assert static.program.warps == 2 * fits[0]


def test_printed_rows_mean_the_same(tmp_path: Path) -> None:
    jobs: list[Job] = []
    for run in CASES:
        for dynamic in ([], [(0, 1)]):
            x = -3 - torch.rand(3, 301)
            jobs += compiled(run, [x], dynamic).run([x])[1]
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome, atol=1e-4)
