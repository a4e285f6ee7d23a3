"""Machines as data: memory levels, matrix units, limits. Nothing here asks the hardware.

`runtime/device.py` picks a preset for the machine it finds and corrects it with `Target.resized`. Figures are
typical of a class of machine; the cost model only ranks with them, measurement decides.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from tilewright.errors import InputError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
Language = Literal["cpp", "triton"]


class MemoryKind(IntEnum):
    """What a level is to the compiler, lowest (largest, slowest) first; a machine may lack some."""

    HOST = 0
    DEVICE = 1
    L2 = 2
    SHARED = 3
    REGISTER = 4

    @property
    def core(self) -> bool:
        """Whether the level belongs to one core, so that an edge there stays inside one kernel."""
        return self >= MemoryKind.SHARED


@dataclass(frozen=True, slots=True)
class Level:
    """One memory level.

    `capacity` is in bytes: of the whole machine for HOST, DEVICE and L2, of one core for SHARED and REGISTER.
    `bandwidth` is in bytes per second between this level and the next higher one, all cores together.
    `transaction` is the smallest transfer in bytes.
    """

    kind: MemoryKind
    name: str
    capacity: int
    bandwidth: float
    transaction: int


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    """A matrix instruction: m x n x k, dtype names of operands and accumulator, flop/s of all cores."""

    shape: tuple[int, int, int]
    operand: str
    accumulator: str
    flops: float


@dataclass(frozen=True, slots=True)
class Target:
    """One machine that code is generated for. `levels` stand lowest first."""

    name: str
    language: Language
    levels: tuple[Level, ...]
    cores: int
    """Cores of a CPU or multiprocessors of a GPU that run tiles at the same time."""
    vector_bytes: int
    """Width of one vector register (CPU), or the widest access of one thread (GPU)."""
    vector_registers: int
    """Vector registers of a CPU core, or 32-bit registers that one GPU thread may have."""
    flops: float
    """Peak fp32 flop/s of the vector units, all cores."""
    special: float
    """exp-like fp32 evaluations per second, all cores."""
    launch_seconds: float
    """Cost of starting one more kernel inside a plan."""
    lanes: int = 1
    """Threads that run in step: 1 on a CPU, the warp on a GPU."""
    compiler_flags: tuple[str, ...] = ()
    """Flags that select the instruction set; semantics flags belong to the builder."""
    matrix_units: tuple[MatrixUnit, ...] = ()
    slow_products: bool = False
    """Whether the usual library's matrix products take a slow path on this machine, so that another one pays."""

    def __post_init__(self) -> None:
        kinds = [level.kind for level in self.levels]
        if not kinds or kinds != sorted(set(kinds)):
            raise ValueError(f"target {self.name}: levels must differ in kind and stand lowest first")

    def level(self, kind: MemoryKind) -> Level | None:
        """The level of a kind, or None where the machine has none."""
        return next((level for level in self.levels if level.kind == kind), None)

    @property
    def device(self) -> Level:
        """The level where tensors live between kernels."""
        found = self.level(MemoryKind.DEVICE)
        if found is None:
            raise ValueError(f"target {self.name} has no DEVICE level")
        return found

    @property
    def core(self) -> Level:
        """The largest level that belongs to one core: the tile budget of a kernel."""
        return next(level for level in self.levels if level.kind.core)

    def vector_lanes(self, itemsize: int) -> int:
        """Elements of `itemsize` bytes in one vector."""
        return max(1, self.vector_bytes // itemsize)

    def resized(
        self, *, cores: int | None = None, capacities: Mapping[MemoryKind, int] | None = None
    ) -> Target:
        """The same machine with another number of cores or other capacities (bytes, as in `Level`).

        Rates of what each core owns scale with the cores; those of shared memories stay.
        """
        count = self.cores if cores is None else cores
        ratio = count / self.cores
        sizes = capacities or {}
        levels = tuple(
            dataclasses.replace(
                level,
                capacity=sizes.get(level.kind, level.capacity),
                bandwidth=level.bandwidth * (ratio if level.kind.core else 1.0),
            )
            for level in self.levels
        )
        units = tuple(dataclasses.replace(unit, flops=unit.flops * ratio) for unit in self.matrix_units)
        return dataclasses.replace(
            self,
            cores=count,
            levels=levels,
            matrix_units=units,
            flops=self.flops * ratio,
            special=self.special * ratio,
        )

    def digest(self) -> str:
        """Hex SHA-256 of every field; part of the cache key."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()


def _cpu(name: str, vector_bytes: int, registers: int, flags: tuple[str, ...], *, per_core: float) -> Target:
    """A two-core CPU with one vector instruction set; `per_core` is fp32 flop/s of one core.

    Memory: about 45 GB/s from DRAM, 100 GB/s from the last-level cache, 41 bytes a cycle from a core's L2.
    """
    cores = 2
    levels = (
        Level(MemoryKind.DEVICE, "memory", 16 * GIB, 45e9, 64),
        Level(MemoryKind.L2, "last-level cache", 32 * MIB, 100e9, 64),
        Level(MemoryKind.SHARED, "core cache", MIB, cores * 170e9, 64),
        Level(MemoryKind.REGISTER, "registers", registers * vector_bytes, cores * 500e9, vector_bytes),
    )
    return Target(
        name=name,
        language="cpp",
        levels=levels,
        cores=cores,
        vector_bytes=vector_bytes,
        vector_registers=registers,
        flops=cores * per_core,
        special=cores * per_core / 24,  # about a dozen fused multiply-adds each
        launch_seconds=0.2e-6,
        compiler_flags=flags,
    )


def _h200() -> Target:
    """NVIDIA H200: bandwidth, launch and matrix rates measured on one device, the rest nominal."""
    levels = (
        Level(MemoryKind.HOST, "host memory", 256 * GIB, 55.4e9, 64),
        Level(MemoryKind.DEVICE, "device memory", 139 * GIB, 4.25e12, 32),
        Level(MemoryKind.L2, "L2 cache", 50 * MIB, 5.5e12, 32),
        Level(MemoryKind.SHARED, "shared memory", 227 * KIB, 29e12, 16),
        Level(MemoryKind.REGISTER, "registers", 256 * KIB, 100e12, 4),
    )
    units = tuple(MatrixUnit((64, 256, 16), dtype, "float32", 709e12) for dtype in ("float16", "bfloat16"))
    return Target(
        name="sm_90",
        language="triton",
        levels=levels,
        cores=132,
        vector_bytes=16,
        vector_registers=255,
        flops=60e12,
        special=3.7e12,
        launch_seconds=1.0e-6,
        lanes=32,
        matrix_units=units,
    )


def _toy() -> Target:
    """A machine that does not exist: three levels, odd capacities. Shows that nothing assumes a real one."""
    levels = (
        Level(MemoryKind.DEVICE, "far", 1_000_003, 7e9, 12),
        Level(MemoryKind.SHARED, "near", 5_003, 31e9, 4),
        Level(MemoryKind.REGISTER, "here", 211, 101e9, 4),
    )
    return Target(
        name="toy3",
        language="cpp",
        levels=levels,
        cores=3,
        vector_bytes=12,
        vector_registers=7,
        flops=9e9,
        special=1e9,
        launch_seconds=1e-6,
    )


_WIDE = ("-march=x86-64-v4", "-mprefer-vector-width=512")
PRESETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        _cpu("x86-64-v4", 64, 32, _WIDE, per_core=262e9),
        _cpu("x86-64-v3", 32, 16, ("-march=x86-64-v3",), per_core=131e9),
        _cpu("x86-64", 16, 16, ("-march=x86-64",), per_core=33e9),
        _cpu("aarch64", 16, 32, ("-march=armv8-a",), per_core=48e9),
        _h200(),
        _toy(),
    )
}
"""Every machine that can be named, by name."""


def preset(name: str) -> Target:
    """The machine called `name`; raises `InputError` that lists the known ones."""
    try:
        return PRESETS[name]
    except KeyError:
        raise InputError(
            f"unknown target {name!r}", phase="target", hint=f"one of {', '.join(PRESETS)}"
        ) from None
