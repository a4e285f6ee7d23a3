"""What has to be built of a core before it runs."""

from __future__ import annotations

import torch
from benchmarks.attention.workloads import WORKLOADS, Sizes
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.harness import print_triton

from tilewright.lower.variants import variants
from tilewright.target import preset


def test_no_two_programs_are_the_same_code() -> None:
    """The limits under which rows fit registers mean nothing where blocks of products decide."""
    given = Sizes(40, 8, 64, keys=56, kv_heads=1).inputs("keyformer", dtype=torch.float16)
    made = compiled(WORKLOADS["keyformer"]().eval(), given, [(1,), (1,), (1,), (2, 3)])
    assert made.symbols
    texts = [
        print_triton(program, made.symbols, preset("sm_90"), variants(program)[0], "kernel").text
        for k in made.kernels
        for program in k.programs
    ]
    assert len(set(texts)) == len(texts)
