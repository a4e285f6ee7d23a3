"""Bytes that move and bytes that tiles take: by hand, and as reports count them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from tests.support.corpus import CASES
from tests.support.library_calls import captured, fast
from tests.support.one_kernel import capture
from tests.tilegraph.covers import case, covered, reported, result, scheduled
from torch import Tensor, nn

from tilewright.cli.command import cli
from tilewright.errors import VerifyError
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Cover, Kernel
from tilewright.target import MemoryKind
from tilewright.tilegraph.connect import connect
from tilewright.tilegraph.footprint import footprint
from tilewright.tilegraph.propagate import block, full_tile
from tilewright.tilegraph.traffic import traffic

HOST, DEVICE, SHARED, REGISTER = MemoryKind.HOST, MemoryKind.DEVICE, MemoryKind.SHARED, MemoryKind.REGISTER

# --- traffic -----------------------------------------------------------------------


def test_inputs_and_results_move_once_a_kernel() -> None:
    """9 x 20 times 20 x 33: the products and sums of one kernel stay on chip."""
    found = case(
        lambda x, w, b: F.relu((x[:, :, None] * w[None]).sum(1) + b), (9, 20), (20, 33), (33,), dynamic=True
    )
    (n,) = found.cover.graph.symbols()
    for rows in (9, 70):
        moved = traffic(found.tiles, {repr(n): rows})
        assert moved[DEVICE] == 4 * (rows * 20 + 20 * 33 + 33 + rows * 33)
        assert moved[REGISTER] == 4 * (2 * rows * 20 * 33 + 2 * rows * 33 + 2 * rows * 33)


def test_scratch_is_written_once_and_read_by_each_reader() -> None:
    moved = traffic(case(lambda x: torch.softmax(x, -1), (33, 200)).tiles, {})
    row = 4 * 33 * 200
    assert moved == {DEVICE: 2 * row, SHARED: 3 * row, REGISTER: 4 * 4 * 33}


def test_each_kernel_that_reads_a_value_reads_it_again() -> None:
    graph = case(lambda x: (x.exp().sum(0), x.exp().sum(1)), (13, 40)).cover.graph
    exp, *sums = graph.ops
    size = 4 * 13 * 40
    stored = Cover(graph, tuple(Kernel((op,), op.outputs) for op in (exp, *sums)))
    again = Cover(graph, tuple(Kernel((exp, op), op.outputs) for op in sums))
    for cover, count in ((stored, 4), (again, 2)):
        moved = traffic(connect(cover, scheduled(cover)), {})
        assert moved[DEVICE] == count * size + 4 * (13 + 40) == reported(cover, {})


def test_what_lies_on_the_host_is_brought_once() -> None:
    found = case(lambda x, y: (x + y).sum(1) * y[:, 0], (6, 8), (6, 8))
    moved = traffic(connect(found.cover, found.schedules, host=[1]), {})
    assert moved[HOST] == 4 * 6 * 8 and moved[DEVICE] == traffic(found.tiles, {})[DEVICE]
    assert list(moved) == sorted(moved)


def test_a_size_that_nobody_knows_is_refused() -> None:
    found = case(lambda x: x.exp(), (6, 8), dynamic=True)
    with pytest.raises(KeyError):
        traffic(found.tiles, {})


class Net(nn.Module):
    """Convolutions as calls, a pool and a mean as kernels, a product of a view of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.max_pool2d(self.conv(x).relu(), 3, 2, 1)
        return self.last(y.mean((2, 3))).softmax(-1), torch.topk(y.flatten(1), 3).values


def graphs() -> list[Graph]:
    """Graphs of the corpus with sizes known and unknown, and some with calls and views."""
    chosen = [
        capture(c, dynamic) for c in CASES[::3] for dynamic in ((False, True) if c.dynamic else (False,))
    ]
    nets = [
        fast(captured(Net().eval(), [torch.randn(2, 3, 16, 16)], frozen=frozen)) for frozen in (True, False)
    ]
    return [*chosen, *nets]


def test_reports_count_the_same_bytes() -> None:
    calls = 0
    for graph in graphs():
        found = covered(graph)
        sizes = {repr(s): 29 + 7 * k for k, s in enumerate(graph.symbols())}
        calls += len(found.cover.steps) - len(found.schedules)
        assert traffic(found.tiles, sizes)[DEVICE] == reported(found.cover, sizes), graph.show()
    assert calls > 4


# --- footprint -----------------------------------------------------------------------


def test_a_tile_takes_the_boxes_of_what_it_needs() -> None:
    """A tile of 3 x 8 of a product of 9 x 20 and 20 x 33: 3 rows, 8 columns, and all of their 20 places."""
    found = case(lambda x, w, b: F.relu((x[:, :, None] * w[None]).sum(1) + b), (9, 20), (20, 33), (33,))
    taken = footprint(found.tiles, found.kernel, {result(found): block([3, 8], [3, 8])}, {})
    assert taken[DEVICE] == 4 * (3 * 20 + 20 * 8 + 8 + 3 * 8)
    assert taken[REGISTER] == 4 * (3 * 20 * 8 + 3 * 8), "products and sums; the rest lives later"


def test_a_row_of_a_softmax_waits_in_scratch() -> None:
    found = case(lambda x: torch.softmax(x, -1), (33, 200), dynamic=True)
    row = {result(found): block([0, 0], [1, 200])}
    taken = footprint(found.tiles, found.kernel, row, {repr(s): 33 for s in found.cover.graph.symbols()})
    assert taken == {DEVICE: 2 * 4 * 200, SHARED: 4 * 200, REGISTER: 4}


def test_what_is_stored_and_read_again_has_a_box_for_each() -> None:
    found = case(lambda x: (x.exp(), x.exp().sum(-1)), (13, 40))
    exps, sums = found.kernel.outputs
    taken = footprint(found.tiles, found.kernel, {exps: block([2, 0], [1, 8]), sums: block([2], [1])}, {})
    assert taken == {DEVICE: 4 * (40 + 8 + 1), REGISTER: 4 * 40}


def test_all_of_a_result_takes_what_moves() -> None:
    found = case(lambda x: F.max_pool2d(x.relu(), 3, 2, 1), (2, 3, 13, 15))
    taken = footprint(found.tiles, found.kernel, {result(found): full_tile(result(found))}, {})
    assert taken[DEVICE] == traffic(found.tiles, {})[DEVICE]


def test_a_result_without_a_tile_is_refused() -> None:
    found = case(lambda x: x.exp(), (3, 5))
    with pytest.raises(VerifyError, match="no tile is given"):
        footprint(found.tiles, found.kernel, {}, {})


def test_a_kernel_of_another_graph_is_refused() -> None:
    found, other = case(lambda x: x.exp(), (3, 5)), case(lambda x: x.sin(), (3, 5))
    with pytest.raises(VerifyError, match="no such kernel"):
        footprint(found.tiles, other.kernel, {v: full_tile(v) for v in other.kernel.outputs}, {})


# --- the command line ------------------------------------------------------------------


@pytest.mark.usefixtures("costs_of_wide_vectors")
def test_explain_tells_levels_and_bytes(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("levels_net.py", "w", encoding="utf-8") as file:
        file.write("import torch\ndef make():\n    return torch.nn.Softmax(-1), (torch.ones(33, 200),)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    shown = CliRunner().invoke(cli, ["explain", "levels_net:make"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.output.splitlines()]
    for row in ("DEVICE 3 51.6 KiB", "SHARED 2 77.3 KiB", "REGISTER 2 528 B", "4 of 7 edges stay on chip"):
        assert row.split() in lines, shown.output
