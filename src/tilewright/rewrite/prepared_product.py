"""A kernel around one sum of products, on operands that other kernels prepare for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tilewright.ir.graph import Layout, Op, Value
from tilewright.ir.kernel import Kernel


class PreparedProduct(NamedTuple):
    """What prepares operands, the kernel that reads these, and how they lie."""

    prepare: tuple[Op, ...]
    kernel: Kernel
    layouts: Mapping[Value, Layout]
