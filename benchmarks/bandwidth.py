"""The machine's own copy and read bandwidth, from a small C file that is compiled when asked for."""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("copy.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-fno-tree-loop-distribute-patterns")
ORDINARY, NON_TEMPORAL, READ = 0, 1, 2


class NoYardstick(RuntimeError):
    """The copy program could not be built or run; the message says why."""


@dataclass(frozen=True)
class Bandwidth:
    """Medians in bytes per second; copies count read and written bytes."""

    ordinary: float
    non_temporal: float
    read: float

    @property
    def copy(self) -> float:
        """The better of the two kinds of store: what a memory-bound kernel is measured against."""
        return max(self.ordinary, self.non_temporal)


def build() -> Callable[..., int]:
    """Compile the C file and return its function. Raises `NoYardstick` without a C compiler."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NoYardstick(f"no C compiler ({', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "copy.so"
        flags = [flag for flag in FLAGS if "clang" not in compiler or "tree-loop" not in flag]
        result = subprocess.run(
            [compiler, *flags, str(SOURCE), "-o", str(library)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise NoYardstick(result.stderr.strip().splitlines()[0])
        function = ctypes.CDLL(str(library)).bandwidth
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_long,
        *[ctypes.c_int] * 3,
        ctypes.c_void_p,
    ]
    return function


class Yardstick:
    """Two touched buffers of `size` bytes and the compiled function."""

    def __init__(self, size: int, threads: int) -> None:
        self._function = build()
        self._from = torch.ones(size // 4)
        self._to = torch.zeros(size // 4)
        self._threads = threads

    def seconds(self, mode: int, repeats: int = 9) -> list[float]:
        """The times of `repeats` runs, after one that is dropped."""
        times = (ctypes.c_double * (repeats + 1))()
        arguments = (self._to.data_ptr(), self._from.data_ptr(), self._from.numel())
        if self._function(*arguments, self._threads, mode, repeats + 1, times) != 0:
            raise NoYardstick("no thread could be made")
        return list(times)[1:]

    def measure(self, repeats: int = 9) -> Bandwidth:
        """Medians of all three modes."""
        size = self._from.numel() * 4
        ordinary, past, read = (statistics.median(self.seconds(mode, repeats)) for mode in range(3))
        return Bandwidth(2 * size / ordinary, 2 * size / past, size / read)
