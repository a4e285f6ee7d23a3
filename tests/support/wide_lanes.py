"""Tests of which ops are one kernel hold at the costs of vectors of 512 bits.

With half as many lanes an exponential costs twice as much, and the model would rather store one than compute it again:
a softmax is two kernels there.
"""

from __future__ import annotations

import pytest

from tilewright.runtime.cpu.toolchain import host_target
from tilewright.schedule.cpu.vectors import vector_lanes

WIDE_LANES = 16
needs_wide_lanes = pytest.mark.skipif(
    vector_lanes(host_target()) < WIDE_LANES, reason="what is one kernel is told for vectors of 512 bits"
)
