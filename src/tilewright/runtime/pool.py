"""The thread pool of generated kernels, as Python sees it; the work is in `native/pool.cpp`."""

from __future__ import annotations

import atexit
import ctypes
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from tilewright.errors import BuildError
from tilewright.options import Options
from tilewright.runtime.cache import Store
from tilewright.runtime.device import build_texts, load

VERSION = 2
SOURCE = Path(__file__).parent / "native" / "pool.cpp"


class Pool:
    """The process's pool: C addresses for generated code, and its size."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.tw_version.restype = ctypes.c_int64
        if library.tw_version() != VERSION:
            raise BuildError("the thread pool is of another version", phase="load")
        library.tw_workers.restype = ctypes.c_int64
        library.tw_resize.argtypes = [ctypes.c_int64, ctypes.c_int]
        library.tw_resize.restype = None
        library.tw_join.argtypes = [ctypes.c_void_p] * 3
        library.tw_join.restype = None
        self._library = library
        self.parallel: int = _address(library, "tw_parallel")
        """`void tw_parallel(task, context, int64_t count, int64_t grain, int more)`."""
        self.scratch: int = _address(library, "tw_scratch")
        """`void* tw_scratch(int64_t worker, int64_t bytes)`."""
        self.resizing: int = _address(library, "tw_resize")
        """`void tw_resize(int64_t threads, int pin)`."""

    @property
    def workers(self) -> int:
        """Threads that the next kernel may use, the caller included."""
        return self._library.tw_workers()

    def resize(self, threads: int, *, pin: bool = False) -> None:
        """Use `threads` threads from the next kernel on; `pin` binds the workers (not the caller) to cores."""
        self._library.tw_resize(threads, int(pin))

    def join(self, team: Team) -> None:
        """Run kernels on `team` wherever it has as many threads as they may use."""
        self._library.tw_join(team.run, team.size, team.number)

    def shutdown(self) -> bool:
        """Stop and join the workers; kernels run on their callers until the next `resize`. False if one hangs."""
        return self._library.tw_shutdown() == 0


@dataclass(frozen=True, slots=True)
class Team:
    """The threads of the process's OpenMP runtime, which torch's own ops run on: addresses of what starts a team, what
    says how many threads one has, and what tells a thread its number."""

    run: int
    size: int
    number: int


def team() -> Team | None:
    """The team that torch uses; None where its runtime has another interface: kernels then have their own threads."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        loaded = ctypes.CDLL(None)
        found = [
            _address(loaded, name) for name in ("GOMP_parallel", "omp_get_max_threads", "omp_get_thread_num")
        ]
    except (AttributeError, OSError):
        return None
    return Team(*found)


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


_pools: list[Pool] = []
_lock = threading.Lock()


def pool(store: Store, options: Options) -> Pool:
    """The one pool of this process, built and started on first use.

    Its threads end in an `atexit` hook, before the interpreter goes. Raises what `build` raises.
    """
    with _lock:
        if not _pools:
            built = Pool(load(build_texts([SOURCE.read_text(encoding="utf-8")], (), store, options)))
            atexit.register(built.shutdown)
            shared = team()
            if shared is not None:
                built.join(shared)
            _pools.append(built)
        return _pools[0]
