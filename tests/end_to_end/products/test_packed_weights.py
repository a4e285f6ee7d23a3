"""Weights of 4 and 8 bits, unpacked on the way to the product: one kernel that reads each packed word once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.quantised import SPELLINGS, operands, stacked
from tests.support.triton.absent_gpu import Device, compiled
from tests.support.triton.harness import Built, build, interpret, print_triton, same_as_interpreter
from torch import Tensor

from tilewright import accuracy
from tilewright.ir.program import Dot, Load, Store, TileProgram
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.lower.variants import Variant
from tilewright.target import preset

Function = Callable[..., Tensor]
GPU = preset("sm_90")


def by_the_model(function: Function, given: list[Tensor]) -> Device:
    """Kernels without a clock, where launches cost so much that one is better than two."""
    return compiled(function, given, contractions="modelled", launch=2e-5)


def right(made: Device, function: Function, given: list[Tensor], folder: Path) -> None:
    (result,), jobs = made.run(given)
    verdict = accuracy.compare(result, function(*given), accuracy.in_float64(function)(*given))
    assert verdict.passed, verdict
    for job, outcome in zip(jobs, interpret(folder, jobs), strict=True):
        same_as_interpreter(job, outcome, rtol=2e-3, atol=2e-3)


def loads(program: TileProgram) -> dict[str, Load]:
    """The last load of each parameter, with the instructions that are selected."""
    made = legalise_for_gpu(program, GPU)
    return {s.buffer.name: s for s in made.statements() if isinstance(s, Load)}


def counts(program: TileProgram) -> list[int]:
    """How many elements a word of whole numbers is for, along any axis; 1 for those that hold one."""
    whole = [s for s in loads(program).values() if not s.buffer.dtype.is_float]
    return [max((x.count for x in s.alike), default=1) for s in whole]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_one_kernel_is_right(name: str, rows: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    function, given = SPELLINGS[name][0], operands(name, rows, 128, 256, 64)
    made = by_the_model(function, given)
    *_, last = made.kernels
    assert len(made.kernels) == 1 or (name == "gptq" and rows == 1), "a long sum may be one of parts"
    assert rows == 1 or any(isinstance(s, Dot) for s in last.program.statements())
    right(made, function, given, tmp_path)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(("name", "parts"), [("stacked", 2), ("shifted", 2), ("words", 8)])
def test_a_word_is_loaded_once_for_its_parts(name: str, parts: int, rows: int) -> None:
    made = by_the_model(SPELLINGS[name][0], operands(name, rows, 128, 256, 64))
    assert counts(made.kernels[0].program) == [parts]


def test_odd_sizes(tmp_path: Path) -> None:
    """Groups that no tile divides, and rows and columns that fill no tile."""
    torch.manual_seed(0)
    given = operands("stacked", 5, 100, 360, 40)
    right(by_the_model(stacked, given), stacked, given, tmp_path)


def chosen(function: Function, given: list[Tensor]) -> bool:
    try:
        by_the_model(function, given)
    except AssertionError as left:
        assert "a library call is left" in str(left)
        return False
    return True


def test_what_others_read_stays_in_memory() -> None:
    """And so does what is made of no less than it takes."""

    def read_twice(x: Tensor, packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        w = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(x.dtype) * scale
        return F.linear(x, w), w

    def made_of_halves(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, w * scale)

    packed, scale = torch.randint(0, 256, (512, 256), dtype=torch.uint8), torch.rand(512, 1).half()
    x = torch.randn(16, 512).half()
    assert chosen(lambda x, packed, scale: read_twice(x, packed, scale)[0], [x, packed, scale])
    assert not chosen(read_twice, [x, packed, scale])  # type: ignore[arg-type]
    assert not chosen(made_of_halves, [x, torch.randn(512, 512).half(), scale])


def at_places(x: Tensor, table: Tensor, index: Tensor) -> Tensor:
    return F.linear(x, table[index.long()].to(x.dtype))


def test_places_from_data_are_looked_up_by_a_kernel_of_their_own() -> None:
    """(Whether they are inside is checked there once, not by each block of rows.)"""
    table, index = torch.randint(-9, 9, (64, 512), dtype=torch.int8), torch.randint(0, 64, (512,))
    made = by_the_model(at_places, [torch.randn(16, 512).half(), table, index.int()])
    looked_up, multiplied = made.kernels
    assert looked_up.kernel.outputs[0] in multiplied.kernel.inputs


def built(name: str, rows: int, folder: Path) -> tuple[TileProgram, Built]:
    made = by_the_model(SPELLINGS[name][0], operands(name, rows, 2048, 2048))
    program = made.kernels[0].program
    source = print_triton(program, (), GPU, Variant(aligned=True, wide=False), "k0")
    return program, build(folder, source)


@pytest.mark.parametrize(("name", "rows"), [("stacked", 16), ("stacked", 256), ("gptq", 64)])
def test_ptx(name: str, rows: int, tmp_path: Path) -> None:
    """Matrix units, whole lines of packed words under way, no byte by itself, nothing put aside."""
    program, made = built(name, rows, tmp_path)
    assert "wgmma.mma_async" in made.text or "mma.sync" in made.text
    assert "cp.async" in made.text
    assert not made.accesses[8] and made.accesses[128] > sum(made.accesses[n] for n in (16, 32))
    assert not made.facts.spills
    outputs = {s.buffer.name for s in program.statements() if isinstance(s, Store)}
    assert len(outputs) == 1, "no unpacked weight is stored"


def test_ptx_of_one_row(tmp_path: Path) -> None:
    _, made = built("stacked", 1, tmp_path)
    assert not made.accesses[8] and made.accesses[128] >= 3
    assert not made.facts.spills


def attended(q: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor) -> Tensor:
    def unpacked(packed: Tensor, scale: Tensor) -> Tensor:
        w = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(scale.dtype) - 8
        return (w.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)

    s = (q @ unpacked(k, k_scale).transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return torch.softmax(s, -1).to(q.dtype) @ unpacked(v, v_scale)


@pytest.mark.parametrize("groups", [1, 2])
def test_keys_and_values_of_four_bits(groups: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored = [torch.randint(0, 256, (1, 2, 64, 32), dtype=torch.uint8) for _ in range(2)]
    scales = [torch.rand(1, 2, 64, groups).mul(0.05).add(0.01).half() for _ in range(2)]
    given = [torch.randn(1, 2, 64, 64).half(), stored[0], scales[0], stored[1], scales[1]]
    made = compiled(attended, given)
    (kernel,) = made.kernels
    assert counts(kernel.program) == [2, 2]
    right(made, attended, given, tmp_path)
