"""What has to be built of a core before it runs."""

from __future__ import annotations

import torch
from benchmarks.attention.workloads import WORKLOADS, Sizes
from tests.attention.device import compiled


def test_no_program_is_built_for_sizes_that_change_nothing() -> None:
    """The limits under which rows fit registers mean nothing where blocks of products decide."""
    given = Sizes(40, 8, 64, keys=56, kv_heads=1).inputs("keyformer", dtype=torch.float16)
    made = compiled(WORKLOADS["keyformer"]().eval(), given, [(1,), (1,), (1,), (2, 3)])
    assert made.symbols
    assert [kernel.buckets for kernel in made.kernels] == [(), ()]
