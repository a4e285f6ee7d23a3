"""A third backend, in a few lines: kernels run by the interpreter of tile programs. All else is as on a CPU."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import UnsupportedError
from tilewright.interp.algebra import STORAGE, Array
from tilewright.interp.program import run_program
from tilewright.ir.expr import Expr
from tilewright.ir.program import Buffer, TileProgram
from tilewright.ir.sizes.host import size
from tilewright.options import Options
from tilewright.pipeline.backends import BACKENDS, backend_of
from tilewright.pipeline.backends.cpu import CpuBackend
from tilewright.pipeline.build import KernelBuilder, Kernels, PlacedKernel, Runnable, names_of, programs_of
from tilewright.pipeline.place import DevicePlace, find_missing, machine_of
from tilewright.runtime.cpu.native_call import NativeCall, Outside
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.launch import Launching
from tilewright.target import Target


def memory(address: int, b: Buffer, sizes: dict[str, int]) -> Array:
    """A buffer's elements, from an address on."""
    kind = STORAGE[b.dtype.name]
    count = max(0, size(b.size, sizes))
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)


class Interpreted:
    """Kernels that are not compiled."""

    def __init__(self, programs: Sequence[TileProgram], symbols: Sequence[str]) -> None:
        self.programs, self.symbols, self.runs = programs, symbols, 0

    def prepare(
        self, launches: Sequence[Launching], bases: array[int], sizes: array[int], alone: Sequence[bool] = ()
    ) -> Callable[[], int]:
        def run() -> int:
            known = dict(zip(self.symbols, sizes, strict=False))
            for kernel, params in launches:
                program = self.programs[kernel]
                given = [
                    memory(bases[slot] + offset, b, known)
                    for b, (slot, offset) in zip(program.params, params, strict=True)
                ]
                for place, made in zip(given, run_program(program, given, dict(known)), strict=True):
                    place[...] = made
                self.runs += 1
            return 0

        return run

    def native_call(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        outside: Outside,
        owner: object,
    ) -> NativeCall | None:
        return None


class Interpreter(CpuBackend):
    """What differs from the CPU's."""

    def __init__(self) -> None:
        self.units: list[Interpreted] = []

    def built(
        self,
        builder: KernelBuilder,
        steps: Sequence[PlacedKernel],
        symbols: Sequence[Expr],
        *,
        only_timed: bool,
    ) -> Kernels:
        scheduled = builder.run("schedule", lambda: builder.solved(steps))
        programs = programs_of(scheduled)
        self.units.append(Interpreted(programs, names_of(symbols)))
        numbers = [next(k for k, p in enumerate(programs) if p is s.program) for s in scheduled]
        return Kernels(scheduled, self.units[-1], numbers, len(programs))

    def legalise(self, program: TileProgram, target: Target) -> TileProgram:
        return program

    def show_source(self, program: TileProgram, symbols: Sequence[str], target: Target) -> str:
        return program.show()

    def executable(self, parts: Runnable) -> Executable:
        return Executable(
            parts.plan, parts.held, parts.unit, guards=parts.guards,
            checks=parts.checks,
        )  # fmt: skip


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    made = Interpreter()
    monkeypatch.setitem(BACKENDS, "cpu", made)
    tilewright.reset()
    return made


class Block(nn.Module):
    """A norm, a product and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(self.norm(x)).relu()
        return torch.softmax(h, -1), x.cumsum(0).to(torch.bfloat16)


def test_a_third_backend_runs_models(interpreter: Interpreter) -> None:
    model = Block().eval()
    compiled = torch.compile(model, backend="tilewright", dynamic=True)
    with torch.no_grad():
        for n in (5, 9):
            x = torch.randn(n, 24)
            for have, want in zip(compiled(x), model(x), strict=True):
                torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)
    assert sum(unit.runs for unit in interpreter.units) >= 4
    (found,) = tilewright.compilations()
    assert "grid" in found.kernels[0].source, "what is shown is what this backend makes of a program"


def test_gradients_too(interpreter: Interpreter) -> None:
    model, x = Block(), torch.randn(4, 24, requires_grad=True)
    torch.compile(model, backend="tilewright")(x)[0].square().sum().backward()
    have, x.grad = x.grad, None
    model(x)[0].square().sum().backward()
    torch.testing.assert_close(have, x.grad, atol=1e-5, rtol=1e-4)
    assert any(unit.runs for unit in interpreter.units)


def test_a_device_without_a_backend_is_told() -> None:
    assert backend_of("mps") is None
    assert find_missing(Options(), "mps") == "no code is generated for mps"
    with pytest.raises(UnsupportedError, match="no code is generated for mps"):
        machine_of(DevicePlace("mps"), Options())
