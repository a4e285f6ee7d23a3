"""The table of measured products is what the program makes of the files of results that it names."""

from __future__ import annotations

import torch
from benchmarks.tune_products import read_blocks, table_of
from tests.support.layers import ROOT
from tests.support.triton.absent_gpu import compiled

from tilewright.ir.schedule import Schedule
from tilewright.schedule.product_table import ProductTable, blocks_of, product_table


def test_the_table_of_the_package_is_what_its_files_say() -> None:
    table = product_table("sm_90")
    files = sorted({e.source.partition("#")[0] for e in table.entries})
    made = table_of([ROOT.parents[1] / file for file in files], ProductTable())
    told = {(e.shape, e.blocks, e.us, e.library_us, e.source.partition("#")[2]) for e in made.entries}
    assert told == {
        (e.shape, e.blocks, e.us, e.library_us, e.source.partition("#")[2]) for e in table.entries
    }


def test_the_blocks_of_a_schedule_are_those_of_its_text() -> None:
    device = compiled(lambda x, w: x @ w.t(), [torch.randn(64, 128).half(), torch.randn(256, 128).half()])
    (kernel,) = device.kernels
    assert isinstance(kernel.schedule, Schedule)
    found = blocks_of(kernel.schedule)
    assert len(found.tiles) == 2 and read_blocks(str(kernel.schedule)) == found
