"""Other blocks of loops with products: they mean the same, and nothing else has any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.support.lowered import agree
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

from tilewright.interp import EXACT, exact_random, run_graph
from tilewright.interp.algebra import Array
from tilewright.ir.dtype import f16
from tilewright.options import Options
from tilewright.schedule.gpu.block_memory import registers
from tilewright.schedule.gpu.matmul import blocks_of
from tilewright.schedule.solver import Solver
from tilewright.target import preset

GPU = preset("sm_90")


def halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16)


def mlp(x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, a)), b) + y


def scored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without exponentials: of halves these are powers of two, with a factor that no number is exactly."""
    return torch.relu(q @ k.transpose(-1, -2)) @ v


MLP = (halves(128, 48), halves(256, 48), halves(48, 256), halves(128, 48))
PROGRAMS: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]] = {
    "mlp": (mlp, MLP),
    "scores": (scored, [halves(2, 192, 32) for _ in range(3)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_mean_the_same(name: str) -> None:
    run, tensors = PROGRAMS[name]
    graph = capture(run, tensors)
    kernel, solver = one_kernel(graph), Solver(GPU, Options())
    inputs: list[Array] = [exact_random(tuple(t.shape), 10 + k) for k, t in enumerate(tensors)]
    wanted: list[object] = list(run_graph(graph, inputs, algebra=EXACT))
    usual = solver.solve(kernel, graph.layouts)
    found = solver.other_blocks(kernel, graph.layouts)
    assert found and [s.seconds for s in found] == sorted(s.seconds for s in found)
    assert all(s.schedule.tiling != usual.schedule.tiling for s in found)
    for solution in found:
        made = solver.solve(kernel, graph.layouts, solution.schedule)
        assert agree(graph, made, inputs, wanted), str(solution.schedule)


def test_a_plain_product_has_proposals_of_its_own() -> None:
    graph = capture(F.linear, [halves(128, 256), halves(64, 256)])
    kernel, solver = one_kernel(graph), Solver(GPU, Options())
    assert not solver.other_blocks(kernel, graph.layouts) and solver.proposals(kernel, graph.layouts)


def test_what_a_clock_decided_is_not_asked_again() -> None:
    graph = capture(mlp, MLP)
    kernel, solver = one_kernel(graph), Solver(GPU, Options())
    solver.prefer(kernel, solver.other_blocks(kernel, graph.layouts)[0])
    assert not solver.other_blocks(kernel, graph.layouts)


def test_what_is_read_beside_a_loop_counts_as_memory_has_it() -> None:
    """The block that is added at the end: halves, although it is computed with as singles."""
    graph = capture(mlp, MLP)
    kernel, solver = one_kernel(graph), Solver(GPU, Options())
    (found, *_) = solver.other_blocks(kernel, graph.layouts)
    known, blocks = blocks_of(found.form, found.schedule, GPU) or (None, None)
    assert known is not None and blocks is not None
    wide, packed = (registers(known, blocks, GPU, packed=flag) for flag in (False, True))
    rows, columns = (blocks.tiles[a] for a in found.form.outputs[0].kept)
    assert wide - packed == rows * columns * f16.bytes // 4 // (blocks.warps * GPU.lanes)
