"""Kernels written by hand, run by our launcher: does early launch have its effect, and what does a border cost?"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.record import Facts, Json
from tilewright.emit.triton.kernel import Argument, TritonSource
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis
from tilewright.ir.program import Buffer, GridAxis, TileProgram
from tilewright.ir.sizes import dims
from tilewright.lower.variants import Variant
from tilewright.options import Options
from tilewright.runtime.cuda.build import BuiltKernel, build_kernels
from tilewright.runtime.cuda.device import gpu_target
from tilewright.runtime.cuda.driver import device
from tilewright.runtime.cuda.executable import _BOUNDS
from tilewright.runtime.cuda.kernels import CudaUnit, VariantCompiler
from tilewright.runtime.store.cache import ContentStore, default_root

BLOCK = 1024
FEW, MANY = 16, 132
LONG = 200
"""Kernels of a run whose borders are timed."""

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k0(a, b, n, error):\n"
PLACE = f"    i = tl.program_id(0) * {BLOCK} + tl.arange(0, {BLOCK})\n"
LOAD, STORE = "    x = tl.load(a + i, mask=i < n, other=0.0)\n", "    tl.store(b + i, x + 1.0, mask=i < n)\n"
WAIT, RELEASE = "    tl.extra.cuda.gdc_wait()\n", "    tl.extra.cuda.gdc_launch_dependents()\n"
SLEEP = (
    '    i = tl.inline_asm_elementwise("nanosleep.u32 200000; mov.u32 $0, $1;", "=r,r", [i], dtype=tl.int32, '
    "is_pure=False, pack=1)\n"
)
TEXTS = {
    "plain": PLACE + LOAD + STORE,
    "late": PLACE + WAIT + LOAD + RELEASE + STORE,
    "soon": PLACE + WAIT + RELEASE + LOAD + STORE,
    "never": PLACE + WAIT + LOAD + STORE,
    "sleeps": PLACE + WAIT + RELEASE + SLEEP + LOAD + STORE,
    "hasty": PLACE + LOAD + STORE,
}
"""Bodies of kernels: b = a + 1. A hasty one is said to wait, and does not."""


def memory_of(pool: object) -> list[tuple[int, int]]:
    """Addresses and bytes of all that torch keeps for a graph."""
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    return [(s["address"], s["total_size"]) for s in segments if tuple(s["segment_pool_id"]) == tuple(pool)]  # type: ignore[arg-type]


def memory_kept() -> list[tuple[int, int]]:
    """The same of all graphs, and what is kept between calls for intermediates."""
    found = [
        (arena.arena.data_ptr(), arena.arena.numel())
        for bound in list(_BOUNDS)
        for arenas in bound.by_stream.values()
        for arena in arenas
    ]
    for graph in (x for x in gc.get_objects() if issubclass(type(x), torch.cuda.CUDAGraph)):
        with contextlib.suppress(RuntimeError):  # one that was not captured to its end
            found += memory_of(graph.pool())
    return found


def fill(memory: Sequence[tuple[int, int]], stream: int) -> None:
    """Write NaNs (of every type) over memory."""
    for address, size in memory:
        code = _CUDA.cuMemsetD8Async(
            ctypes.c_uint64(address), 0xFF, ctypes.c_size_t(size), ctypes.c_void_p(stream)
        )
        assert code == 0, f"cuMemsetD8Async: {code}"


class _Library:
    """The driver's library, when it is first needed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)


_CUDA: Any = _Library()


