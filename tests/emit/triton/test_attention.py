"""Attention kernels as machine code for a GPU that is not here: matrix units in every loop, wide loads, no spills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.support.attention.kernels import attention
from tests.support.triton.corpus import entry
from tests.support.triton.harness import build, print_triton

from tilewright.lower.variants import variants
from tilewright.target import MemoryKind, preset

QUICK = [("rows", 128, torch.float16, False), ("columns", 128, torch.float16, True)]
SLOW = [
    pytest.param(kind, d, dtype, dynamic, marks=pytest.mark.slow)
    for kind in ("rows", "columns", "squares")
    for d in (64, 128, 256)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for dynamic in (False, True)
    if (kind, d, dtype, dynamic) not in QUICK
    # Longer rows of singles are loaded into registers, not by copies that run ahead.
    and (dtype is not torch.float32 or d == 64)
]


@pytest.mark.parametrize(("kind", "d", "dtype", "dynamic"), [*QUICK, *SLOW])
def test_build(kind: str, d: int, dtype: torch.dtype, dynamic: bool, tmp_path: Path) -> None:
    e = entry(attention(kind, "causal", 2048, 2048, d, heads=(1, 32), dtype=dtype, dynamic=dynamic), dynamic)
    program = e.scheduled.program
    source = print_triton(program, e.symbols, preset("sm_90"), variants(program)[0], "k0")
    built = build(tmp_path, source, "sm_90")
    shared = preset("sm_90").level(MemoryKind.SHARED)
    assert shared is not None and built.facts.shared <= shared.capacity
    # The pieces of singles fill all registers; blocks that spill some were measured as faster than smaller ones.
    assert built.facts.spills <= (1024 if dtype is torch.float32 else 0)
    assert not re.search(r"\bmma\.sync", built.text)
    copies = [int(n, 16) for n in re.findall(r"cp\.async\.c[ag][^\n]*, 0x(\w+)", built.text)]
    narrow = [n for n in copies if n != 16]
    assert copies.count(16) >= 4 and set(narrow) <= ({4} if kind != "rows" else set()), (
        "operands come 16 bytes at a time"
    )
    if dtype is torch.float32:
        return
    products = len(re.findall(r"wgmma\.mma_async", built.text))
    loops = 2
    assert products >= loops * (2 if kind == "rows" else 1)
