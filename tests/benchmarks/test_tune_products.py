"""The table of measured products is what the program makes of the files of results that it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from benchmarks.tune_products import read_blocks, table_of
from tests.support.layers import ROOT
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.options import Options
from tilewright.schedule.product_table import ProductTable, blocks_of, product_table
from tilewright.schedule.solver import Solver
from tilewright.target import preset


def test_the_table_of_the_package_is_what_its_files_say() -> None:
    table = product_table("sm_90")
    files = sorted({e.source.partition("#")[0] for e in table.entries})
    made = table_of([ROOT.parents[1] / file for file in files], ProductTable())
    told = {(e.shape, e.blocks, e.us, e.library_us, e.source.partition("#")[2]) for e in made.entries}
    assert told == {
        (e.shape, e.blocks, e.us, e.library_us, e.source.partition("#")[2]) for e in table.entries
    }


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def windows(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.conv2d(x, w, None, 1, 1, 1, x.shape[1])


@pytest.mark.parametrize(
    ("run", "shapes"),
    [(product, [(64, 128), (256, 128)]), (windows, [(1, 64, 16, 16), (64, 1, 3, 3)])],
    ids=["product", "windows"],
)
def test_the_blocks_of_a_schedule_are_those_of_its_text(
    run: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]]
) -> None:
    inputs = [torch.randn(s).half() for s in shapes]
    last = torch.channels_last
    device = compiled(run, [x.contiguous(memory_format=last) if x.ndim == 4 else x for x in inputs])
    (kernel,) = device.kernels
    solver = Solver(preset("sm_90"), Options())
    found = [s.schedule for s in solver.proposals(kernel.kernel, device.cover.layouts)]
    assert len(found) > 5
    assert all(read_blocks(str(s)) == blocks_of(s) for s in found)
    assert all(bool(blocks_of(s).unrolled) == (run is windows) for s in found)
