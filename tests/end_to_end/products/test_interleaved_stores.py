"""Products whose rows and columns take turns in memory, as a shuffle of pixels has them: stored along memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from tests.support.triton.harness import Job, build, interpret, print_triton, same_as_interpreter
from torch import Tensor

from tilewright.interp.program import run_program
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Store
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.lower.variants import Variant, variants
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import preset

GPU = preset("sm_90")


def shuffle(y: Tensor, factor: int) -> Tensor:
    """Pixels of images with channels innermost, as images whose rows lie innermost."""
    n, h, w, c = y.shape
    apart = y.view(n, h, w, c // factor**2, factor, factor).permute(0, 3, 1, 4, 2, 5)
    return apart.reshape(n, c // factor**2, h * factor, w * factor)


def doubled(x: Tensor, w: Tensor) -> Tensor:
    return F.leaky_relu(shuffle(x @ w, 2), 0.1)


def quadrupled(x: Tensor, w: Tensor) -> Tensor:
    return shuffle(x @ w, 4) * 2


def plain(x: Tensor, w: Tensor) -> Tensor:
    return F.leaky_relu(x @ w, 0.1)


def operands(rows: int = 16, columns: int = 64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, rows, rows, 32).half(), torch.randn(32, columns).half()


def fastest(function: object, given: tuple[Tensor, ...]) -> Scheduled:
    """The kernel of a function, with the best schedule by the model."""
    graph, solver = capture(function, given), Solver(GPU, Options())  # type: ignore[arg-type]
    kernel = one_kernel(graph)
    best = solver.proposals(kernel, graph.layouts)[0]
    return solver.solve(kernel, graph.layouts, best.schedule)


def store(found: Scheduled) -> Store:
    made = legalise_for_gpu(found.program, GPU)
    (last,) = (s for s in made.statements() if isinstance(s, Store))
    return last


@pytest.mark.parametrize(
    ("function", "rows", "columns", "count", "length"),
    [(doubled, 16, 64, 2, 32), (doubled, 24, 64, 2, 16), (quadrupled, 16, 64, 4, 64)],
)
def test_results_are_right(
    function: object, rows: int, columns: int, count: int, length: int, tmp_path: Path
) -> None:
    given = operands(rows, columns)
    found = fastest(function, given)
    turns = store(found).interleaved
    assert turns is not None and (turns.count, turns.length) == (count, length)
    arrays = [t.reshape(-1).numpy() for t in given]
    job = Job(found.program, [*arrays, None], {}, ())
    made = torch.from_numpy(run_program(found.program, [*arrays, None], {})[-1])
    expected = function(*given)  # type: ignore[operator]
    assert torch.allclose(made.float(), expected.reshape(-1).float(), rtol=1e-2, atol=1e-2)
    (outcome,) = interpret(tmp_path, [job])
    same_as_interpreter(job, outcome, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("function", "rows"), [(plain, 16), (doubled, 14)], ids=["dense", "short turns"])
def test_others_are_stored_as_they_are(function: object, rows: int) -> None:
    assert store(fastest(function, operands(rows))).interleaved is None


@pytest.mark.parametrize("machine", ["sm_80", "sm_90", "sm_100"])
def test_threads_store_sixteen_bytes(machine: str, tmp_path: Path) -> None:
    found = fastest(doubled, (torch.randn(4, 64, 64, 64).half(), torch.randn(64, 256).half()))
    source = print_triton(found.program, (), preset(machine), variants(found.program)[0], "k0")
    text = build(tmp_path, source, machine).text
    stores = re.findall(r"st\.global\S*", text)
    assert stores and all(".v4." in s for s in stores)


def test_unaligned_addresses_are_right(tmp_path: Path) -> None:
    found = fastest(doubled, operands())
    source = print_triton(found.program, (), GPU, Variant(aligned=False, wide=True), "k0")
    assert "st.global" in build(tmp_path, source).text
