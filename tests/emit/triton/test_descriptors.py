"""Loads by tensor descriptor: which ones, what is printed, that it means the same, and the machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.emit.triton.blocks import blocked
from tests.support.attention.kernels import attention
from tests.support.corpus import Case
from tests.support.tile_programs import M, N, Vars
from tests.support.triton.corpus import Entry, entries, entry
from tests.support.triton.harness import Job, build, interpret, print_triton, same_as_interpreter

from tilewright.emit.triton.kernel import TritonSource
from tilewright.ir.dtype import DType, f16, f64, i64
from tilewright.ir.expr import Axis, Expr, axis, call, const, integer, symbol
from tilewright.ir.program import Buffer, Descriptor, GridAxis, Load, Loop, Store, TileProgram, Var, value_of
from tilewright.ir.schedule import Schedule
from tilewright.ir.sizes import dims
from tilewright.lower.access.descriptors import with_descriptors
from tilewright.lower.variants import GENERIC, Variant, aligning, variants
from tilewright.schedule import table as tuning
from tilewright.schedule.table import Tuning
from tilewright.target import preset

FAST = Variant(aligned=True, wide=False)
HEADS = 3
R, C = Axis("r", N), Axis("c", M)
H = Axis("h", integer(HEADS))
TILE = 16


FORCED = Tuning(
    tuple(tuning.FastestBlock(kind, 2, 128, 64, 64, 4, 3, True) for kind in ("products", "scores"))
)
"""A table that asks for descriptors."""


def source(program: TileProgram, target: str = "sm_90", variant: Variant = FAST) -> TritonSource:
    return print_triton(program, ("n", "m"), preset(target), variant, "k0")


def copied(
    offset: Expr, mask: Expr | None = None, other: float | None = 0, dtype: DType = f16, tile: int = TILE
) -> TileProgram:
    """y[h, r, c] = x[offset] in blocks over r and c, where it is not masked."""
    g, k = (Axis(n, dims.ceildiv(e, integer(tile))) for n, e in (("g", N), ("k", M)))
    x, y = Buffer("x", dtype, integer(1 << 20)), Buffer("y", dtype, dims.mul(integer(HEADS), N, M))
    v: Var = Vars()(dtype, R, C)
    inside = call("and", call("lt", axis(R), N), call("lt", axis(C), M))
    at = dims.add(dims.mul(axis(H), N, M), dims.mul(axis(R), M), axis(C))
    load = Load(
        v, x, offset, inside if mask is None else mask, None if other is None else const(other, dtype)
    )
    body: tuple[Load | Store | Loop, ...] = (load, Store(y, at, value_of(v), (R, C), inside))
    for a, p in ((C, k), (R, g)):
        start = dims.mul(axis(p), integer(tile))
        body = (Loop(a, start, dims.add(start, integer(tile)), tile, body),)
    grid = (GridAxis(H, H.extent), GridAxis(g, g.extent), GridAxis(k, k.extent))
    return with_descriptors(TileProgram((x, y), grid, body))


def plain(start: Expr = dims.ZERO, row: Expr = M, page: Expr | None = None) -> Expr:
    """start + h * page + r * row + c."""
    page = dims.mul(N, M) if page is None else page
    return dims.add(start, dims.mul(axis(H), page), dims.mul(axis(R), row), axis(C))


def descriptors(program: TileProgram) -> list[Descriptor]:
    return [s.descriptor for s in program.statements() if isinstance(s, Load) and s.descriptor is not None]


def test_a_block_of_a_page() -> None:
    """Rows behind the end of a page are outside, not those of the next page."""
    (d,) = descriptors(copied(plain()))
    assert d == Descriptor(dims.ZERO, (integer(HEADS), N, M), (dims.mul(N, M), M, dims.ONE), (1, TILE, TILE))
    text = source(copied(plain())).text
    assert "d0.load([g0, " in text and "tl.load" not in text
    (s,) = [a for a in source(copied(plain())).arguments if a.descriptor is not None]
    assert (s.kind, s.type, s.index) == ("descriptor", "tensordesc<fp16[1,16,16]>", 0)


def test_pages_within_rows_are_dims_too() -> None:
    """[rows, heads, elements]: heads lie inside a row, and a quotient of them is a place as well."""
    row = dims.mul(integer(HEADS), M)
    (d,) = descriptors(copied(plain(row=row, page=M)))
    assert d.strides == (M, row, dims.ONE)
    shared = dims.add(
        dims.mul(dims.floordiv(axis(H), integer(2)), M), dims.mul(axis(R), row), axis(C), integer(32)
    )
    (d,) = descriptors(copied(shared))
    assert d.extents == (integer(2), N, M) and d.start == integer(32)


def test_turned_blocks_are_transposed_after_the_copy() -> None:
    across = dims.add(dims.mul(axis(H), N, M), dims.mul(axis(C), N), axis(R))
    (d,) = descriptors(copied(across))
    assert d.strides[1:] == (N, dims.ONE) and d.extents[1:] == (M, N)
    assert "tl.trans(tl.reshape(d0.load([g0, " in source(copied(across)).text


INSIDE = call("lt", axis(C), M)
REFUSED: dict[str, Callable[[], TileProgram]] = {
    "a row of an odd length": lambda: copied(plain(row=integer(999), page=integer(8192))),
    "an odd start": lambda: copied(plain(start=integer(4))),
    "two contiguous axes": lambda: copied(plain(row=dims.ONE)),
    "no contiguous axis": lambda: copied(dims.add(dims.mul(axis(R), M), dims.mul(axis(C), integer(8)))),
    "a row backwards": lambda: copied(dims.add(plain(row=dims.mul(M, integer(-1))), dims.mul(N, M))),
    "a quotient of a block axis": lambda: copied(dims.add(plain(), dims.floordiv(axis(R), integer(3)))),
    "other lanes are not 0": lambda: copied(plain(), other=1),
    "a lower bound": lambda: copied(plain(), call("and", INSIDE, call("ge", axis(C), integer(2)))),
    "a bound that moves": lambda: copied(plain(), call("and", INSIDE, call("lt", axis(C), axis(H)))),
    "a bound of a scalar": lambda: copied(plain(), call("and", INSIDE, call("lt", axis(H), N))),
    "a diagonal": lambda: copied(plain(), call("and", INSIDE, call("lt", axis(C), axis(R)))),
    "doubles": lambda: copied(plain(), dtype=f64),
    "integers": lambda: copied(plain(), dtype=i64),
    "long sides": lambda: copied(plain(), tile=512),
    "sides below 16 bytes": lambda: copied(plain(), tile=4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ordinary_loads(name: str) -> None:
    assert not descriptors(REFUSED[name]()), name


def test_offsets_from_data_are_ordinary_loads() -> None:
    index, x = Buffer("i", i64, N), Buffer("x", f16, integer(1 << 20))
    var = Vars()
    i, v = var(i64, R), var(f16, R, C)
    at = call("add", call("mul", value_of(i), M), axis(C))
    body = (Load(i, index, axis(R)), Load(v, x, at), Store(x, axis(C), value_of(v), (R, C)))
    loops = Loop(R, dims.ZERO, integer(16), 16, (Loop(C, dims.ZERO, integer(16), 16, body),))
    assert not descriptors(with_descriptors(TileProgram((index, x), (), (loops,))))


def test_only_aligned_narrow_variants_of_machines_with_descriptors() -> None:
    program = copied(plain())
    for target, variant in (("sm_90", GENERIC), ("sm_90", Variant(True, True)), ("sm_90", Variant(False, False)),
                            ("sm_80", FAST), ("gfx942", FAST)):  # fmt: skip
        found = source(program, target, variant)
        assert "tl.load" in found.text and all(a.descriptor is None for a in found.arguments), (
            target,
            variant,
        )
    assert all("d0.load" in source(program, target).text for target in ("sm_90", "sm_100"))


def test_strides_that_no_variant_makes_multiples() -> None:
    """Of a quotient's stride nobody asks that it be a multiple."""
    head = dims.mul(dims.floordiv(axis(H), integer(2)), symbol("w"))
    program = copied(dims.add(head, dims.mul(axis(R), integer(64)), axis(C)))
    assert descriptors(program)
    assert "d0.load" not in print_triton(program, ("n", "m", "w"), preset("sm_90"), FAST, "k0").text


