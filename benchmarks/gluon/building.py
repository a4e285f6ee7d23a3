"""Machine code of the hand-written kernels for a GPU that is not here, and what is counted in it."""

# pyright: basic
# pyright: reportMissingTypeStubs=false, reportMissingImports=false

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from benchmarks.record import Facts
from tilewright.runtime.cuda.binary import resources

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = {"enable_fp_fusion": True}
"""Of all kernels: a * b + c rounds once. Versions of Triton have different defaults."""

COUNTED = {
    "wgmma": r"wgmma\.mma_async",
    "waits_for_wgmma": r"wgmma\.wait_group",
    "copies_in": r"cp\.async\.bulk\.tensor\.\dd\.shared",
    "copies_out": r"cp\.async\.bulk\.tensor\.\dd\.global",
    "barriers_of_warps": r"\bbar(?:rier)?\.(?:sync|arrive)",
    "registers_moved": r"setmaxnreg",
}
"""Patterns in PTX."""


@dataclass(frozen=True)
class Described:
    """A descriptor of a tensor of fp16: the block that one copy takes."""

    block: tuple[int, ...]

    @property
    def layout(self) -> Any:
        """How a block lies in shared memory."""
        return gl.NVMMASharedLayout.get_default_for(list(self.block), gl.float16)

    @property
    def type(self) -> str:
        """In a signature."""
        return f"tensordesc<fp16{list(self.block)},{self.layout!r}>"


def built(function: Any, given: Sequence[object], fixed: Mapping[str, int | bool], warps: int) -> Any:
    """The compiled kernel of a function whose arguments are `given` (descriptors, else integers) and `fixed`."""
    names = function.arg_names
    kinds = [g.type if isinstance(g, Described) else "fp32" if isinstance(g, float) else "i32" for g in given]
    signature = dict(zip(names, kinds, strict=False)) | dict.fromkeys(fixed, "constexpr")
    source = GluonASTSource(function, signature, {(names.index(n),): value for n, value in fixed.items()})
    return triton.compile(source, target=HOPPER, options={"num_warps": warps, **OPTIONS})


def counts(kernel: Any) -> Facts:
    """What is in the machine code."""
    text = kernel.asm["ptx"]
    registers, spills = resources(kernel.asm["cubin"], kernel.metadata.name)
    found: Facts = {name: len(re.findall(pattern, text)) for name, pattern in COUNTED.items()}
    return found | {
        "registers": registers,
        "spilled_bytes": spills,
        "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
    }
