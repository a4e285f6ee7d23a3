"""Kernels of every family, from the function to the text: the tile program and source for a GPU, and C++ for a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.cpp_harness import print_unit
from tests.support.families.kernels import KERNELS, PRODUCTS, programs_for
from tests.support.triton_harness import print_triton

from tilewright.lower.variants import variants
from tilewright.target import preset

GPU, CPU = preset("sm_90"), preset("x86-64-v4")


def text_of(name: str) -> str:
    """All that is decided and printed of a function: programs and sources for a GPU, sources for a CPU."""
    parts: list[str] = []
    programs, symbols = programs_for(GPU.name, name)
    for n, program in enumerate(programs):
        source = print_triton(program, symbols, GPU, variants(program)[0], f"k{n}")
        parts += [
            f"=== {GPU.name}, tile program {n}",
            program.show(),
            f"=== {GPU.name}, Triton {n}",
            source.text,
        ]
    programs, symbols = programs_for(CPU.name, name)
    return "\n".join((*parts, f"=== {CPU.name}, C++", print_unit(programs, symbols, CPU).text))


@pytest.mark.parametrize("name", [*KERNELS, *PRODUCTS])
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"kernels/{name}", text_of(name))
