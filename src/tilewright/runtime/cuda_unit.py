"""Generated GPU kernels of one plan: which variant a call may run, and launch records for the native side."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tilewright.emit.triton import Argument, TritonSource
from tilewright.emit.variant import ALIGNMENT, NARROW_LIMIT, Variant, aligning, reach, variants
from tilewright.errors import UnsupportedError, VerifyError
from tilewright.ir.dims import symbols_of
from tilewright.ir.expr import Expr, Symbol
from tilewright.ir.host import Number, number, size
from tilewright.ir.program import TileProgram
from tilewright.runtime.cuda_build import Built
from tilewright.runtime.cuda_descriptors import Tensor, maps, tensors
from tilewright.runtime.cuda_driver import Device, current_stream
from tilewright.runtime.launch import Launching
from tilewright.runtime.whole import Outside, WholeCall

MOST_BLOCKS = (1 << 31) - 1
"""Blocks of one launch."""
LEAST_BUNDLE = 4
"""Launches that follow each other without a library call between are handed to the driver at once, as a graph whose
addresses are set anew, if there are so many of them; 0: never. What a launch costs the host is then paid once."""

Build = Callable[[Sequence[TritonSource]], Sequence[Built]]
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
    """One kernel for exact sizes: native addresses of its generic and its aligned variant (0: not for these sizes), the
    blocks of its grid, its arguments, pointers that the compiler wants behind them, and what descriptors show that the
    aligned variant has between."""

    generic: int
    aligned: int
    blocks: int
    arguments: tuple[Argument, ...]
    hidden: int
    shown: tuple[Tensor, ...] = ()


class CudaUnit:
    """Kernels of `programs` on one device. Variants that are not among `known` are built when a call needs them."""

    def __init__(
        self,
        programs: Sequence[TileProgram],
        symbols: Sequence[str],
        printed: Print,
        build: Build,
        device: Device,
        known: Mapping[tuple[int, Variant], tuple[TritonSource, Built]] = MappingProxyType({}),
        buckets: Mapping[int, Sequence[tuple[Expr, int]]] = MappingProxyType({}),
    ) -> None:
        """`symbols`: names of sizes in the order in which `prepare` gets them. `buckets[k]`: kernels that stand for k
        where a condition on the sizes holds, the best one first."""
        self.programs = tuple(programs)
        self.symbols = tuple(symbols)
        self.device = device
        self._print, self._build = printed, build
        self._possible = tuple(variants(p) for p in self.programs)
        self._reach = tuple(reach(p) for p in self.programs)
        self._built = dict(known)
        self._buckets = dict(buckets)
        self._lock = threading.Lock()

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
        ends, possible = self._reach[kernel], self._possible[kernel]
        if ends is None or all(v.wide for v in possible):
            return True
        return any(v.wide for v in possible) and any(size(e, sizes) > NARROW_LIMIT for e in ends)

    def ready(self, kernel: int, sizes: Mapping[str, Number]) -> Ready | None:
        """What to launch for exact sizes; None for a grid without points."""
        kernel = next((k for when, k in self._buckets.get(kernel, ()) if number(when, sizes)), kernel)
        blocks = 1
        for g in self.programs[kernel].grid:
            blocks *= max(0, size(g.extent, sizes))
        if not blocks:
            return None
        if blocks > MOST_BLOCKS:
            raise UnsupportedError(f"a kernel needs {blocks} blocks, a GPU runs {MOST_BLOCKS}", phase="run")
        wide = self.is_wide(kernel, sizes)
        generic, aligned = (kernel, Variant(False, wide)), (kernel, Variant(True, wide))
        wanted = [w for w in (generic, aligned) if w[1] in self._possible[kernel]]
        self._ensure(wanted)
        source, built = self._built[generic]
        special, shown = 0, ()
        if aligned in self._built and self._fulfils(self._built[aligned][0], sizes):
            other, made = self._built[aligned]
            if _shape(other) != _shape(source) or made.facts.hidden != built.facts.hidden:
                raise VerifyError(
                    "variants of a kernel differ in their arguments", phase="run", op=source.entry
                )
            found = tensors(other, made.facts.boxes, self.programs[kernel], sizes)
            if found is not None:
                special, shown = self.device.load(made).address, found
        address = self.device.load(built).address
        return Ready(address, special, blocks, source.arguments, built.facts.hidden, shown)

    def _fulfils(self, source: TritonSource, sizes: Mapping[str, Number]) -> bool:
        """Whether every size that a variant takes for a multiple is one."""
        needed = [a for a in source.arguments if a.kind == "size" and a.divisible]
        return all(int(sizes[self.symbols[a.index]]) % ALIGNMENT == 0 for a in needed)

    # --- launching ---

    def prepare(
        self, launches: Sequence[Launching], bases: array[int], sizes: array[int]
    ) -> Callable[[], int]:
        """What runs `launches` on the device's current stream (for one caller at a time) and returns at once. It gives
        the number of a failed check of an earlier run, 0 for none."""
        named = dict(zip(self.symbols, sizes, strict=False))
        rows = [(r, params) for k, params in launches if (r := self.ready(k, named)) is not None]
        records = (_Record * max(1, len(rows)))()
        kept: list[object] = [records, bases]
        for record, (ready, params) in zip(records, rows, strict=False):
            kept.append(self._fill(record, ready, params, sizes))
        run = _Run(
            self.device.address,
            ctypes.addressof(records),
            len(rows),
            bases.buffer_info()[0],
            LEAST_BUNDLE,
            0,
            None,
        )
        kept.append(_Bundle(run, self.device))
        launch, address, ordinal, driver = (
            self.device.driver.launch, ctypes.addressof(run), self.device.ordinal, self.device.driver,
        )  # fmt: skip
        stream = current_stream

        def act(kept: list[object] = kept) -> int:
            code = launch(address, stream(ordinal))
            if code < 0:
                raise driver.run_failed(code)
            return code

        return act

    def whole(
        self,
        launches: Sequence[Launching],
        bases: array[int],
        sizes: array[int],
        outside: Outside,
        owner: object,
    ) -> WholeCall | None:
        """None: what a launch needs depends on the stream."""
        return None

    def _fill(
        self, record: _Record, ready: Ready, params: Sequence[tuple[int, int]], sizes: array[int]
    ) -> tuple[object, ...]:
        """Set up one record; what it points to."""
        plain = len(ready.arguments)
        values = array("q", [0] * (plain + ready.hidden))
        order: list[tuple[int, int, int]] = []
        pointers: dict[int, int] = {}
        for k, a in enumerate(ready.arguments):
            if a.kind == "pointer":
                pointers[a.index] = len(order)
                order.append((*params[a.index], k))
            else:
                values[k] = sizes[a.index] if a.kind == "size" else self.device.error_address
        start = values.buffer_info()[0]
        slots = array("q", [slot for slot, _, _ in order])
        offsets = array("q", [offset for _, offset, _ in order])
        places = array("Q", [start + 8 * k for *_, k in order])
        arguments = array("Q", [start + 8 * k for k in range(len(values))])
        made, between, kept = maps(ready.shown, pointers)
        special = array("Q", [*arguments[:plain], *between, *arguments[plain:]])
        record.generic, record.aligned, record.blocks = ready.generic, ready.aligned, ready.blocks
        record.pointers = len(order)
        record.slots, record.offsets = slots.buffer_info()[0], offsets.buffer_info()[0]
        record.places, record.arguments = places.buffer_info()[0], arguments.buffer_info()[0]
        record.special, record.maps = special.buffer_info()[0], ctypes.addressof(made)
        record.mapped = len(ready.shown)
        return values, slots, offsets, places, arguments, special, kept


def usual(program: TileProgram, when: Expr | None = None) -> tuple[Variant, ...]:
    """The variants that calls with usual sizes need: narrow ones if there are any, else wide ones; no aligned ones of a
    program that only runs `when` sizes are such as spoil alignment."""
    possible = variants(program)
    found = tuple(v for v in possible if v.wide == all(p.wide for p in possible))
    if when is None:
        return found
    multiples = aligning(program)
    names = {s.value.name for s in symbols_of(when) if isinstance(s.value, Symbol)}
    sizes = {name: ALIGNMENT if name in multiples else 1 for name in names}
    return found if number(when, sizes) else tuple(v for v in found if not v.aligned)


def _shape(source: TritonSource) -> list[tuple[str, int, str]]:
    return [(a.kind, a.index, a.type) for a in source.arguments if a.descriptor is None]
