"""What torch remembers of sizes while a call of ours is under way."""

from __future__ import annotations

from collections import defaultdict

from torch._dynamo import pgo

from tilewright.runtime.call.dynamo import _sizes_remembered_in  # pyright: ignore[reportPrivateUsage]


def test_torch_has_its_own_memory_again_behind_calls_that_overlap() -> None:
    before = pgo._CODE_STATE  # pyright: ignore[reportPrivateUsage]
    first, second = (_sizes_remembered_in(defaultdict(pgo.CodeState)) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert pgo._CODE_STATE is before  # pyright: ignore[reportPrivateUsage]
