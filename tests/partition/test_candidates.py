"""How many kernels are left to choose from for each attention core: not more than twice what FlashTensor published."""

from __future__ import annotations

import pytest
from benchmarks.attention.workloads import WORKLOADS
from benchmarks.attention_compile import PUBLISHED, captured, compiled, considered

from tilewright.partition.choose_kernels import ChosenRegions


@pytest.mark.parametrize("target", ["x86-64-v4", "sm_80", "sm_90"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_few_kernels_are_left_to_choose_from(name: str, target: str) -> None:
    mapped = compiled(captured(name, target), target)["map"]
    assert isinstance(mapped, ChosenRegions)
    (region,) = mapped.regions
    left = sum(map(considered, region.notes))
    if region.routine is not None:  # the whole of it is one call of the library
        assert not left
        return
    assert len(region.kernels) <= left <= 2 * PUBLISHED[name]
    assert region.kernels and region.seconds < region.library
