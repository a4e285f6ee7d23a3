"""Proposed products in machine code: matrix units, wide loads, no spills; and the order of grid points."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from tests.support.triton.harness import Built, build, print_triton
from torch import Tensor

from tilewright.emit.triton.kernel import TritonSource
from tilewright.ir.dtype import f16
from tilewright.ir.expr import Axis, axis, const
from tilewright.ir.program import Buffer, GridAxis, Store, TileProgram
from tilewright.ir.sizes import dims
from tilewright.lower.variants import Variant, variants
from tilewright.options import Options
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Solver
from tilewright.target import MemoryKind, preset


def halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, bias))


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


LARGE = (halves(4096, 4096), halves(4096, 4096))
FEW = (halves(16, 4096), halves(4096, 4096))
Wanted = Callable[[Solution], bool]


def by_descriptor(solution: Solution) -> bool:
    return solution.schedule.memory.descriptors


def by_address(solution: Solution) -> bool:
    return not solution.schedule.memory.descriptors


def proposed(
    run: Callable[..., Tensor], given: Sequence[Tensor], machine: str, wanted: Wanted = lambda s: True
) -> TritonSource:
    """The best proposal that is wanted, as it is printed."""
    graph, solver = capture(run, given), Solver(preset(machine), Options())
    kernel = one_kernel(graph)
    best = next(s for s in solver.proposals(kernel, graph.layouts) if wanted(s))
    program = solver.solve(kernel, graph.layouts, best.schedule).program
    return print_triton(program, (), preset(machine), variants(program)[0], "k0")


def fits(built: Built, machine: str) -> bool:
    level = preset(machine).level(MemoryKind.SHARED)
    assert level is not None
    return built.facts.shared <= level.capacity and not built.facts.spills


@pytest.mark.parametrize(
    ("run", "given"), [(product, LARGE), (gelu, (*LARGE, halves(4096)))], ids=["product", "gelu"]
)
@pytest.mark.parametrize("wanted", [by_address, by_descriptor])
def test_hopper(run: Callable[..., Tensor], given: Sequence[Tensor], wanted: Wanted, tmp_path: Path) -> None:
    """Matrix units of four warps alone, fed by copies of 16 bytes or by bulk copies."""
    built = build(tmp_path, proposed(run, given, "sm_90", wanted))
    assert "wgmma.mma_async" in built.text and "mma.sync" not in built.text
    assert fits(built, "sm_90")
    bulk = len(re.findall(r"cp\.async\.bulk\.tensor", built.text))
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+)", built.text)
    assert (bulk >= 2 and not copies) if wanted is by_descriptor else (set(copies) == {"10"} and not bulk)


def test_two_products_of_one_kernel(tmp_path: Path) -> None:
    built = build(tmp_path, proposed(gated, (*LARGE, halves(4096, 4096)), "sm_90"))
    assert "wgmma.mma_async" in built.text and "mma.sync" not in built.text and fits(built, "sm_90")


def test_few_rows_on_hopper(tmp_path: Path) -> None:
    """Sixteen rows along the columns of a unit that takes 64 rows."""
    turned = lambda s: max(c.tile for c in s.schedule.tiling.classes[:1]) >= 64  # noqa: E731
    built = build(tmp_path, proposed(product, FEW, "sm_90", turned))
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in built.text and "mma.sync" not in built.text
    assert fits(built, "sm_90")


@pytest.mark.parametrize(("machine", "unit"), [("sm_80", "mma.sync"), ("gfx942", "v_mfma_f32")])
@pytest.mark.parametrize("given", [LARGE, FEW], ids=["large", "few"])
def test_other_machines(machine: str, unit: str, given: Sequence[Tensor], tmp_path: Path) -> None:
    """Of older units, operands that lie along the class that is summed over: others are not copied ahead."""
    built = build(tmp_path, proposed(F.linear, given, machine), machine)
    assert unit in built.text and fits(built, machine)


# --- the order of grid points ----------------------------------------------------


def filled(order: int, *extents: int) -> TileProgram:
    """A grid whose points store a number."""
    axes = [Axis(f"g{k + 1}", dims.integer(n)) for k, n in enumerate(extents)]
    offset, step = dims.ZERO, dims.ONE
    for a in reversed(axes):
        offset = dims.add(offset, dims.mul(axis(a), step))
        step = dims.mul(step, a.extent)
    whole = Buffer("p0", f16, step)
    grid = tuple(GridAxis(a, a.extent) for a in axes)
    return TileProgram((whole,), grid, (Store(whole, offset, const(1.0, f16)),), order=order)


def places(program: TileProgram) -> list[tuple[int, ...]]:
    """The place of each point of the grid, as its printed text has it."""
    text = print_triton(program, (), preset("sm_90"), Variant(aligned=False, wide=False), "k0").text
    lines = [line.strip() for line in text.splitlines() if re.match(r"    \w+ = ", line)]
    count = 1
    for g in program.grid:
        count *= dims.static(g.extent) or 0
    found: list[tuple[int, ...]] = []
    for point in range(count):
        known: dict[str, object] = {"tl": SimpleNamespace(program_id=lambda _, n=point: n, minimum=min)}
        exec("\n".join(lines), known)
        found.append(tuple(int(str(known[f"g{k}"])) for k in range(len(program.grid))))
    return found


@pytest.mark.parametrize("extents", [(7, 5), (8, 3), (1, 6), (3, 1), (2, 7, 5), (2, 3, 5, 4)])
@pytest.mark.parametrize("order", [1, 2, 4, 16])
def test_each_place_has_one_point(extents: tuple[int, ...], order: int) -> None:
    """And those of a group of rows follow each other column by column."""
    found = places(filled(order, *extents))
    wanted = sorted(found, key=lambda p: (*p[:-2], p[-2] // order, p[-1], p[-2]))
    assert found == wanted and len(set(found)) == len(found)


def test_without_an_order_rows_follow_each_other() -> None:
    plain = filled(0, 2, 3, 4)
    assert places(plain) == sorted(places(plain))
    assert "order" not in plain.show() and "  order = 4\n" in replace(plain, order=4).show()
