"""Machines as data: memory levels, matrix units, limits. Nothing here asks the hardware.

`runtime/cpu/toolchain.py` picks a preset for the machine it finds and corrects it with `Target.resized`. Figures are
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

from .errors import InputError
from .ir.selection import Precision
from .options import EarlyLaunch

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
Language = Literal["cpp", "triton"]


ONE_PLUS_ERF = "1 + erf"
COARSE = ("tanh", ONE_PLUS_ERF)
"""What NVIDIA's devices have, from compute capability 7.5 on (PTX ISA 8.0, tanh), or need ex2 and a short polynomial
for: 1 + erf(x), or 1 - erf(x), as a factor."""

QUICK = ("exp2", "log2", "erfc", "tanh")
"""What NVIDIA's devices have (PTX ISA 8.0: ex2, lg2, rcp), or need these and a polynomial for."""


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

    @property
    def lasting_bytes(self) -> int:
        """What may be touched of a cache and is still found there: half, since other values pass through it too."""
        return self.capacity // 2


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    """A matrix instruction: m x n x k, dtype names of operands and accumulator, flop/s of all cores."""

    shape: tuple[int, int, int]
    operand: str
    accumulator: str
    flops: float
    precision: Precision = "ieee"


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
    alone_seconds: float = 0.0
    """Work of one core, in seconds, up to which a second one is not asked: what it could save is less than what waiting
    for it may cost, on a machine that does other things as well; 0 where threads are no question."""
    handover_seconds: float = 0.0
    """Work of one core, in seconds, up to which it is not shared with threads that watch for it: what it takes to hand
    over a part and to take it back."""
    parting_seconds: float = 0.0
    """What a call of the library costs that parts steps which one native call would run: the way through Python."""
    lanes: int = 1
    """Threads that run in step: 1 on a CPU, the warp on a GPU."""
    threads: int = 1
    """Threads that a core holds at a time."""
    block_threads: int = 1
    """Threads of a block at most."""
    latency: float = 0.0
    """Seconds from a load to its data while memory is busy, where threads wait for it."""
    alone: float = 1.0
    """What a core can draw from memory when others do not, over its share when all do."""
    compiler_flags: tuple[str, ...] = ()
    """Flags that select the instruction set; semantics flags belong to the builder."""
    backend: str = ""
    """Who makes machine code of Triton text: `cuda` or `hip`; empty on a CPU."""
    arch: str = ""
    """The processor as that backend names it (`90`, `gfx942`)."""
    matrix_units: tuple[MatrixUnit, ...] = ()
    bias_apart: bool = False
    """Whether the usual library's convolutions add a bias in a pass of its own over their result."""
    fused_convolutions: bool = False
    """Whether the usual library has convolutions that add a bias and a tensor, and take the positive part, while they
    write their result."""
    first_touch: float = 0.0
    """Bytes per second at which large memory is written that the system has just handed out and will take back after
    the call; 0 where freed memory is kept for the next one."""
    coarse: tuple[str, ...] = ()
    """Functions that few instructions give with a relative error of at most 2^-11, half a unit of float16."""
    fused_attention: float = 0.0
    """Flop/s that the usual library's fused attention reaches; 0 where it is not faster than kernels."""
    quick: tuple[str, ...] = ()
    """Functions of fp32 that one instruction, perhaps of a polynomial, gives with an error of at most 2^-21 where no
    denormal number is made."""
    descriptors: bool = False
    """Whether the machine copies blocks of tensors by descriptor, without a thread for each address."""
    offset_bytes: int = 0
    """The largest distance, either way, that an access adds to its address by itself (SASS: a signed offset of 24 bits;
    CDNA 3 ISA, global memory: of 13 bits)."""
    specialised_warps: bool = False
    """Whether groups of warps multiply what another warp copies into shared memory, each with a share of the registers
    that is its own (`lower.specialise`)."""
    copies_ahead: bool = False
    """Whether blocks that later steps of a loop read wait in shared memory; elsewhere they wait in registers, or are
    not loaded ahead."""
    wide_scans: bool = False
    """Whether running sums of singles are kept in doubles, as the usual library does on this machine."""
    wide_moments: bool = False
    """Whether means of singles from which distances are taken, and the squares of these, are summed in doubles, as the
    usual library does on this machine or does as exactly."""
    wide_sums: bool = False
    """Whether the machine adds doubles so fast that sums of singles are kept in them where terms may cancel."""
    small_product: float = 0.0
    """Operations (2 x multiply-adds) up to which a product of matrices is faster as a kernel than as a call of the
    usual library, which takes that long to find its way to the work."""
    dot_chain: int = 0
    """Products that a block adds up in one chain, where it may: each step of a chain rounds by the size of the whole. 0
    where the machine's own units add them."""
    loop_rows: int = 0
    """Rows of a loop from which a thread takes them from the first step to the last, rather than to share each step
    with others: of fewer it would read all weights for little work. 0 where loops are not run so."""
    loop_steps: int = 1
    """Steps of a loop that may be one body, so that fewer kernels are launched and less passes through memory."""
    early_launch: EarlyLaunch = "none"
    """Behind which kernels generated ones are launched before these have ended (`Options.early_launch`)."""
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

    def without(self, kind: MemoryKind) -> Target:
        """The same machine without a level."""
        return dataclasses.replace(
            self, levels=tuple(level for level in self.levels if level.kind is not kind)
        )

    def rounding_singles(self) -> Target:
        """The same machine where its matrix units read 10 bits of fraction of fp32 (TF32), at half the rate of halves,
        instead of splitting it; this machine if they cannot."""
        if self.backend != "cuda" or self.rounds_singles:
            return self
        others = [u for u in self.matrix_units if u.operand != "f32"]
        units = [
            MatrixUnit((m, n, k // 2), "f32", u.accumulator, u.flops / 2, "tf32")
            for u in others
            if u.operand == "f16"
            for m, n, k in [u.shape]
        ]
        return dataclasses.replace(self, matrix_units=(*others, *units))

    @property
    def has_early_launch(self) -> bool:
        """Whether kernels can be launched early: compute capability 9.0 (CUDA Programming Guide, programmatic dependent
        launch)."""
        return self.backend == "cuda" and int(self.arch) >= 90

    @property
    def rounds_singles(self) -> bool:
        """Whether a matrix unit reads fewer bits of fp32 than it has."""
        return self.singles == "tf32"

    @property
    def singles(self) -> Precision:
        """What products of blocks of fp32 read of them."""
        found: list[Precision] = [u.precision for u in self.matrix_units if u.operand == "f32"]
        return found[0] if found else "ieee"

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
        alone_seconds=20e-6,
        handover_seconds=0.12e-6,
        dot_chain=32,  # as far as a library's own blocks and lanes round; tests/emit/cpp/test_dot.py measures it
        loop_rows=4,  # gains of 4 and more: benchmarks/results/cpu/loop_rows.json; fewer would share weights less
        parting_seconds=15e-6,  # measured: voice activity and a layer, by steps and joined
        compiler_flags=flags,
        wide_scans=True,
        wide_moments=True,
        first_touch=4e9,  # an estimate for pages of 4 KiB and two threads
        small_product=per_core
        * 1e-6,  # a call costs 6 to 10 us more than a kernel, whose small products reach a tenth
    )


def _in_pieces(matrix: MatrixUnit) -> MatrixUnit:
    """Three numbers of bf16 hold the 24 bits of an fp32, and six of their nine products leave out less than 2^-25 of
    the whole (Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
    Computations", 2019). For instructions that read them from shared memory: registers would not hold them."""
    return MatrixUnit(matrix.shape, "f32", "f32", matrix.flops / 6, "bf16x6")


def _halves(matrix: MatrixUnit) -> tuple[MatrixUnit, ...]:
    """The largest instruction for fp16, and that for bf16, which has the same rate on all GPUs."""
    return tuple(dataclasses.replace(matrix, operand=dtype) for dtype in ("f16", "bf16"))


def _gpu(
    name: str,
    levels: tuple[Level, ...],
    units: tuple[MatrixUnit, ...],
    *,
    cores: int,
    flops: float,
    special: float,
) -> Target:
    """A GPU as NVIDIA's are; presets replace what is different.

    All hold 2048 threads a core. What a load takes and what a lone core draws are estimates."""
    return Target(
        name=name,
        language="triton",
        levels=levels,
        cores=cores,
        vector_bytes=16,
        vector_registers=255,
        flops=flops,
        special=special,
        launch_seconds=1.0e-6,
        lanes=32,
        offset_bytes=(1 << 23) - 1,
        threads=2048,
        block_threads=1024,
        latency=0.8e-6,
        alone=1.3,
        backend="cuda",
        arch=name.removeprefix("sm_"),
        bias_apart=True,
        fused_convolutions=True,
        coarse=COARSE,
        quick=QUICK,
        copies_ahead=True,  # `cp.async`, from compute capability 8.0 on
        loop_steps=16,
        wide_sums=True,  # each has at least half as many units for doubles as for singles
        matrix_units=units,
    )


def _a100() -> Target:
    """NVIDIA A100 80 GB SXM, nominal: whitepaper "NVIDIA A100 Tensor Core GPU Architecture" (2020) and data sheet.

    HBM2e 2.04 TB/s, of which nine tenths reach a copy; L2 5120 bytes a cycle; 163 KiB of shared memory for one block
    (CUDA C Programming Guide, compute capability 8.0); 128 bytes of it a cycle and 16 special functions a cycle per
    multiprocessor, at 1.41 GHz.
    """
    levels = (
        Level(MemoryKind.HOST, "host memory", 256 * GIB, 25e9, 64),
        Level(MemoryKind.DEVICE, "device memory", 80 * GIB, 1.8e12, 32),
        Level(MemoryKind.L2, "L2 cache", 40 * MIB, 4.5e12, 32),
        Level(MemoryKind.SHARED, "shared memory", 163 * KIB, 19e12, 16),
        Level(MemoryKind.REGISTER, "registers", 256 * KIB, 65e12, 4),
    )
    matrix = MatrixUnit((16, 8, 16), "f16", "f32", 270e12)
    gpu = _gpu("sm_80", levels, _halves(matrix), cores=108, flops=19.5e12, special=2.4e12)
    return dataclasses.replace(gpu, launch_seconds=1.5e-6)


def _h200() -> Target:
    """NVIDIA H200: bandwidth, launch and matrix rates measured on one device, the rest nominal."""
    levels = (
        Level(MemoryKind.HOST, "host memory", 256 * GIB, 55.4e9, 64),
        Level(MemoryKind.DEVICE, "device memory", 139 * GIB, 4.25e12, 32),
        Level(MemoryKind.L2, "L2 cache", 50 * MIB, 5.5e12, 32),
        Level(MemoryKind.SHARED, "shared memory", 227 * KIB, 29e12, 16),
        Level(MemoryKind.REGISTER, "registers", 256 * KIB, 100e12, 4),
    )
    matrix = MatrixUnit((64, 256, 16), "f16", "f32", 709e12)
    units = (*_halves(matrix), _in_pieces(matrix))
    gpu = _gpu("sm_90", levels, units, cores=132, flops=60e12, special=3.7e12)
    return dataclasses.replace(gpu, fused_attention=510e12, descriptors=True, specialised_warps=True)


def _b200() -> Target:
    """NVIDIA B200, nominal: data sheet of the HGX B200 (180 GB and 8 TB/s a device, 2.25 PFLOP/s dense fp16), compute
    capability 10.0 of the CUDA C Programming Guide (227 KiB a block). 148 multiprocessors at 1.97 GHz, each with 128
    bytes of shared memory and 16 special functions a cycle; nine tenths of the memory rate reach a copy.
    """
    levels = (
        Level(MemoryKind.HOST, "host memory", 512 * GIB, 55e9, 64),
        Level(MemoryKind.DEVICE, "device memory", 178 * GIB, 7.1e12, 32),
        Level(MemoryKind.L2, "L2 cache", 126 * MIB, 10e12, 32),
        Level(MemoryKind.SHARED, "shared memory", 227 * KIB, 37e12, 16),
        Level(MemoryKind.REGISTER, "registers", 256 * KIB, 120e12, 4),
    )
    matrix = MatrixUnit((128, 256, 16), "f16", "f32", 1800e12)
    units = (*_halves(matrix), _in_pieces(matrix))
    gpu = _gpu("sm_100", levels, units, cores=148, flops=74e12, special=4.6e12)
    return dataclasses.replace(gpu, descriptors=True)


def _mi300x() -> Target:
    """AMD Instinct MI300X, nominal: data sheet (192 GB at 5.3 TB/s, 163 TFLOP/s fp32, also of matrices, 1.3 PFLOP/s
    dense fp16), CDNA 3 white paper (304 compute units at 2.1 GHz; 64 KiB of local data share and 512 KiB of registers
    each; 256 MB Infinity Cache at 17 TB/s, which is what L2 means here). Eight tenths of the memory rate reach a copy.
    """
    levels = (
        Level(MemoryKind.HOST, "host memory", 512 * GIB, 55e9, 64),
        Level(MemoryKind.DEVICE, "device memory", 192 * GIB, 4.3e12, 64),
        Level(MemoryKind.L2, "Infinity Cache", 256 * MIB, 14e12, 64),
        Level(MemoryKind.SHARED, "local data share", 64 * KIB, 81e12, 16),
        Level(MemoryKind.REGISTER, "registers", 512 * KIB, 240e12, 4),
    )
    matrix = MatrixUnit((32, 32, 8), "f16", "f32", 900e12)
    singles = MatrixUnit((32, 32, 2), "f32", "f32", 113e12)
    gpu = _gpu("gfx942", levels, (*_halves(matrix), singles), cores=304, flops=163e12, special=10e12)
    return dataclasses.replace(
        gpu,
        fused_convolutions=False,
        vector_registers=512,
        lanes=64,
        offset_bytes=(1 << 12) - 1,
        launch_seconds=2.0e-6,
        backend="hip",
        coarse=(),
        quick=(),
        copies_ahead=False,
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
        _a100(),
        _h200(),
        _b200(),
        _mi300x(),
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
