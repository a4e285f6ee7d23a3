"""Kernels whose warps are specialised: their text, which is read, and their machine code. (Gluon has no interpreter
that runs here: what a program means is held by that of tile programs, what its text means by runs on a GPU.)"""

# Triton has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.triton.specialised import CHANGES, attention, source, specialised
from torch import Tensor
from triton.backends.nvidia.compiler import get_ptxas

from tilewright.emit.gluon.kernel import emit_kernel
from tilewright.emit.gluon.layouts import LaidExpressions
from tilewright.emit.triton.helpers import Helpers
from tilewright.emit.triton.index import Indices
from tilewright.emit.triton.kernel import TritonSource
from tilewright.emit.triton.scope import Lines, Term
from tilewright.errors import BuildError
from tilewright.ir.dtype import bool_, f32
from tilewright.ir.expr import const
from tilewright.lower.specialise.analyse import specialise
from tilewright.lower.variants import Variant, variants
from tilewright.runtime.cuda import triton_compat
from tilewright.runtime.cuda.build import job_of
from tilewright.runtime.cuda.triton_compat import compile_job
from tilewright.target import MemoryKind, preset
from tilewright.tuning.search_limits import SPECIALISED

SHARED = preset("sm_90").level(MemoryKind.SHARED)
HALVES = (torch.float16, torch.bfloat16)


def heads(length: int, depth: int, dtype: torch.dtype = torch.float16, count: int = 64) -> list[Tensor]:
    return [torch.zeros(1, count, length, depth, dtype=dtype) for _ in range(3)]


def test_golden(golden: Callable[[str, str], None]) -> None:
    program, symbols = specialised(attention(CHANGES["causal"]), heads(1024, 64))
    golden("gluon_attention", source(program, symbols).text)


def test_other_variants_are_triton() -> None:
    """Their grids have a block for each point, and their arguments are the same but for the descriptors."""
    program, symbols = specialised(attention(CHANGES["full"]), heads(256, 64))
    found = [emit_kernel(program, symbols, v, "k0") for v in variants(program)]
    assert [(s.dialect, s.persistent) for s in found] == [("gluon", True), ("triton", False)]
    special, generic = ([a for a in s.arguments if a.descriptor is None] for s in found)
    assert [(a.kind, a.name, a.type, a.index) for a in special] == [
        (a.kind, a.name, a.type, a.index) for a in generic
    ]
    assert found[1].variant == Variant(aligned=False, wide=False)


def test_a_warp_copies_what_it_needs() -> None:
    """The query by strips, keys and values by steps, results by strips."""
    program, symbols = specialised(attention(CHANGES["full"]), heads(256, 64))
    tiles = [a.descriptor.tile for a in source(program, symbols).arguments if a.descriptor]
    assert tiles == [(1, 64, 64), (1, 64, 64), (1, 128, 64), (1, 128, 64)]


def test_numbers_without_dimensions_have_no_layout() -> None:
    """A language with layouts makes no block without one."""
    program, _ = specialised(attention(CHANGES["full"]), heads(256, 64))
    printer = LaidExpressions(specialise(program), {}, Lines(), Helpers("gl"), Indices(set()))
    assert printer.data(const(True, bool_)).text == "gl.to_tensor(True).to(tl.int1)"
    assert printer.spread(Term("0.5", number=True), (), f32).text == "gl.to_tensor(0.5).to(tl.float32)"


def test_a_query_is_given_back_whatever_has_steps() -> None:
    """Ranges of keys whose lengths are not known may all be empty but one."""
    program, symbols = specialised(attention(CHANGES["full"]), heads(320, 64), dynamic=[(2,)] * 3)
    lines = source(program, symbols).text.splitlines()
    given = [line for line in lines if "arrive(q_empty" in line]
    assert given == ["        mbarrier.arrive(q_empty.index(STRIP), count=1)"]
    assert len([line for line in lines if line.startswith("        if ")]) == 2, (
        "neither range surely has a step"
    )


QUICK = [("full", 128, 128, torch.float16, False)]
LONG = [
    pytest.param(change, d, keys, dtype, dynamic, marks=pytest.mark.long)
    for change in CHANGES
    for d in (64, 128)
    for keys in (64, 128)
    for dtype in HALVES
    for dynamic in (False, True)
    if not dynamic or (change == "full" and dtype is torch.float16)
    if (change, d, keys, dtype, dynamic) not in QUICK
]


@pytest.mark.parametrize(("change", "d", "keys", "dtype", "dynamic"), [*QUICK, *LONG])
def test_build(change: str, d: int, keys: int, dtype: torch.dtype, dynamic: bool, tmp_path: Path) -> None:
    inputs = heads(1024, d, dtype)
    program, symbols = specialised(attention(CHANGES[change]), inputs, keys, [(2,)] * 3 if dynamic else ())
    # Beside scores of 128 keys a few scalars may have no register left: as many as the build lets pass.
    check_build(source(program, symbols), tmp_path, SPECIALISED.max_spilled_bytes if keys == 128 else 0)


def test_a_kernel_that_spills_much_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, symbols = specialised(attention(CHANGES["full"]), heads(1024, 64))
    job = job_of(source(program, symbols), preset("sm_90"))
    monkeypatch.setattr(
        triton_compat, "resources", lambda code, name: (255, SPECIALISED.max_spilled_bytes + 4)
    )
    with pytest.raises(BuildError, match=r"spills 36 bytes"):
        compile_job(job, tmp_path)


@pytest.mark.long
def test_build_with_a_bias_and_shared_heads(tmp_path: Path) -> None:
    q, k, v = heads(512, 128)
    bias = torch.zeros(1, 64, 512, 512).half()
    (tmp_path / "bias").mkdir()
    check_build(source(*specialised(attention(CHANGES["full"]), [q, k, v, bias], 64)), tmp_path / "bias")
    fewer = [q, k[:, :2].clone(), v[:, :2].clone()]
    check_build(source(*specialised(attention(CHANGES["causal"]), fewer)), tmp_path)


def check_build(made: TritonSource, folder: Path, spills: int = 0) -> None:
    """Machine code that loads by descriptors, multiplies by warp groups, and spills nothing."""
    job = job_of(made, preset("sm_90"))
    code, text, facts = compile_job(job, folder)
    assert SHARED is not None and facts.shared <= SHARED.capacity
    assert facts.spills is not None and facts.spills <= spills
    assert facts.persistent and not facts.early
    assert facts.threads == 32 * (4 + 4 + 4)  # the warp that loads has a warp group for itself
    assert len(facts.boxes) == sum(kind.startswith("tensordesc") for _, kind in job.signature)
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared", text)
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared", text)
    assert len(re.findall(r"wgmma\.mma_async", text)) >= 4 and not re.search(r"\bmma\.sync", text)
    assert len(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+1;", text)) in (0, 2, 4, 6)
    assert not re.search(r"\bst\.global", text) and code
    # C7510 and others say that products wait for each other.
    said = assembled(text, folder)
    assert "warning" not in said.lower() and "serializ" not in said.lower(), said


def assembled(text: str, folder: Path) -> str:
    """What the assembler says of machine code for Hopper."""
    path = folder / "kernel.ptx"
    path.write_text(text)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(path), "-o", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr
