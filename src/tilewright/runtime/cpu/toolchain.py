"""What this machine is and how code for it is built: hardware facts, the C++ compiler, build, load, the thread pool."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from tilewright import emit
from tilewright.emit.source import Source
from tilewright.errors import BuildError, CompilerMissing, KernelRefused
from tilewright.machine_memory import memory_bytes, read_text
from tilewright.options import Options
from tilewright.runtime.store.cache import ContentStore, digest
from tilewright.target import MemoryKind, Target, preset
from tilewright.tuning.input_limits import BUILD_LIMITS
from tilewright.tuning.runtime_thresholds import CPU_WORK

HEADERS = Path(emit.__path__[0]) / "native"
LIBRARY = "unit.so"
_FORMAT = "1"  # part of every key: raise it when the meaning of an entry changes

# What generated code means does not depend on the optimiser: no reassociation, wrapping integers, NaN and infinities
# kept; a * b + c rounds twice except where the code says fma, so that two loops compute the same of the same numbers: a
# score that exceeded the maximum of all scores would cost digits where its exponential is taken.
SEMANTICS = ("-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-ffp-contract=off")
COMMON = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    *SEMANTICS,
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-w",
)

# Passes of GCC that cost a fifth of its time and do nothing for straight vector code.
_LEAN = ("vectorize", "slp-vectorize", "vrp", "pre")
LEAN = (
    *(f"-fno-tree-{name}" for name in _LEAN),
    "-fno-schedule-insns2",
    "-fno-thread-jumps",
    "-fno-code-hoisting",
    "-fno-gcse",
)

Family = Literal["gcc", "clang", "zig"]


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: the command's first arguments, what it is, and its version line (part of the cache key)."""

    command: tuple[str, ...]
    family: Family
    version: str


# --- finding the compiler ------------------------------------------------


def find_compiler(options: Options) -> Compiler | None:
    """The first that answers: `options.compiler`, `$CXX`, g++, clang++, the `ziglang` package; None if none does.

    Raises `CompilerMissing` if `options.compiler` names one that does not work: a wish is not passed over in silence.
    """
    if options.compiler is not None:
        found = _probe((options.compiler,))
        if found is None:
            raise CompilerMissing(
                f"the compiler {options.compiler!r} does not run",
                phase="build",
                hint="give a path to g++ or clang++, or leave the option `compiler` out",
            )
        return found
    return next((c for c in map(_probe, _candidates()) if c is not None), None)


def _candidates() -> Iterable[tuple[str, ...]]:
    try:
        wished = tuple(shlex.split(os.environ.get("CXX", "")))
    except ValueError:  # unbalanced quotes
        wished = ()
    if wished:
        yield wished
    yield ("g++",)
    yield ("clang++",)
    if find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "cc", "-x", "c++")