# --- meaning -----------------------------------------------------------------------


def scheduled(kind: str, dynamic: bool, depth: int = 128) -> Entry:
    """A small attention kernel whose table asks for descriptors."""
    given = attention(kind, "causal", 48, 48, depth, heads=(1, 2), dynamic=dynamic)
    return entry(given, dynamic, tuning=FORCED)


def test_descriptors_mean_what_loads_mean(tmp_path: Path) -> None:
    def random(dtype: type, *shape: int) -> np.ndarray:
        return np.random.standard_normal(shape).astype(dtype)

    jobs: list[Job] = []
    pages = random(np.float16, 1 << 20)
    for offset in (plain(), plain(start=integer(64)), plain(row=dims.mul(integer(HEADS), M), page=M)):
        for n, m in ((16, 32), (33, 48), (5, 16)):
            jobs.append(Job(copied(offset), [pages, None], {"n": n, "m": m}, variant=FAST, name=f"{n} x {m}"))
    turned = dims.add(dims.mul(axis(H), N, M), dims.mul(axis(C), N), axis(R))
    jobs.append(Job(copied(turned), [pages, None], {"n": 48, "m": 33}, variant=FAST, name="turned"))
    grid = [random(np.float32, 17, 48), random(np.float32, 48), None]
    jobs.append(Job(with_descriptors(blocked(16)), grid, {"n": 17, "m": 48}, variant=FAST, name="blocks"))
    kernels = [scheduled(kind, dynamic, depth) for kind, dynamic, depth in (
        ("rows", False, 128), ("rows", True, 128), ("rows", True, 80), ("columns", True, 128),
    )]  # fmt: skip
    jobs += [e.job(variant=FAST) for e in kernels]
    assert all(descriptors(job.program) and ".load([" in job.source().text for job in jobs)
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome, rtol=2e-3, atol=2e-3)


