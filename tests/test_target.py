"""Targets are consistent data."""

from __future__ import annotations

import dataclasses

import pytest

from tilewright.errors import InputError
from tilewright.target import PRESETS, Level, MemoryKind, Target, preset


@pytest.mark.parametrize("target", PRESETS.values(), ids=PRESETS.keys())
def test_presets_are_ordered(target: Target) -> None:
    assert preset(target.name) is target
    kinds = [level.kind for level in target.levels]
    assert kinds == sorted(kinds) and MemoryKind.DEVICE in kinds
    inner = [level.bandwidth for level in target.levels]
    assert inner == sorted(inner), "higher levels are faster"
    assert all(level.capacity > 0 and level.transaction > 0 for level in target.levels)
    assert target.core.kind == MemoryKind.SHARED


def test_kinds() -> None:
    assert MemoryKind.HOST < MemoryKind.DEVICE < MemoryKind.L2 < MemoryKind.SHARED < MemoryKind.REGISTER
    assert [kind.core for kind in MemoryKind] == [False, False, False, True, True]
    assert preset("x86-64-v4").level(MemoryKind.HOST) is None
    assert preset("x86-64-v4").vector_lanes(4) == 16 and preset("toy3").vector_lanes(16) == 1


def test_resized_scales_what_cores_own() -> None:
    base = preset("x86-64-v3")
    big = base.resized(cores=8, capacities={MemoryKind.L2: 123})
    assert big.cores == 8 and big.flops == 4 * base.flops and big.special == 4 * base.special
    assert big.device == base.device
    assert big.level(MemoryKind.L2) == dataclasses.replace(base.levels[1], capacity=123)
    assert big.core.bandwidth == 4 * base.core.bandwidth
    assert big.digest() != base.digest() == base.resized().digest()


def test_bad_levels_are_refused() -> None:
    level = Level(MemoryKind.DEVICE, "memory", 1, 1.0, 1)
    with pytest.raises(ValueError, match="lowest first"):
        dataclasses.replace(preset("toy3"), levels=(level, level))


def test_unknown_target_lists_the_known() -> None:
    with pytest.raises(InputError, match="sm_90"):
        preset("z80")
