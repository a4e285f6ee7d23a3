"""Products whose blocks go through grid points, and store pieces of their results by descriptor: what is printed, that
it means the same, the machine code, and when it is proposed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from tests.support.tile_programs import M, N, Vars
from tests.support.triton.harness import Job, build, interpret, print_triton, same_as_interpreter
from torch import Tensor

from tilewright.errors import IllegalSchedule
from tilewright.ir.dtype import f16
from tilewright.ir.expr import Axis, Expr, axis, call, integer
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Buffer, Load, Loop, Store, TileProgram, value_of
from tilewright.ir.sizes import dims
from tilewright.lower.access.descriptors import with_stored_blocks
from tilewright.lower.variants import GENERIC, Variant, variants
from tilewright.options import Options
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Solver
from tilewright.target import MemoryKind, preset

FAST, LISTED = Variant(aligned=True, wide=False), Variant(aligned=True, wide=False, listed=True)


def halves(*shape: int) -> Tensor:
    return torch.randn(shape).half()


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def layer(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, bias)) * 2


def beside(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """With results that are the same in each row, and everywhere."""
    y = x @ w
    return y, (bias.expand(y.shape) * 2).contiguous(), torch.ones_like(y)


PROGRAMS: dict[str, tuple[Callable[..., object], Sequence[Tensor], Sequence[dict[int, str]]]] = {
    "product": (product, (halves(80, 48), halves(48, 96)), ({}, {})),
    "ragged": (product, (halves(70, 48), halves(48, 88)), ({}, {})),
    "batched": (product, (halves(3, 40, 32), halves(3, 32, 64)), ({}, {})),
    "layer": (layer, (halves(66, 32), halves(72, 32), halves(72)), ({}, {}, {})),
    "all rows alike": (beside, (halves(66, 32), halves(32, 72), halves(72)), ({}, {}, {})),
    "unknown rows": (product, (halves(80, 32), halves(32, 64)), ({0: "m"}, {})),
}


def staying(name: str, pieces: int) -> tuple[Graph, Scheduled]:
    """A product in small blocks that go through grid points."""
    run, given, dynamic = PROGRAMS[name]
    graph = capture(run, given, dynamic)
    solver = Solver(preset("sm_90"), Options())
    kernel = one_kernel(graph)
    tiles = {
        s: [c.tile for c in s.schedule.tiling.classes]
        for s in solver.proposals(kernel, graph.layouts)
        if s.schedule.memory.descriptors
    }
    small = max((s for s, of in tiles.items() if max(of) <= 64), key=lambda s: sum(tiles[s]))
    schedule = small.schedule.changed(persistent=True, stored_pieces=pieces)
    return graph, solver.solve(kernel, graph.layouts, schedule)


def job(name: str, pieces: int, variant: Variant) -> Job:
    """A run of it."""
    graph, made = staying(name, pieces)
    arrays = dict(zip(graph.inputs, (t.numpy() for t in PROGRAMS[name][1]), strict=True))
    symbols = tuple(map(repr, graph.symbols()))
    given = [arrays.get(v) for v in made.params]
    return Job(
        made.program, given, dict.fromkeys(symbols, 80), symbols, variant, f"{pieces} pieces, {variant}"
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_mean_what_a_block_for_each_point_means(name: str, tmp_path: Path) -> None:
    jobs = [job(name, pieces, FAST) for pieces in (0, 1, 2)] + [job(name, 2, GENERIC)]
    for each, pieces in zip(jobs, (0, 1, 2, 0), strict=True):
        text = each.source().text
        results = sum(given is None for given in each.inputs)
        assert "tl.num_programs(0)" in text and text.count(".store([") == pieces * results
    for each, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(each, outcome, rtol=2e-3, atol=2e-3)


def test_lists_have_a_block_for_each_point() -> None:
    source = job("product", 2, LISTED).source()
    assert not source.persistent and "tl.num_programs" not in source.text and ".store([" not in source.text


def test_machines_without_descriptors_store_by_address() -> None:
    source = print_triton(staying("product", 2)[1].program, (), preset("gfx942"), FAST, "k0")
    assert source.persistent and ".store([" not in source.text and "tl.store(" in source.text


def test_it_is_told() -> None:
    shown = staying("batched", 2)[1].program.show()
    assert "persistent = True" in shown and "as 2 blocks from (" in shown


# --- which stores are blocks of a descriptor -------------------------------------


R, C = Axis("r", N), Axis("c", M)
INSIDE = call("and", call("lt", axis(R), N), call("lt", axis(C), M))


def stored(
    offset: Expr | None = None, mask: Expr = INSIDE, tile: int = 16, *, read: bool = False
) -> TileProgram:
    """y[offset] = x[r, c] in blocks; it may read y too."""
    x, y = Buffer("x", f16, dims.mul(N, M)), Buffer("y", f16, dims.mul(integer(4), N, M))
    v = Vars()(f16, R, C)
    at = dims.add(dims.mul(axis(R), M), axis(C))
    body = (Load(v, y if read else x, at, mask), Store(y, offset or at, value_of(v), (R, C), mask))
    inner = Loop(C, dims.ZERO, integer(tile), tile, body)
    return TileProgram((x, y), (), (Loop(R, dims.ZERO, integer(16), 16, (inner,)),), lane=C)


def pieces_of(program: TileProgram, pieces: int) -> int:
    (found,) = (s for s in with_stored_blocks(program, pieces).statements() if isinstance(s, Store))
    return 0 if found.block is None else found.block.pieces


def test_blocks_that_descriptors_reach() -> None:
    assert pieces_of(stored(), 1) == 1 and pieces_of(stored(), 2) == 2
    assert pieces_of(stored(tile=8), 2) == 1, "half a block has 8 bytes"


@pytest.mark.parametrize(
    "program",
    [
        stored(read=True),
        replace(stored(), over=(1,)),
        stored(dims.add(dims.mul(axis(R), M), dims.mul(integer(2), axis(C)))),
        stored(mask=call("and", INSIDE, call("ge", axis(C), integer(2)))),
        stored(mask=call("and", INSIDE, call("le", axis(C), axis(R)))),
    ],
    ids=["read again", "stored over", "strided", "a lower bound", "a triangle"],
)
def test_blocks_that_threads_store(program: TileProgram) -> None:
    assert pieces_of(program, 2) == 0


def test_more_pieces_than_halves_are_refused() -> None:
    with pytest.raises(IllegalSchedule, match="a block of results in 4 pieces"):
        staying("product", 4)


# --- machine code, and what is proposed ------------------------------------------


def proposals(*sizes: int, machine: str = "sm_90") -> tuple[Solver, tuple[Solution, ...]]:
    m, k, n = sizes
    graph = capture(product, (torch.empty(m, k).half(), torch.empty(k, n).half()))
    solver = Solver(preset(machine), Options())
    return solver, tuple(solver.proposals(one_kernel(graph), graph.layouts))


def test_machine_code(tmp_path: Path) -> None:
    """Results leave by bulk copies alone, in pieces, and nothing spills."""
    graph = capture(product, (torch.empty(4096, 4096).half(), torch.empty(4096, 4096).half()))
    solver, found = proposals(4096, 4096, 4096)
    best = next(s for s in found if s.schedule.launch.persistent)
    assert best.schedule.memory.stored_pieces == 2
    program = solver.solve(one_kernel(graph), graph.layouts, best.schedule).program
    source = print_triton(program, (), preset("sm_90"), variants(program)[0], "k0")
    built = build(tmp_path, source)
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", built.text)) >= 2
    assert "st.global" not in built.text and "wgmma.mma_async" in built.text
    level = preset("sm_90").level(MemoryKind.SHARED)
    assert level is not None and built.facts.shared <= level.capacity
    assert source.persistent and not built.facts.spills


def test_blocks_that_begin_early_wait_once_and_load_ahead_all_the_same(tmp_path: Path) -> None:
    """A wait in the loop over grid points would leave one load under way at a time."""
    graph = capture(product, (torch.empty(4096, 4096).half(), torch.empty(4096, 4096).half()))
    solver, found = proposals(4096, 4096, 4096)
    schedule = next(s.schedule for s in found if s.schedule.launch.persistent)
    program = solver.solve(one_kernel(graph), graph.layouts, schedule).program
    machine = preset("sm_90")
    machines = machine, replace(machine, early_launch="any")
    sources = [print_triton(program, (), m, FAST, "k0") for m in machines]
    text = sources[1].text
    assert sources[1].outside and text.index("gdc_wait") < text.index("tl.num_programs")
    plain, early = (build(tmp_path / str(n), source) for n, source in enumerate(sources))
    assert early.facts.shared == plain.facts.shared and not early.facts.spills
    copies = "cp.async.bulk.tensor.2d.shared"
    assert early.text.count(copies) == plain.text.count(copies) > 2
    waits = [m.start() for m in re.finditer(r"griddepcontrol\.wait", early.text)]
    assert len(waits) == 1 and waits[0] < early.text.index(copies)


def test_they_are_proposed_where_points_are_many() -> None:
    assert any(s.schedule.launch.persistent for s in proposals(8192, 1024, 8192)[1])
    for few in (proposals(512, 1024, 512), proposals(16, 4096, 4096)):
        assert few[1] and not any(s.schedule.launch.persistent for s in few[1])
    for other in ("sm_80", "gfx942"):
        assert not any(s.schedule.launch.persistent for s in proposals(8192, 1024, 8192, machine=other)[1])


def test_shared_memory_holds_results_beside_operands() -> None:
    graph = capture(product, (torch.empty(4096, 4096).half(), torch.empty(4096, 4096).half()))
    solver, found = proposals(4096, 4096, 4096)
    full = next(
        s.schedule for s in found if s.schedule.launch.persistent and s.schedule.launch.stages == 4
    )  # fmt: skip
    solver.solve(one_kernel(graph), graph.layouts, full)
    with pytest.raises(IllegalSchedule, match="shared memory holds 232448 bytes of a block"):
        solver.solve(one_kernel(graph), graph.layouts, full.changed(stored_pieces=1))


def residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return x @ w + r


def test_shared_memory_holds_what_is_added_beside_operands(tmp_path: Path) -> None:
    """A block of another tensor arrives while operands of the next point do."""
    given = torch.empty(8192, 1024).half(), torch.empty(1024, 4096).half(), torch.empty(8192, 4096).half()
    graph = capture(residual, given)
    kernel, solver, machine = one_kernel(graph), Solver(preset("sm_90"), Options()), preset("sm_90")
    found = [s for s in solver.proposals(kernel, graph.layouts) if s.schedule.launch.persistent]
    level = machine.level(MemoryKind.SHARED)
    assert found and level is not None
    for n, solution in enumerate(found[:2]):
        program = solver.solve(kernel, graph.layouts, solution.schedule).program
        built = build(tmp_path / str(n), print_triton(program, (), machine, FAST, "k0"))
        assert built.facts.shared <= level.capacity
