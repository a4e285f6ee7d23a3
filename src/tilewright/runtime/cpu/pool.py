"""The thread pool of generated kernels, as Python sees it; the work is in `native/pool.cpp` and
`native/hold.cpp`."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tilewright.errors import BuildError
from tilewright.options import Options
from tilewright.runtime.store.cache import ContentStore

from .toolchain import built

ABI_VERSION = 6
SOURCES = tuple(Path(__file__).parents[1] / "native" / name for name in ("pool.cpp", "hold.cpp"))


def source() -> str:
    """The text of the native side."""
    return "".join(path.read_text(encoding="utf-8") for path in SOURCES)


class Pool:
    """The process's pool: C addresses for generated code, and its size."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.tw_version.restype = ctypes.c_int64
        if library.tw_version() != ABI_VERSION:
            raise BuildError("the thread pool is of another version", phase="load")
        library.tw_workers.restype = ctypes.c_int64
        library.tw_resize.argtypes = [ctypes.c_int64, ctypes.c_int]
        library.tw_resize.restype = None
        library.tw_join.argtypes = [ctypes.c_void_p] * 5
        library.tw_join.restype = None
        library.tw_sleeps.argtypes = [ctypes.c_int]
        library.tw_sleeps.restype = None
        library.tw_regions.restype = ctypes.c_int64
        self._library = library
        self.parallel: int = _address(library, "tw_parallel")
        """`void tw_parallel(task, context, int64_t count, int64_t grain, int more)`."""
        self.scratch: int = _address(library, "tw_scratch")
        """`void* tw_scratch(int64_t worker, int64_t bytes)`."""
        self.resizing: int = _address(library, "tw_resize")
        """`void tw_resize(int64_t threads, int pin)`."""
        self.hold: int = _address(library, "tw_hold")
        """`void tw_hold(void (*body)(void*), void* context)`: regions of `body` are handed to threads that stay."""
        self.held: int = _address(library, "tw_held")
        """`int64_t tw_held()`: whether the calling thread holds a team."""
        self.alone: Callable[[], None] = _held(library, "tw_alone")
        """From now to `together`, all that the calling thread runs, calls of torch included, runs on it alone."""
        self.together: Callable[[], None] = _held(library, "tw_together")
        """The end of `alone`; without one before, nothing happens."""
        self.share: Callable[[], None] = _held(library, "tw_share")
        """From now to `shared`, torch's threads work together; but as in `alone` for a while after they came late."""
        self.rejoin: Callable[[], None] = _held(library, "tw_rejoin")
        """Forget that a team came late, for timings that threads of other programs are not to decide."""
        self.shared: Callable[[int], None] = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(
            _address(library, "tw_shared")
        )
        """The end of `share`: of work that takes one core so many nanoseconds."""

    @property
    def workers(self) -> int:
        """Threads that the next kernel may use, the caller included."""
        return self._library.tw_workers()

    @property
    def regions(self) -> int:
        """Parallel regions that were entered so far."""
        return self._library.tw_regions()

    def resize(self, threads: int, *, pin: bool = False) -> None:
        """Use `threads` threads from the next kernel on; `pin` binds the workers (not the caller) to cores."""
        self._library.tw_resize(threads, int(pin))

    def join(self, team: Team) -> None:
        """Run kernels on `team` wherever it has as many threads as they may use."""
        self._library.tw_join(team.run, team.size, team.number, team.resize, team.resize_products)
        self._library.tw_sleeps(int(team.sleeps_at_once))

    def shutdown(self) -> bool:
        """Stop and join the workers; kernels run on their callers until the next `resize`. False if one hangs."""
        return self._library.tw_shutdown() == 0


@dataclass(frozen=True, slots=True)
class Team:
    """The threads of the process's OpenMP runtime, which torch's own ops run on: addresses of what starts a team, what
    says how many threads one has, what tells a thread its number, and what sets how many the calling thread's teams
    have (`resize_products`: those of torch's matrix products, None where they ask the runtime)."""

    run: int
    size: int
    number: int
    resize: int
    resize_products: int | None = None
    sleeps_at_once: bool = False
    """Whether its threads may sleep as soon as a region ends."""


def team() -> Team | None:
    """The team that torch uses; None where its runtime has another interface: kernels then have their own threads."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        loaded = ctypes.CDLL(None)
        run, size, number, resize = (_address(loaded, name) for name in _OPENMP)
    except (AttributeError, OSError):
        return None
    return Team(run, size, number, resize, _products(), sleeps_at_once(os.environ))


_OPENMP = ("GOMP_parallel", "omp_get_max_threads", "omp_get_thread_num", "omp_set_num_threads")


def sleeps_at_once(environment: Mapping[str, str]) -> bool:
    """Whether a team's threads without work may sleep at once, as its runtime reads the environment: where they are
    told to wait passively, or how long they watch for work."""
    passive = environment.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"
    return passive or any(name in environment for name in _WATCHES)


_WATCHES = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def _products() -> int | None:
    """What sets the number of threads of torch's matrix products where these are MKL's, which keep their own."""
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return _address(ctypes.CDLL(str(torch_cpu)), "MKL_Set_Num_Threads_Local")
    except (AttributeError, OSError):
        return None


def _held(library: ctypes.CDLL, name: str) -> Callable[[], None]:
    """A function of a few instructions, called without letting other Python threads run meanwhile."""
    return ctypes.PYFUNCTYPE(None)(_address(library, name))


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


_pools: list[Pool] = []
_lock = threading.Lock()


def pool(store: ContentStore, options: Options) -> Pool:
    """The one pool of this process, built and started on first use.

    Its threads end in an `atexit` hook, before the interpreter goes. Raises what `build` raises.
    """
    with _lock:
        if not _pools:
            started = Pool(built([source()], (), store, options))
            atexit.register(started.shutdown)
            shared = team()
            if shared is not None:
                started.join(shared)
            _pools.append(started)
        return _pools[0]


def running() -> Pool | None:
    """The pool of this process, if it has one yet."""
    return _pools[0] if _pools else None
