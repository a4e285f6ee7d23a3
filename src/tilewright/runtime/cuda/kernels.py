"""Generated GPU kernels of one plan: which variant a call may run, and launch records for the native side."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import MappingProxyType

import torch

from tilewright.emit.triton.kernel import Argument, TritonSource
from tilewright.errors import BuildError, UnsupportedError, VerifyError
from tilewright.ir.expr import Expr, Symbol
from tilewright.ir.program import TileProgram
from tilewright.ir.sizes.dims import symbols_of
from tilewright.ir.sizes.host import Number, number, size
from tilewright.lower.variants import (
    ALIGNMENT,
    NARROW_LIMIT,
    LaunchNeeds,
    Variant,
    aligning,
    needs_of,
    variants,
)
from tilewright.runtime.cpu.native_call import NativeCall, Outside
from tilewright.runtime.plan.launch import Launching, Places, rows_of
from tilewright.tuning.runtime_thresholds import GPU_WORK

from .build import BuiltKernel
from .descriptors import Tensor, maps, tensors
from .driver import Device, current_stream

MAX_GRID_BLOCKS = (1 << 31) - 1
"""Blocks of one launch."""

UNBUILT = -1_000_000
"""What a launch gives that needs a variant which is not built, as the native side has it."""

Build = Callable[[Sequence[TritonSource]], Sequence[BuiltKernel]]
Print = Callable[[int, Variant], TritonSource]
"""The source of a kernel (by number) in one variant."""


class _Record(ctypes.Structure):
    """One launch as the native side reads it."""

    _fields_ = (
        ("generic", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
        ("pointers", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("special", ctypes.c_void_p),
        ("maps", ctypes.c_void_p),
        ("mapped", ctypes.c_int64),
        ("chosen", ctypes.c_void_p),
        ("bundled", ctypes.c_void_p),
        ("member", ctypes.c_void_p),
        ("stale", ctypes.c_int64),
        ("table", ctypes.c_uint64),
        ("addresses", ctypes.c_void_p),
        ("told", ctypes.c_int64),
        ("outside", ctypes.c_int64),
    )


class _Run(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("records", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("bases", ctypes.c_void_p),
        ("least", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("bundle", ctypes.c_void_p),
    )


class _Bundle:
    """Keeps a run, and ends its bundle."""

    def __init__(self, run: _Run, device: Device) -> None:
        self._run, self._forget, self._address = (
            run, device.driver.native.tw_cuda_forget, ctypes.addressof(run),
        )  # fmt: skip

    def __del__(self) -> None:
        if self._run.bundle:
            self._forget(self._address)


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """One kernel for exact sizes: native addresses of its generic variant (0: not built) and its aligned one (0: not
    for these sizes), the blocks of its grid (in a list: for each of its `rows`), its arguments, pointers that the
    compiler wants behind them, and what descriptors show that the aligned variant has between. `later` is the generic
    variant. `outside`: if it waits for the kernel in front, that may be one of somebody else."""

    generic: int
    aligned: int
    blocks: int
    arguments: tuple[Argument, ...]
    hidden: int
    later: tuple[int, Variant]
    shown: tuple[Tensor, ...] = ()
    rows: int = 1
    outside: bool = False

    def check(self, source: TritonSource, built: BuiltKernel) -> None:
        """Raise VerifyError if another variant takes other arguments."""
        if _shape(source.arguments) != _shape(self.arguments) or built.facts.hidden != self.hidden:
            raise VerifyError("variants of a kernel differ in their arguments", phase="run", op=source.entry)


@dataclass(frozen=True, slots=True)
class VariantCompiler:
    """What makes machine code of a variant: `printed` gives its text, `build` compiles several texts side by side."""

    printed: Print
    build: Build


class CudaUnit:
    """Kernels of `programs` (or of what launches need of them) on one device; None: built for a machine that is not
    here. Variants that are not among `known` are built when a call needs them: wide ones by its sizes, generic ones by
    its sizes or its addresses."""

    def __init__(
        self,
        programs: Sequence[TileProgram | LaunchNeeds],
        symbols: Sequence[str],
        compiler: VariantCompiler,
        device: Device | None,
        known: Mapping[tuple[int, Variant], tuple[TritonSource, BuiltKernel]] = MappingProxyType({}),
        buckets: Mapping[int, Sequence[tuple[Expr, int]]] = MappingProxyType({}),
    ) -> None:
        """`symbols`: names of sizes in the order in which `prepare` gets them. `buckets[k]`: kernels that stand for k
        where a condition on the sizes holds, the best one first."""
        self.needs = tuple(p if isinstance(p, LaunchNeeds) else needs_of(p) for p in programs)
        self.symbols = tuple(symbols)
        self._device = device
        self._print, self._build = compiler.printed, compiler.build
        self._built = dict(known)
        self.buckets = dict(buckets)
        self._lists = {k for k, v in known if v.listed}
        self._lock = threading.Lock()

    @property
    def device(self) -> Device:
        """Where it runs. Raises BuildError where that is not here."""
        if self._device is None:
            raise BuildError("these kernels were built for a machine that is not here", phase="load")
        return self._device

    def every_variant(self) -> Mapping[tuple[int, Variant], tuple[TritonSource, BuiltKernel]]:
        """All that calls may need, built. Raises what building raises."""
        wanted = [(k, v) for k, n in enumerate(self.needs) for v in n.variants]
        self._ensure(wanted)
        return {w: self._built[w] for w in wanted}

    # --- variants ---

    def _ensure(self, wanted: Sequence[tuple[int, Variant]]) -> None:
        with self._lock:
            missing = [w for w in wanted if w not in self._built]
            if missing:
                sources = [self._print(k, v) for k, v in missing]
                for w, source, built in zip(missing, sources, self._build(sources), strict=True):
                    self._built[w] = source, built

    def is_wide(self, kernel: int, sizes: Mapping[str, Number]) -> bool:
        """Whether index arithmetic of `kernel` needs 64 bits under these sizes."""
        ends, possible = self.needs[kernel].reach, self.needs[kernel].variants
        if ends is None or all(v.wide for v in possible):
            return True
        return any(v.wide for v in possible) and any(size(e, sizes) > NARROW_LIMIT for e in ends)

    def _chosen(self, kernel: int, sizes: Mapping[str, Number]) -> tuple[int, int]:
        """What stands for a kernel at exact sizes, and the blocks of its grid."""
        kernel = next((k for when, k in self.buckets.get(kernel, ()) if number(when, sizes)), kernel)
        return kernel, prod(max(0, size(extent, sizes)) for extent in self.needs[kernel].grid)

    def rows_at_once(self, kernel: int, sizes: Mapping[str, Number]) -> int:
        """How many rows of a list one launch can run; 1 where the kernel is not built for lists."""
        kernel, blocks = self._chosen(kernel, sizes)
        return max(1, MAX_GRID_BLOCKS // max(1, blocks)) if kernel in self._lists else 1

    def ready(self, kernel: int, sizes: Mapping[str, Number], rows: int = 1) -> Ready | None:
        """What to launch for exact sizes; None for a grid without points."""
        kernel, blocks = self._chosen(kernel, sizes)
        if not blocks:
            return None
        if blocks > MAX_GRID_BLOCKS:
            raise UnsupportedError(
                f"a kernel needs {blocks} blocks, a GPU runs {MAX_GRID_BLOCKS}", phase="run"
            )
        found = self._ready(kernel, blocks, sizes, listed=rows > 1)
        return replace(found, rows=rows)

    def _ready(self, kernel: int, blocks: int, sizes: Mapping[str, Number], *, listed: bool) -> Ready:
        wide = self.is_wide(kernel, sizes)
        generic, aligned = (kernel, Variant(False, wide, listed)), (kernel, Variant(True, wide, listed))
        special = (
            self._aligned(aligned, generic, blocks, sizes)
            if Variant(True, wide) in self.needs[kernel].variants
            else None
        )
        if special is not None and generic not in self._built:
            return special
        self._ensure([generic])
        source, built = self._built[generic]
        address = self.device.load(built).address
        if special is None:
            return Ready(
                address, 0, blocks, source.arguments, built.facts.hidden, generic, outside=source.outside
            )
        special.check(source, built)
        return replace(special, generic=address)

    def _aligned(
        self,
        which: tuple[int, Variant],
        generic: tuple[int, Variant],
        blocks: int,
        sizes: Mapping[str, Number],
    ) -> Ready | None:
        """The aligned variant alone; None if it is not for these sizes."""
        known = self._built.get(which)
        if not self._fulfils(self._print(*which) if known is None else known[0], sizes):
            return None
        self._ensure([which])
        source, built = self._built[which]
        shown = tensors(source, built.facts.boxes, self.needs[which[0]].elements, sizes)
        if shown is None:
            return None
        plain = tuple(a for a in source.arguments if a.descriptor is None)
        address, hidden = self.device.load(built).address, built.facts.hidden
        return Ready(0, address, blocks, plain, hidden, generic, shown, outside=source.outside)

    def _complete(self, records: Iterable[_Record], rows: Iterable[Ready]) -> None:
        """Build the generic variants that the addresses of the last run asked for."""
        wanted = [(record, ready) for record, ready in zip(records, rows, strict=False) if not record.chosen]
        self._ensure(list(dict.fromkeys(ready.later for _, ready in wanted)))
        for record, ready in wanted:
            source, built = self._built[ready.later]
            ready.check(source, built)
            record.generic = self.device.load(built).address

    def _fulfils(self, source: TritonSource, sizes: Mapping[str, Number]) -> bool:
        """Whether every size that a variant takes for a multiple is one."""
        needed = [a for a in source.arguments if a.kind == "size" and a.divisible]
        return all(int(sizes[self.symbols[a.index]]) % ALIGNMENT == 0 for a in needed)

    # --- launching ---

    def prepare(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        alone: Sequence[bool] = (),
    ) -> Callable[[], int]:
        """What runs `launches` on the device's current stream (for one caller at a time) and returns at once. It gives
        the number of a failed check of an earlier run, 0 for none. Threads of the host are no question here."""
        named = dict(zip(self.symbols, sizes, strict=False))
        parts = [part for launch in launches for part in self._parts(launch, named)]
        rows = [(r, params) for k, params, n in parts if (r := self.ready(k, named, n)) is not None]
        records = (_Record * max(1, len(rows)))()
        alive: list[object] = [records, bases]
        for record, (ready, params) in zip(records, rows, strict=False):
            alive.append(self._fill(record, ready, params, sizes))
        run = _Run(
            self.device.address,
            ctypes.addressof(records),
            len(rows),
            bases.buffer_info()[0],
            GPU_WORK.min_bundled_launches,
            0,
            None,
        )
        alive.append(_Bundle(run, self.device))
        launch, address, ordinal, driver = (
            self.device.driver.launch, ctypes.addressof(run), self.device.ordinal, self.device.driver,
        )  # fmt: skip
        stream, complete = current_stream, partial(self._complete, records, [ready for ready, _ in rows])

        def act(alive: list[object] = alive) -> int:
            code = launch(address, stream(ordinal))
            if code < 0:
                if code == UNBUILT:
                    complete()
                    code = launch(address, stream(ordinal))
                if code < 0:
                    raise driver.run_failed(code)
            return code

        return act

    def _parts(self, launch: Launching, sizes: Mapping[str, Number]) -> Iterator[tuple[int, Places, int]]:
        """The launches of a list."""
        kernel, params, rows = launch[0], launch[1], rows_of(launch)
        most, each = self.rows_at_once(kernel, sizes) if rows > 1 else 1, len(params) // rows
        for k in range(0, rows, most):
            n = min(most, rows - k)
            yield kernel, params[k * each : (k + n) * each], n

    def native_call(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        outside: Outside,
        owner: object,
    ) -> NativeCall | None:
        """None: what a launch needs depends on the stream."""
        return None

    def _fill(self, record: _Record, ready: Ready, params: Places, sizes: array[int]) -> tuple[object, ...]:
        """Set up one record; what it points to."""
        plain = len(ready.arguments)
        values = array("q", [0] * (plain + ready.hidden))
        addresses = array("Q", [0] * (len(params) if ready.rows > 1 else 0))
        start, behind = values.buffer_info()[0], addresses.buffer_info()[0]
        order: list[tuple[int, int, int]] = []
        pointers: dict[int, int] = {}
        held: object = None
        for k, a in enumerate(ready.arguments):
            if a.kind == "pointer":
                pointers[a.index] = len(order)
                order.append((*params[a.index], start + 8 * k))
            elif a.kind == "table":
                order += [(*place, behind + 8 * n) for n, place in enumerate(params)]
                values[k], held = device_memory(8 * len(params), self.device.ordinal)
                record.table, record.addresses = values[k], behind
            else:
                values[k] = sizes[a.index] if a.kind == "size" else self.device.error_address
        slots = array("q", [slot for slot, _, _ in order])
        offsets = array("q", [offset for _, offset, _ in order])
        places = array("Q", [place for *_, place in order])
        arguments = array("Q", [start + 8 * k for k in range(len(values))])
        made, between, alive = maps(ready.shown, pointers)
        special = array("Q", [*arguments[:plain], *between, *arguments[plain:]])
        record.generic, record.aligned = ready.generic, ready.aligned
        record.blocks, record.pointers = ready.blocks * ready.rows, len(order)
        record.slots, record.offsets = slots.buffer_info()[0], offsets.buffer_info()[0]
        record.places, record.arguments = places.buffer_info()[0], arguments.buffer_info()[0]
        record.special, record.maps = special.buffer_info()[0], ctypes.addressof(made)
        record.mapped, record.outside = len(ready.shown), ready.outside
        return values, slots, offsets, places, arguments, special, alive, addresses, held


def device_memory(count: int, ordinal: int) -> tuple[int, object]:
    """The address of so many bytes on a device, for what the current stream runs as long as the second is kept."""
    held = torch.empty(count, dtype=torch.uint8, device=torch.device("cuda", ordinal))
    return held.data_ptr(), held


def usual(program: TileProgram, when: Expr | None = None) -> tuple[Variant, ...]:
    """The variants that are built before a call asks for them (or listed ones like them): narrow ones if there are
    any, else wide ones; where sizes do not matter to the aligned one (pointers, which torch aligns, still do), only
    that, if there is one; no aligned ones of a program that only runs `when` sizes are such as spoil alignment."""
    multiples = aligning(program)
    if when is not None:
        names = {s.value.name for s in symbols_of(when) if isinstance(s.value, Symbol)}
        sizes = {name: ALIGNMENT if name in multiples else 1 for name in names}
        if not number(when, sizes):
            return tuple(v for v in _width(program) if not v.aligned)
    return tuple(v for v in _width(program) if v.aligned or multiples) or _width(program)


def needed(program: TileProgram, sizes: Mapping[str, int]) -> tuple[Variant, ...]:
    """The variant that calls of these sizes need, with pointers as torch aligns them."""
    aligned = all(sizes[name] % ALIGNMENT == 0 for name in aligning(program))
    return tuple(v for v in _width(program) if v.aligned == aligned) or _width(program)


def _width(program: TileProgram) -> tuple[Variant, ...]:
    possible = variants(program)
    return tuple(v for v in possible if v.wide == all(p.wide for p in possible))


def _shape(arguments: Sequence[Argument]) -> list[tuple[str, int, str]]:
    return [(a.kind, a.index, a.type) for a in arguments if a.descriptor is None]