CORPUS = (
    "window_partition", "matmul_bias", "causal_attention", "qkv_heads", "gram", "rope",
)  # fmt: skip
"""Blocks of a maximum are not among them: their masked lanes are loaded as -inf, which no descriptor gives."""


def test_the_corpus_by_descriptors(tmp_path: Path) -> None:
    """Kernels with heads, halves of rows, windows and transposes, where their sizes permit aligned variants."""
    jobs: list[Job] = []
    for e in entries(CORPUS):
        program = with_descriptors(e.scheduled.program)
        job = replace(e.job(variant=FAST), program=program)
        if all(job.sizes[name] % 16 == 0 for name in aligning(program)):
            assert ".load([" in job.source().text, job.name
            jobs.append(job)
    assert {job.name for job in jobs} == set(CORPUS)
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome)


# --- machine code --------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "operands"), [("rows", 3), ("columns", 3)])
def test_machine_code(kind: str, operands: int, tmp_path: Path) -> None:
    """All operands come by bulk copies, matrix units read them, and nothing spills."""
    case = attention(kind, "causal", 2048, 2048, 128, heads=(1, 32), dynamic=True)
    e = entry(case, True, tuning=FORCED)
    program = e.scheduled.program
    schedule = e.scheduled.schedule
    assert isinstance(schedule, Schedule) and schedule.memory.descriptors
    made = print_triton(program, e.symbols, preset("sm_90"), variants(program)[0], "k0")
    assert sum(a.descriptor is not None for a in made.arguments) == operands
    built = build(tmp_path / "sm_90", made)
    assert len(re.findall(r"cp\.async\.bulk\.tensor", built.text)) >= operands
    assert not re.search(r"\bld\.global|cp\.async\.c[ag]", built.text)
    assert re.search(r"wgmma\.mma_async", built.text) and not built.facts.spills
    assert len(built.facts.boxes) == operands and built.facts.hidden == 2
    assert all(b.shape[0] == 1 and b.shape[-1] <= 64 for b in built.facts.boxes)
    older = print_triton(program, e.symbols, preset("sm_80"), variants(program)[0], "k0")
    assert "bulk.tensor" not in build(tmp_path / "sm_80", older, "sm_80").text


def test_a_turned_copy(tmp_path: Path) -> None:
    class Halves(Case):
        def inputs(self, scale: int = 1, seed: int = 0) -> list[torch.Tensor]:
            return [t.half() for t in super().inputs(scale, seed)]

    case = Halves("turned", lambda x: x.t().contiguous() + 0, ((1024, 2048),))
    table = Tuning((tuning.FastestBlock("square", 2, 1024, 4096, 64, 4, 1, True),))
    program = entry(case, False, tuning=table).scheduled.program
    built = build(tmp_path, source(program))
    assert "bulk.tensor.2d" in built.text and set(built.accesses) == {128}, "only stores, 16 bytes each"
