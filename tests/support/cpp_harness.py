"""Builds and runs emitted units: g++, ctypes, and a launcher that cuts the grid into pieces."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tilewright.emit.cpp.unit import INCLUDE, emit_unit, emit_units
from tilewright.emit.source import Source
from tilewright.interp.algebra import STORAGE
from tilewright.interp.program import run_program
from tilewright.ir.program import TileProgram
from tilewright.lower.legalise.cpu import legalise_for_cpu
from tilewright.target import PRESETS, Target

FLAGS = """-std=c++17 -O2 -fno-math-errno -fno-trapping-math -fwrapv -ffp-contract=off -fPIC -shared
-Wall -Wextra -Werror -Wno-unused-function -Wno-unused-const-variable -Wno-unused-variable
-Wno-unused-but-set-variable -Wno-tautological-compare""".split()

SCRATCH = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
SIZE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))


class Context(ctypes.Structure):
    _fields_ = [
        ("pointers", ctypes.POINTER(ctypes.c_void_p)),
        ("symbols", ctypes.POINTER(ctypes.c_int64)),
        ("scratch", SCRATCH),
        ("error", ctypes.POINTER(ctypes.c_int64)),
    ]


class Kernel(ctypes.Structure):
    _fields_ = [("task", TASK), ("count", SIZE), ("grain", SIZE)]


def host_target() -> Target:
    """The widest preset that this machine runs."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "avx512vl" in flags:
        return PRESETS["x86-64-v4"]
    return PRESETS["x86-64-v3"] if "avx2" in flags else PRESETS["x86-64"]


class Unit:
    """A loaded translation unit."""

    def __init__(self, path: Path, symbols: Sequence[str]) -> None:
        self.library = ctypes.CDLL(str(path))
        self.symbols = symbols
        count = ctypes.c_int64.in_dll(self.library, "tw_kernel_count").value
        self.kernels = list((Kernel * count).in_dll(self.library, "tw_kernels"))

    def run(
        self, number: int, arrays: Sequence[np.ndarray], sizes: dict[str, int] | None = None, pieces: int = 3
    ) -> int:
        """Run kernel `number` over its whole grid in `pieces`, last piece first; returns the error code."""
        kernel = self.kernels[number]
        pointers = (ctypes.c_void_p * max(1, len(arrays)))(*[a.ctypes.data for a in arrays])
        numbers = (ctypes.c_int64 * max(1, len(self.symbols)))(*[(sizes or {})[s] for s in self.symbols])
        error = ctypes.c_int64(0)
        kept: list[np.ndarray] = []

        def scratch(worker: int, size: int) -> int:
            kept.append(np.full(size + 128, 0xFF, np.uint8))
            return (kept[-1].ctypes.data + 63) // 64 * 64

        context = Context(pointers, numbers, SCRATCH(scratch), ctypes.pointer(error))
        points = kernel.count(numbers)
        assert kernel.grain(numbers) >= 1
        edges = sorted({points * k // pieces for k in range(pieces + 1)})
        for begin, end in reversed(list(zip(edges, edges[1:], strict=False))):
            kernel.task(ctypes.addressof(context), begin, end, 0)
        return error.value


def print_unit(programs: Sequence[TileProgram], symbols: Sequence[str], target: Target) -> Source:
    """As `emit_unit`, of programs that are legalised first."""
    return emit_unit([legalise_for_cpu(p, target) for p in programs], symbols, target)


def print_units(
    programs: Sequence[TileProgram],
    symbols: Sequence[str],
    target: Target,
    *,
    exact: bool = False,
    units: int | None = None,
) -> tuple[Source, ...]:
    """As `emit_units`, of programs that are legalised first."""
    legal = [legalise_for_cpu(p, target, exact=exact) for p in programs]
    return emit_units(legal, symbols, target, exact=exact, units=units)


Build = Callable[..., Unit]


def build(
    folder: Path,
    programs: Sequence[TileProgram],
    symbols: Sequence[str] = (),
    target: Target | None = None,
    *,
    exact: bool = False,
    run_here: bool = False,
    units: int = 1,
    as_written: bool = False,
) -> Unit:
    """Emit, compile and load. With `run_here` a target beyond this machine is replaced by its own. `as_written`: no
    instructions are selected before."""
    target = target or host_target()
    if run_here and target.vector_bytes > host_target().vector_bytes:
        target = host_target()
    for p in programs:
        p.verify()
    printed = emit_units if as_written else print_units
    sources = printed(programs, symbols, target, exact=exact, units=units)
    paths = [folder / f"unit{k}.cpp" for k in range(len(sources))]
    for path, source in zip(paths, sources, strict=True):
        path.write_text(source.text)
    out = folder / "unit.so"
    made = subprocess.run(
        ["g++", *FLAGS, *target.compiler_flags, f"-I{INCLUDE}", *map(str, paths), "-o", str(out)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[:4000]
    return Unit(out, symbols)


def same_as_interpreter(
    unit: Unit,
    number: int,
    program: TileProgram,
    inputs: Sequence[np.ndarray | None],
    sizes: dict[str, int] | None = None,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> list[np.ndarray]:
    """Run both over `inputs` (None: an output) and compare every buffer; returns the buffers of the compiled run."""
    symbols = sizes or {}
    want = run_program(program, list(inputs), symbols)
    arrays: list[np.ndarray] = []
    for buffer, given, expected in zip(program.params, inputs, want, strict=True):
        got = np.zeros(len(expected) + 32, expected.dtype)
        got[:] = 77
        if given is not None:
            got[: len(expected)] = given.reshape(-1)[: len(expected)]
        assert STORAGE[buffer.dtype.name] == expected.dtype
        arrays.append(got)
    assert unit.run(number, arrays, symbols) == 0
    for buffer, got, expected in zip(program.params, arrays, want, strict=True):
        inside, beyond = got[: len(expected)], got[len(expected) :]
        assert (beyond == np.full_like(beyond, 77)).all(), f"{buffer.name} is written beyond its end"
        if buffer.dtype.is_float:
            wide, right = inside.astype(np.float64), expected.astype(np.float64)
            np.testing.assert_allclose(wide, right, rtol=rtol, atol=atol, err_msg=buffer.name)
        else:
            np.testing.assert_array_equal(inside, expected, err_msg=buffer.name)
    return [got[: len(expected)] for got, expected in zip(arrays, want, strict=True)]
