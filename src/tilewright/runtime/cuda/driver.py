"""GPUs as the driver knows them: contexts, loaded kernels, the word in which kernels report failed checks.

The work is in `native/launch_cuda.cpp` and `native/replay_cuda.cpp`, which are built and loaded when a GPU is first
used.
"""

# Torch has no quick public way to ask for a stream.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tilewright.errors import BuildError, TilewrightError
from tilewright.options import Options
from tilewright.runtime.cpu.toolchain import built
from tilewright.runtime.objects import attach
from tilewright.runtime.objects.attach import text_before
from tilewright.runtime.objects.reading import maker
from tilewright.runtime.store.cache import ContentStore

from .build import BuiltKernel

SOURCES = tuple(
    Path(__file__).parents[1] / "native" / name for name in ("launch_cuda.cpp", "replay_cuda.cpp")
)
LIBRARY = "libcuda.so.1"

current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
"""The driver's handle of torch's current stream on a device, by number."""


capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
"""Whether the current stream of the current device is being captured into a graph."""


def capturing_on(ordinal: int) -> Callable[[], bool]:
    """The same for the current stream of device `ordinal`."""
    if torch.cuda.device_count() <= 1:
        return capturing

    def ask() -> bool:
        with torch.cuda.device(ordinal):
            return capturing()

    return ask


class DriverError(TilewrightError, RuntimeError):
    """What the GPU's driver refused: a launch, a load, or everything after an earlier fault."""


class DriverOutOfMemory(DriverError, torch.OutOfMemoryError):
    """The driver had no memory left: for code, for what threads keep outside registers, for a graph."""


OUT_OF_MEMORY = 2
"""The driver's number for it."""


def _refused(code: int, message: str) -> DriverError:
    kind = DriverOutOfMemory if code == OUT_OF_MEMORY else DriverError
    return kind(message, phase="run")


class _Device(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("error_address", ctypes.c_uint64),
        ("put", ctypes.c_void_p),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("early", ctypes.c_int64),
        ("releases_first", ctypes.c_int64),
        ("max_blocks", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A kernel that a device can run: the address of its native description; what the driver says it uses."""

    address: int
    registers: int
    local_bytes: int
    held: object
    """What the address points to."""


def launcher_text() -> str:
    """The C++ text of what launches kernels and reads tensors."""
    return text_before("\n".join(source.read_text(encoding="utf-8") for source in SOURCES))


class Driver:
    """The driver's library, opened once for a process. Raises BuildError where there is none."""

    def __init__(self, store: ContentStore, options: Options, library: str = LIBRARY) -> None:
        native = built([launcher_text()], (), store, options)
        place, number = ctypes.c_void_p, ctypes.c_int64
        native.tw_cuda_open.argtypes = [ctypes.c_char_p, place]
        native.tw_cuda_error.restype = ctypes.c_char_p
        native.tw_cuda_device.argtypes = [ctypes.c_int, place]
        native.tw_cuda_load.argtypes = [place, place, ctypes.c_char_p, place, place]
        native.tw_cuda_launch.argtypes = [place, place]
        native.tw_cuda_launch.restype = number
        native.tw_cuda_replay.argtypes = [place] * 3
        native.tw_cuda_forget.argtypes = [place]
        native.tw_cuda_forget.restype = None
        self.native = native
        self.sees_objects = attach.attach(native)
        """Whether its functions may be called that look at objects."""
        self.replayer = maker(native.tw_cuda_replayer)
        """Makes a replay (see `replay.native`)."""
        self.launch: Callable[[int, int], int] = native.tw_cuda_launch
        """Runs the records at an address on a stream (see the native side)."""
        said = ctypes.c_char_p()
        code = native.tw_cuda_open(library.encode(), ctypes.byref(said))
        if code < 0:
            why = (said.value or b"").decode(errors="replace")
            raise BuildError(f"the GPU driver cannot be used: {why}", phase="load")
        self.check(code, "start")
        self.launches_early = bool(native.tw_cuda_launches_early())
        """Whether the driver launches kernels before the kernel in front has ended."""

    def check(self, code: int, what: str) -> None:
        """Raise DriverError if `code` is not 0."""
        if code:
            name = self.native.tw_cuda_error(code).decode(errors="replace")
            raise _refused(code, f"the GPU driver could not {what}: {name}")

    def run_failed(self, code: int) -> DriverError:
        """The error for a negative result of `launch`."""
        name = self.native.tw_cuda_error(-code).decode(errors="replace")
        return _refused(-code, f"a kernel could not be launched: {name}")


class Device:
    """One GPU, `ordinal` as torch counts them."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self._native = _Device()
        self.address = ctypes.addressof(self._native)
        """Of the native description."""
        driver.check(driver.native.tw_cuda_device(ordinal, self.address), f"open device {ordinal}")
        self.error_address = int(self._native.error_address)
        """Where kernels on the device write the number of a failed check (int32)."""
        self._word = ctypes.c_int32.from_address(int(self._native.error))
        self._loaded: dict[str, Loaded] = {}
        self._lock = threading.Lock()

    def failed(self) -> int:
        """The number of a check that failed in a kernel that has ended, 0 for none; it is then forgotten."""
        code = self._word.value
        if code:
            self._word.value = 0
        return code

    def replay(self, instance: int, stream: int) -> None:
        """Launch an instantiated graph on a stream."""
        code = self.driver.native.tw_cuda_replay(self.address, instance, stream)
        if code:
            raise self.driver.run_failed(-code)

    def load(self, built: BuiltKernel) -> Loaded:
        """Make `built` runnable; each kernel is loaded once."""
        key = built.folder.name
        with self._lock:
            found = self._loaded.get(key)
            if found is None:
                found = self._loaded[key] = self._load(built)
            return found

    def _load(self, built: BuiltKernel) -> Loaded:
        facts, image, used = built.facts, ctypes.create_string_buffer(built.code), (ctypes.c_int * 2)()
        max_blocks = multiprocessors(self.ordinal) if facts.persistent else 0
        kernel = _Kernel(None, facts.threads, facts.shared, facts.early, facts.releases_first, max_blocks)
        code = self.driver.native.tw_cuda_load(
            self.address, image, facts.entry.encode(), ctypes.byref(kernel), used
        )
        self.driver.check(code, f"load {facts.entry}")
        return Loaded(ctypes.addressof(kernel), used[0], used[1], kernel)


def multiprocessors(ordinal: int) -> int:
    """Of a GPU: how many blocks run at once that each fill one."""
    return int(torch.cuda.get_device_properties(ordinal).multi_processor_count)


_drivers: list[Driver] = []
_devices: dict[int, Device] = {}
_lock = threading.Lock()


def device(ordinal: int, store: ContentStore, options: Options) -> Device:
    """GPU number `ordinal` of this process. Raises what `build` raises, BuildError without a driver."""
    with _lock:
        if ordinal not in _devices:
            if not _drivers:
                _drivers.append(Driver(store, options))
            _devices[ordinal] = Device(_drivers[0], ordinal)
        return _devices[ordinal]


def opened() -> tuple[Device, ...]:
    """Every GPU that a compiled graph has used."""
    return tuple(_devices.values())
