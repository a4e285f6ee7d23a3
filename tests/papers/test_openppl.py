"""What OpenPPL's convolutions do, as it falls out here: packed taps (IDXN), parts of channels and taps (2SPK), the
order of blocks (SWZL)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from tests.support.triton.harness import print_triton
from torch import Tensor

from tilewright.form.sides.merge_sides import merge_sides
from tilewright.ir.graph import Graph
from tilewright.ir.sizes import dims
from tilewright.lower.variants import variants
from tilewright.options import Options
from tilewright.rewrite.split.products import split_product
from tilewright.schedule.solver import Solver, form_of
from tilewright.target import preset

HOPPER = preset("sm_90")
STEP = 8
"""Elements of a sum that the instruction takes at once in the paper's example."""


def halves(*shape: int) -> Tensor:
    made = torch.empty(shape, dtype=torch.float16)
    return made.to(memory_format=torch.channels_last) if len(shape) == 4 else made


def convolution(channels: int, made: int) -> Graph:
    return capture(
        lambda x, w: F.conv2d(x, w, None, 1, 1), (halves(1, channels, 9, 9), halves(made, channels, 3, 3))
    )


def test_taps_of_three_channels_take_four_steps_where_padded_ones_take_nine() -> None:
    graph = convolution(3, 16)
    form = merge_sides(form_of(one_kernel(graph), graph.layouts, HOPPER, Options()))
    (summed,) = {a for item in form.items for a in item.reduce}
    assert dims.static(summed.extent) == 27 and -(-27 // STEP) == 4
    assert 9 * -(-3 // STEP) == 9


def test_a_sum_has_as_many_parts_as_channels_and_taps_give() -> None:
    graph = convolution(1024, 4)
    kernel, fresh = one_kernel(graph), graph.fresh_id()
    for count in (8, 9, 72):
        found = split_product(kernel, graph.layouts, count, fresh)
        assert found is not None and dims.static(found.between.shape[0]) == count


def test_blocks_in_groups_of_rows_come_once_each() -> None:
    """For all grids of up to 39 by 39 blocks."""
    graph = capture(lambda x, w: F.linear(x, w), (halves(4096, 64), halves(4096, 64)), [{0: "m"}, {0: "n"}])
    solver = Solver(HOPPER, Options())
    kernel = one_kernel(graph)
    base = solver.proposals(kernel, graph.layouts)[0].schedule
    schedule = base.changed(order=8)
    program = solver.solve(kernel, graph.layouts, schedule).program
    assert program.order == 8
    symbols = [str(s) for s in graph.symbols()]
    text = print_triton(program, symbols, HOPPER, variants(program)[0], "k0").text
    lines = [line.strip() for line in text.splitlines()]
    first, last = (next(n for n, x in enumerate(lines) if x.startswith(s)) for s in ("point =", "g1 ="))
    code = compile("\n".join(lines[first : last + 1]), "order", "exec")
    row, column = (c.tile for c in schedule.tiling.classes if c.role.value == "grid")
    for rows in range(1, 40):
        for columns in range(1, 40):
            points = np.arange(rows * columns)
            tl = SimpleNamespace(program_id=lambda _, points=points: points, minimum=np.minimum)
            names = {"tl": tl, "n0": rows * row, "n1": columns * column}
            exec(code, names)
            places = names["g0"] * columns + names["g1"]  # type: ignore[operator]
            assert np.array_equal(np.sort(places), points), (rows, columns)
