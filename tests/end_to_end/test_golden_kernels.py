"""Kernels of every family, from the function to the text: tile programs and sources for a GPU and a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.cpp_harness import print_unit
from tests.support.families.kernels import KERNELS, PRODUCTS, programs_for
from tests.support.triton.harness import print_triton

from tilewright.lower.legalise.cpu import legalise_for_cpu
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.lower.variants import variants
from tilewright.target import preset

GPU, CPU = preset("sm_90"), preset("x86-64-v4")


def text_of(name: str) -> str:
    """All that is decided and printed of a function: programs and sources, for a GPU and a CPU."""
    parts: list[str] = []
    programs, symbols = programs_for(GPU.name, name)
    for n, program in enumerate(programs):
        source = print_triton(program, symbols, GPU, variants(program)[0], f"k{n}")
        parts += [
            f"=== {GPU.name}, tile program {n}",
            legalise_for_gpu(program, GPU).show(),
            f"=== {GPU.name}, Triton {n}",
            source.text,
        ]
    programs, symbols = programs_for(CPU.name, name)
    for n, program in enumerate(programs):
        parts += [f"=== {CPU.name}, tile program {n}", legalise_for_cpu(program, CPU).show()]
    return "\n".join((*parts, f"=== {CPU.name}, C++", print_unit(programs, symbols, CPU).text))


@pytest.mark.parametrize("name", [*KERNELS, *PRODUCTS])
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"kernels/{name}", text_of(name))