def _probe(command: tuple[str, ...]) -> Compiler | None:
    path = shutil.which(command[0])
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return _asked((path, *command[1:]), found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=16)
def _asked(command: tuple[str, ...], changed: int, size: int) -> Compiler | None:
    """The compiler behind `command`, if it says its version; `changed` and `size` tell replaced programs apart."""
    try:
        run = subprocess.run(
            [*command, "--version"],
            capture_output=True,
            timeout=BUILD_LIMITS.max_probe_seconds,
            check=False,
            env=_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = run.stdout.decode(errors="replace")
    if run.returncode != 0 or not text.strip():
        return None
    family: Family = "zig" if "ziglang" in command else "clang" if "clang" in text else "gcc"
    return Compiler(command, family, " ".join(text.split("\n\n")[0].split()))


def _environment() -> dict[str, str]:
    """The caller's environment with the compiler's messages in English."""
    return {**os.environ, "LC_ALL": "C"}


# --- the machine -----------------------------------------------------------

ARM = frozenset({"aarch64", "arm64"})
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@functools.lru_cache(maxsize=4)
def host_target(root: Path = Path("/"), machine: str | None = None) -> Target:
    """The preset that fits this machine's instruction set, with its cores, caches and memory.

    `root` (where proc and sys are) and `machine` (as `platform.machine()`) are parameters for tests.
    """
    chip = (machine or platform.machine()).lower()
    if chip in ARM:
        name = "aarch64"
    else:
        flags = _cpu_flags(root / "proc/cpuinfo")
        name = "x86-64-v4" if flags >= _V4 else "x86-64-v3" if flags >= _V3 else "x86-64"
    cores = usable_cores()
    sizes = _cache_sizes(root / "sys/devices/system/cpu", cores)
    memory = memory_bytes(root)
    if memory:
        sizes[MemoryKind.DEVICE] = memory
    found = preset(name).resized(cores=cores, capacities=sizes)
    return replace(found, slow_products=chip not in ARM and _slow_products(root / "proc/cpuinfo"))


def usable_cores() -> int:
    """Cores that this process may use."""
    if sys.platform == "linux":
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    for line in read_text(cpuinfo).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _slow_products(cpuinfo: Path) -> bool:
    """Whether torch's matrix products are MKL's, which takes a slow path on processors that are not Intel's."""
    text = read_text(cpuinfo)
    return "vendor_id" in text and "GenuineIntel" not in text and torch.backends.mkl.is_available()


def _size(text: str) -> int:
    """Bytes of `32K`, `1M`, `1024`; 0 if it is none of these."""
    text = text.strip().upper()
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    digits = text.rstrip("KMG")
    return int(digits) * unit if digits.isdigit() else 0


def _count(cpus: str) -> int:
    """How many CPUs a list such as `0-3,8` names."""
    total = 0
    for part in cpus.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            total += (int(high) if high.isdigit() else int(low)) - int(low) + 1
    return total


def _cache_sizes(cpus: Path, cores: int) -> dict[MemoryKind, int]:
    """Bytes of a core's largest own cache and of the last-level cache, as far as the system tells."""
    found: dict[int, tuple[int, int]] = {}  # level to (bytes, CPUs that share it)
    for index in sorted(cpus.glob("cpu0/cache/index*")):
        if read_text(index / "type").strip() == "Instruction":
            continue
        level, size = read_text(index / "level").strip(), _size(read_text(index / "size"))
        if level.isdigit() and size:
            found[int(level)] = (size, max(1, _count(read_text(index / "shared_cpu_list"))))
    sizes: dict[MemoryKind, int] = {}
    if 2 in found:
        size, sharers = found[2]
        sizes[MemoryKind.SHARED] = size if sharers <= 2 else size // sharers
    if found and max(found) >= 3:
        size, sharers = found[max(found)]
        sizes[MemoryKind.L2] = min(size * max(1, cores // sharers), cores * CPU_WORK.max_cache_share_bytes)
    return sizes


# --- build -------------------------------------------------------------------


def build(sources: Sequence[Source], target: Target, store: ContentStore, options: Options) -> Path:
    """One shared object from translation units, compiled side by side and linked; from the store if it is there.

    Raises `CompilerMissing`, `KernelRefused` with the compiler's first error lines, or another `BuildError`.
    """
    return build_texts([source.text for source in sources], target.compiler_flags, store, options)


def build_texts(texts: Sequence[str], flags: Sequence[str], store: ContentStore, options: Options) -> Path:
    """As `build`, from plain texts and the flags of a target; what was given for them needs no compiler."""
    given = _GIVEN.get(texts_identity(texts, flags)) if _GIVEN else None
    if given is not None:
        return given
    compiler = find_compiler(options)
    if compiler is None:
        raise CompilerMissing(
            "no C++ compiler was found",
            phase="build",
            hint="install g++ or clang++, or `pip install ziglang`",
        )
    words = _adapted(compiler, flags)
    key = digest(*_toolchain(compiler, words), "--", *texts)
    found = store.get(key)
    if found is None:
        with store.single_flight(key):
            found = store.get(key) or _compile(compiler, texts, words, key, store)
    return found / LIBRARY


_GIVEN: dict[str, Path] = {}
"""Libraries that came with an artifact, by what they are built from."""


def texts_identity(texts: Sequence[str], flags: Sequence[str]) -> str:
    """Digest of all that a library depends on but the compiler."""
    return digest(_FORMAT, _header_digest(), f"{sys.platform} {platform.machine()}", *flags, "--", *texts)


def give_library(identity: str, path: Path) -> None:
    """From now on, the library at `path` is what this process takes for texts of an identity."""
    _GIVEN.setdefault(identity, path)


def is_given(identity: str) -> bool:
    """Whether there is such a library already."""
    return identity in _GIVEN


def toolchain(target: Target, options: Options) -> str:
    """Digest of all that a library depends on besides the text of its units; empty without a compiler."""
    compiler = find_compiler(options)
    return (
        "" if compiler is None else digest(*_toolchain(compiler, _adapted(compiler, target.compiler_flags)))
    )


def _toolchain(compiler: Compiler, words: Sequence[str]) -> tuple[str, ...]:
    return _FORMAT, _header_digest(), f"{sys.platform} {platform.machine()}", compiler.version, *words


@functools.cache
def _header_digest() -> str:
    """Digest of every header that generated code can include."""
    headers = sorted(HEADERS.glob("*.h"))
    return digest(*(part for h in headers for part in (h.name, h.read_bytes())))


def _compile(
    compiler: Compiler, texts: Sequence[str], flags: Sequence[str], key: str, store: ContentStore
) -> Path:
    try:
        with tempfile.TemporaryDirectory(prefix="tilewright-build-", ignore_cleanup_errors=True) as place:
            folder = Path(place)
            names = [f"unit{i}.cpp" for i in range(len(texts))]
            for name, text in zip(names, texts, strict=True):
                (folder / name).write_text(text, encoding="utf-8")
            _run_compiler(compiler, names, flags, folder)
            files = {name: (folder / name).read_bytes() for name in (LIBRARY, *names)}
            return store.put(key, files)
    except OSError as error:
        raise BuildError(
            f"cannot write files to build in: {error}",
            phase="build",
            hint="free some disk space or set TMPDIR",
        ) from error


def _run_compiler(compiler: Compiler, names: Sequence[str], flags: Sequence[str], folder: Path) -> None:
    """Compile each unit, side by side, and link; one unit goes in one step."""
    start = [*compiler.command, *flags, "-I", str(HEADERS)]
    end = ["-shared", "-o", LIBRARY, "-lm", "-pthread"]
    if len(names) == 1:
        _finish([_start([*start, names[0], *end], folder)])
        return
    objects = [f"{Path(name).stem}.o" for name in names]
    _finish(
        [_start([*start, "-c", n, "-o", o], folder) for n, o in zip(names, objects, strict=True)],
    )
    link = [word for word in compiler.command if word not in ("-x", "c++")]
    _finish([_start([*link, *objects, *end], folder)])


def _adapted(compiler: Compiler, flags: Sequence[str]) -> tuple[str, ...]:
    """All flags in this compiler's words. Zig names processors its own way and defaults to this one."""
    if compiler.family == "gcc":
        return (*COMMON, *LEAN, *flags)
    if compiler.family == "clang":
        return (*COMMON, *flags)
    march = next((f.removeprefix("-march=") for f in flags if f.startswith("-march=")), "")
    cpu = march.replace("-", "_") if march.startswith("x86-64") else "baseline"
    others = [f for f in flags if not f.startswith("-march=")]
    return (*COMMON, *others, f"-mcpu={cpu}", "-fno-sanitize=undefined")


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=_environment(),
        )  # fmt: skip
    except OSError as error:
        raise BuildError(f"the C++ compiler does not start: {error}", phase="build") from error


def _finish(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all; raise `KernelRefused` for the first that failed, `BuildError` where time ran out or somebody
    interrupted it, and leave none behind."""
    deadline = time.monotonic() + BUILD_LIMITS.max_cpp_seconds
    try:
        for process in running:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if process.returncode == -signal.SIGINT:  # Ctrl-C reaches compilers, too; no kernel is to blame
                hint = "compile again: what was built until then is kept"
                raise BuildError("the C++ compiler was interrupted", phase="build", hint=hint)
            if process.returncode != 0:
                text = first_errors(output.decode(errors="replace")) or f"exit status {process.returncode}"
                raise KernelRefused(f"the C++ compiler failed: {text}")
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"the C++ compiler took over {BUILD_LIMITS.max_cpp_seconds:.0f} s", phase="build"
        ) from error
    finally:
        for process in running:
            if process.poll() is None:
                _end(process)
            if process.stdout is not None:
                process.stdout.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a compiler and what it runs itself, where the system tells what that is. They share our process group, so
    that whoever ends or interrupts this group reaches them; so the group cannot be killed."""
    family = [process.pid]
    for pid in family:  # grows meanwhile
        # It starts nothing any more, and reaps nothing: numbers stay what they are.
        _signalled(pid, signal.SIGSTOP)
        family += map(int, read_text(Path(f"/proc/{pid}/task/{pid}/children")).split())
    for pid in family:
        _signalled(pid, signal.SIGKILL)
    process.wait()


def _signalled(pid: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # ended by itself, where SIGCHLD is ignored
        os.kill(pid, sign)


def first_errors(output: str, most: int = 3) -> str:
    """The first lines of a compiler's output that say `error`, else its first lines; joined by `; `."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "undefined" in line]
    return "; ".join((errors or lines)[:most])


# --- load --------------------------------------------------------------------


def load(path: Path) -> ctypes.CDLL:
    """Load a shared object; its symbols stay its own. Raises `BuildError` if the system refuses."""
    try:
        return ctypes.CDLL(os.fspath(path), mode=ctypes.RTLD_LOCAL | getattr(os, "RTLD_NOW", 0))
    except OSError as error:
        raise BuildError(f"built code does not load: {error}", phase="load") from error


def built(texts: Sequence[str], flags: Sequence[str], store: ContentStore, options: Options) -> ctypes.CDLL:
    """The library of `build_texts`, loaded; built once more, for this process, if another one has emptied the cache
    meanwhile. Raises what both raise."""
    path = build_texts(texts, flags, store, options)
    try:
        return load(path)
    except BuildError:
        if path.exists():
            raise
        return load(build_texts(texts, flags, ContentStore(None), options))
