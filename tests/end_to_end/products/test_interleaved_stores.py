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
from tilewright.ir.graph import Value
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


def turned(x: Tensor, w: Tensor) -> Tensor:
    """The same with the sides of the product changed."""
    n, h, v, k = x.shape
    y = (w.mT @ x.reshape(n * h * v, k).mT).mT
    return F.leaky_relu(shuffle(y.reshape(n, h, v, w.shape[1]), 2), 0.1)


def plain(x: Tensor, w: Tensor) -> Tensor:
    return F.leaky_relu(x @ w, 0.1)


def operands(image: tuple[int, int, int] = (2, 16, 16), columns: int = 64) -> tuple[Tensor, Tensor]:
    """`image`: how many there are, lines, and places of a line."""
    torch.manual_seed(0)
    return torch.randn(*image, 32).half(), torch.randn(32, columns).half()


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


CASES = {
    "doubled": (doubled, (2, 16, 16), 64, 2, 32),
    "lines of 24": (doubled, (2, 24, 24), 64, 2, 16),
    "quadrupled": (quadrupled, (2, 16, 16), 64, 4, 64),
    "a last block with few rows": (doubled, (3, 9, 8), 64, 2, 16),
    "fewer columns than a block": (doubled, (2, 16, 16), 8, 2, 32),
    "columns first": (turned, (2, 16, 16), 64, 2, 32),
    "fewer columns, columns first": (turned, (3, 5, 16), 12, 2, 32),
}


@pytest.mark.parametrize(("aligned", "wide"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", CASES)
def test_results_are_right(name: str, tmp_path: Path, *, aligned: bool, wide: bool) -> None:
    function, image, columns, count, length = CASES[name]
    given = operands(image, columns)
    found = fastest(function, given)
    turns = store(found).interleaved
    assert turns is not None and (turns.count, turns.length) == (count, length)
    inputs = [v for v in capture(function, given).inputs if isinstance(v, Value)]  # they go by their numbers
    order = [next((k for k, w in enumerate(inputs) if w.id == v.id), None) for v in found.params]
    arrays = [None if k is None else given[k].reshape(-1).numpy() for k in order]
    job = Job(found.program, arrays, {}, (), Variant(aligned=aligned, wide=wide))
    made = torch.from_numpy(run_program(found.program, arrays, {})[-1])
    expected = function(*given)  # type: ignore[operator]
    assert torch.allclose(made.float(), expected.reshape(-1).float(), rtol=1e-2, atol=1e-2)
    (outcome,) = interpret(tmp_path, [job])
    same_as_interpreter(job, outcome, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("function", "rows"), [(plain, 16), (doubled, 14)], ids=["dense", "short turns"])
def test_others_are_stored_as_they_are(function: object, rows: int) -> None:
    assert store(fastest(function, operands((2, rows, rows)))).interleaved is None


@pytest.mark.parametrize("machine", ["sm_80", "sm_90", "sm_100"])
def test_threads_store_sixteen_bytes(machine: str, tmp_path: Path) -> None:
    found = fastest(doubled, (torch.randn(4, 64, 64, 64).half(), torch.randn(64, 256).half()))
    source = print_triton(found.program, (), preset(machine), variants(found.program)[0], "k0")
    text = build(tmp_path, source, machine).text
    stores = re.findall(r"st\.global\S*", text)
    assert stores and all(".v4." in s for s in stores)