class Bench:
    """Runs of kernels by name on the first device."""

    def __init__(self) -> None:
        options = Options()
        self._store = ContentStore(default_root(options))
        self.device = device(0, self._store, options)
        self._units: dict[int, CudaUnit] = {}

    def facts(self) -> Facts:
        """Whether the driver can, and its version."""
        version = ctypes.c_int()
        _CUDA.cuDriverGetVersion(ctypes.byref(version))
        return {"version": version.value, "launches early": self.device.driver.launches_early}

    def _unit(self, blocks: int) -> CudaUnit:
        if blocks not in self._units:
            n = dims.integer(blocks * BLOCK)
            grid = (GridAxis(Axis("g", dims.integer(blocks)), dims.integer(blocks)),)
            program = TileProgram((Buffer("a", f32, n), Buffer("b", f32, n)), grid, ())
            compiler = VariantCompiler(printed, partial(built, target=gpu_target(0), store=self._store))
            self._units[blocks] = CudaUnit([program] * len(TEXTS), ("n",), compiler, self.device)
        return self._units[blocks]

    def run(self, names: Sequence[str], bases: array[int], blocks: int) -> Callable[[], int]:
        """Launches of kernels, each of which reads what the one in front wrote: base k to base k + 1, in a ring."""
        order, count = list(TEXTS), len(bases)
        row = [(order.index(name), [(k % count, 0), ((k + 1) % count, 0)]) for k, name in enumerate(names)]
        return self._unit(blocks).prepare(row, bases, array("q", [blocks * BLOCK]))

    def old_memory_read(self) -> Facts:
        """Numbers that are old, by how kernels ran: many for hasty ones where launches are early, none for others."""
        return {name: self._old(name) for name in ("hasty", "late")}

    def _old(self, name: str) -> Facts:
        tensors = [torch.zeros(FEW * BLOCK, device="cuda") for _ in range(5)]
        more = [torch.zeros_like(t) for t in tensors]
        bases = array("Q", [t.data_ptr() for t in tensors])
        run = self.run(["sleeps", name] * 2, bases, FEW)

        def old(act: Callable[[], object], of: Sequence[torch.Tensor] = tensors) -> int:
            for t in of[1:]:
                t.fill_(float("nan"))
            torch.cuda.synchronize()
            act()
            torch.cuda.synchronize()
            return int((of[2] != 2).sum() + (of[4] != 4).sum())

        found: dict[str, Json] = {"stream": old(run)}
        run()
        found["bundle"] = old(run)
        for k, t in enumerate(more):
            bases[k] = t.data_ptr()
        found["bundle with nodes set"] = old(run, more)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        found["captured"] = old(graph.replay, more)
        return found

    def borders(self) -> Facts:
        """Microseconds from kernel to kernel, for each kind of kernel and way to launch them."""
        facts: dict[str, Json] = {}
        pair = [torch.zeros(MANY * BLOCK, device="cuda") for _ in range(2)]
        other = [torch.zeros(MANY * BLOCK, device="cuda") for _ in range(2)]
        for name in ("plain", "late", "soon", "never"):
            bases = array("Q", [t.data_ptr() for t in pair])
            run = self.run([name] * LONG, bases, MANY)
            graph = torch.cuda.CUDAGraph()
            run()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                run()
            row: dict[str, Json] = {"captured": _each(graph.replay)}
            for _ in range(3):
                run()
            row["bundle"] = _each(run)

            def moved(bases: array[int] = bases, run: Callable[[], int] = run) -> None:
                for k, t in enumerate(other if bases[0] == pair[0].data_ptr() else pair):
                    bases[k] = t.data_ptr()
                run()

            moved()
            row["bundle, nodes set once"] = _each(run)
            row["bundle, nodes set each time"] = _each(moved)
            start = time.perf_counter()
            for _ in range(20):
                moved()
            row["host, nodes set each time"] = round((time.perf_counter() - start) / 20 / LONG * 1e6, 3)
            facts[name] = row
        return facts


def _each(run: Callable[[], object]) -> float:
    """Microseconds of a kernel."""
    found: list[float] = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        start.record()
        for _ in range(10):
            run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 10 / LONG * 1e3)
    return round(statistics.median(found), 3)


def printed(kernel: int, variant: Variant) -> TritonSource:
    """The source of a kernel by number."""
    size = "i64" if variant.wide else "i32"
    arguments = (
        Argument("pointer", "a", "*fp32", 0, variant.aligned),
        Argument("pointer", "b", "*fp32", 1, variant.aligned),
        Argument("size", "n", size, 0, False),
        Argument("error", "error", "*i32", 0, False),
    )
    name = list(TEXTS)[kernel]
    text = f"# {name}\n" + HEAD + TEXTS[name]
    return TritonSource(text, "k0", arguments, 4, 1, variant)


def built(sources: Sequence[TritonSource], **where: Any) -> list[BuiltKernel]:
    """As compiled models have them; hasty ones are said to wait."""
    found = build_kernels(sources, **where)
    return [
        replace(b, facts=replace(b.facts, early=True), image=b.code) if s.text.startswith("# hasty") else b
        for s, b in zip(sources, found, strict=True)
    ]
