"""Compiler, machine facts, building and loading."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lighter import RUN_COMPILER
from tests.runtime.child_process import script

from tilewright.emit.source import Source
from tilewright.errors import BuildError, CompilerMissing, KernelRefused
from tilewright.options import Options
from tilewright.runtime.cpu import toolchain
from tilewright.runtime.store.cache import ContentStore
from tilewright.target import MemoryKind, preset

ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContentStore:
    """Builds for it are builds, not what another test has built."""
    monkeypatch.setattr(toolchain, "_run_compiler", RUN_COMPILER)
    return ContentStore(tmp_path / "kernels")


def fake_compiler(folder: Path, script: str, name: str = "fake++") -> str:
    """A program that claims to be a compiler."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# --- finding the compiler ------------------------------------------------


def test_finds_one() -> None:
    found = toolchain.find_compiler(Options())
    assert found is not None
    assert found.version
    assert found.family in ("gcc", "clang", "zig")


def test_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    assert toolchain.find_compiler(Options()) is None
    fake_compiler(tmp_path, "echo clang version 16", "clang++")
    found = toolchain.find_compiler(Options())
    assert found is not None and found.family == "clang"
    fake_compiler(tmp_path, "exit 1", "g++")  # there, but broken
    found = toolchain.find_compiler(Options())
    assert found is not None and found.family == "clang"
    fake_compiler(tmp_path, "echo g++ 12.2.0", "g++")
    found = toolchain.find_compiler(Options())
    assert found is not None and found.family == "gcc"
    wrapped = fake_compiler(tmp_path, "echo $1 is wrapped", "wrapper")
    monkeypatch.setenv("CXX", f"{wrapped} g++")
    found = toolchain.find_compiler(Options())
    assert found is not None and found.command == (wrapped, "g++")
    monkeypatch.setenv("CXX", "'unbalanced")
    found = toolchain.find_compiler(Options())
    assert found is not None and found.command[0].endswith("g++")
    chosen = fake_compiler(tmp_path, "echo chosen", "chosen")
    found = toolchain.find_compiler(Options(compiler=chosen))
    assert found is not None and found.command == (chosen,)


def test_zig_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain, "find_spec", lambda name: object())
    monkeypatch.setattr(toolchain.sys, "executable", fake_compiler(tmp_path, "echo clang version 22"))
    found = toolchain.find_compiler(Options())
    assert found is not None and found.family == "zig"


def test_a_named_compiler_must_work(tmp_path: Path) -> None:
    for name in ("no-such-compiler", str(tmp_path), fake_compiler(tmp_path, "exit 3")):
        with pytest.raises(CompilerMissing, match="does not run"):
            toolchain.find_compiler(Options(compiler=name))


def test_build_without_compiler(store: ContentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    with pytest.raises(CompilerMissing, match="install"):
        toolchain.build_texts([ANSWER], (), store, Options())


# --- the machine ----------------------------------------------------------


def system(root: Path, flags: str) -> Path:
    """A made-up /proc and /sys."""
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(
        f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    (root / "proc/meminfo").write_text("MemTotal:       8000000 kB\nMemFree: 1 kB\n")
    for i, (level, kind, size, cpus) in enumerate(
        [
            (1, "Data", "48K", "0"),
            (1, "Instruction", "64K", "0"),
            (2, "Unified", "2M", "0-1"),
            (3, "Unified", "24M", "0-3"),
        ]
    ):
        folder = root / f"sys/devices/system/cpu/cpu0/cache/index{i}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", cpus)):
            (folder / name).write_text(f"{text}\n")
    return root


V3 = "fpu sse avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(("flags", "name"), [("fpu sse2", "x86-64"), (V3, "x86-64-v3"), (V4, "x86-64-v4")])
def test_host_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, name: str) -> None:
    monkeypatch.setattr(toolchain, "usable_cores", lambda: 8)
    target = toolchain.host_target(system(tmp_path, flags), "x86_64")
    assert target.name == name
    assert target.cores == 8
    sizes = {level.kind: level.capacity for level in target.levels}
    assert sizes[MemoryKind.DEVICE] == 8_000_000 * 1024
    assert sizes[MemoryKind.L2] == 2 * 24 * 2**20  # two groups of four cores
    assert sizes[MemoryKind.SHARED] == 2 * 2**20


def test_a_cache_of_many_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two cores is told of a whole socket's cache, of which it gets a small part."""
    monkeypatch.setattr(toolchain, "usable_cores", lambda: 2)
    root = system(tmp_path, V4)
    (root / "sys/devices/system/cpu/cpu0/cache/index3/size").write_text("266240K\n")
    cache = toolchain.host_target(root, "x86_64").level(MemoryKind.L2)
    assert cache is not None and cache.capacity == 32 * 2**20


@pytest.mark.parametrize(
    ("vendor", "mkl", "slow"),
    [("AuthenticAMD", True, True), ("AuthenticAMD", False, False), ("GenuineIntel", True, False)],
)
def test_where_products_are_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, mkl: bool, slow: bool
) -> None:
    cpuinfo = system(tmp_path, V3) / "proc/cpuinfo"
    cpuinfo.write_text(f"vendor_id\t: {vendor}\n{cpuinfo.read_text()}")
    monkeypatch.setattr(toolchain.torch.backends.mkl, "is_available", lambda: mkl)
    assert toolchain.host_target(tmp_path, "x86_64").slow_products is slow


def test_host_target_without_facts(tmp_path: Path) -> None:
    assert not toolchain.host_target(tmp_path, "x86_64").slow_products
    assert toolchain.host_target(tmp_path, "AMD64").name == "x86-64"
    assert toolchain.host_target(tmp_path, "aarch64").name == "aarch64"
    assert toolchain.host_target(tmp_path, "arm64").vector_bytes == 16


def test_this_machine() -> None:
    target = toolchain.host_target()
    assert target.cores == toolchain.usable_cores()
    assert target.device.capacity > 2**28


@pytest.mark.parametrize(
    ("text", "bytes_"), [("32K", 32768), ("1M\n", 1 << 20), ("7", 7), ("", 0), ("x", 0), ("-1K", 0)]
)
def test_sizes(text: str, bytes_: int) -> None:
    assert toolchain._size(text) == bytes_


@pytest.mark.parametrize(("text", "count"), [("0", 1), ("0-3", 4), ("0-1,4-5", 4), ("", 0), ("x", 0)])
def test_counts(text: str, count: int) -> None:
    assert toolchain._count(text) == count


# --- build and load --------------------------------------------------------


def test_build_load_and_reuse(store: ContentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    target = toolchain.host_target()
    source = Source("cpp", ANSWER, ("answer",))
    path = toolchain.build([source], target, store, Options())
    assert toolchain.load(path).answer() == 42
    assert (path.parent / "unit0.cpp").read_text() == ANSWER
    monkeypatch.setattr(toolchain, "_run_compiler", None)  # must not be needed
    assert toolchain.build([source], target, ContentStore(store.root), Options()) == path


def test_two_units_are_linked(store: ContentStore) -> None:
    first = 'extern "C" int half(); ' + ANSWER.replace("return 42", "return 2 * half()")
    second = 'extern "C" int half() { return 21; }'
    path = toolchain.build_texts([first, second], toolchain.host_target().compiler_flags, store, Options())
    assert toolchain.load(path).answer() == 42


def test_key_sees_everything(store: ContentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {toolchain.build_texts([ANSWER], (), store, Options())}
    paths.add(toolchain.build_texts([ANSWER + "\n"], (), store, Options()))
    paths.add(toolchain.build_texts([ANSWER], preset("x86-64").compiler_flags, store, Options()))
    paths.add(toolchain.build_texts([ANSWER, ""], (), store, Options()))
    monkeypatch.setattr(toolchain, "_header_digest", lambda: "another header")
    paths.add(toolchain.build_texts([ANSWER], (), store, Options()))
    assert len(paths) == 5


def test_generated_code_may_include_the_header(store: ContentStore) -> None:
    text = '#include "vec.h"\n' + ANSWER.replace("42", "int(tw::reduce_add(tw::splat<float, 4>(10.5f)))")
    path = toolchain.build_texts([text], toolchain.host_target().compiler_flags, store, Options())
    assert toolchain.load(path).answer() == 42


def test_symbols_stay_inside(store: ContentStore) -> None:
    library = toolchain.load(
        toolchain.build_texts([ANSWER + "\nint hidden() { return 1; }"], (), store, Options())
    )
    with pytest.raises(AttributeError):
        library["_Z6hiddenv"]
    with pytest.raises(AttributeError):
        ctypes.CDLL(None)["answer"]


@pytest.mark.parametrize("units", [1, 2])
def test_wrong_code(store: ContentStore, units: int) -> None:
    texts = ["int f() { return nonsense; }", ANSWER][:units]
    with pytest.raises(BuildError, match="nonsense") as caught:
        toolchain.build_texts(texts, (), store, Options())
    assert "\n" not in str(caught.value)
    assert store.root is not None and not any(store.root.glob("*/*/unit.so"))


def test_missing_symbol_fails_on_load(store: ContentStore) -> None:
    text = 'extern "C" int nowhere(); ' + ANSWER.replace("42", "nowhere()")
    path = toolchain.build_texts([text], (), store, Options())
    with pytest.raises(BuildError, match="nowhere"):
        toolchain.load(path)


def test_not_a_library(tmp_path: Path) -> None:
    (tmp_path / "unit.so").write_bytes(b"no code")
    with pytest.raises(BuildError, match="load"):
        toolchain.load(tmp_path / "unit.so")
    with pytest.raises(BuildError, match="load"):
        toolchain.load(tmp_path / "absent.so")


def test_compiler_that_hangs(store: ContentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = 'case "$1" in --version) echo slow;; *) exec sleep 60;; esac'
    monkeypatch.setattr(toolchain, "BUILD_LIMITS", replace(toolchain.BUILD_LIMITS, max_cpp_seconds=0.3))
    with pytest.raises(BuildError, match="took over"):
        toolchain.build_texts([ANSWER, ANSWER], (), store, Options(compiler=fake_compiler(tmp_path, program)))


def test_what_a_compiler_that_hangs_runs_itself_ends_with_it(
    store: ContentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the driver `g++` runs `cc1plus`, which does the work."""
    log = tmp_path / "log"
    inner = fake_compiler(tmp_path, f"echo $$ >> {log}; sleep 60 & echo $! >> {log}; wait", "inner")
    program = f'case "$1" in --version) echo slow;; *) {inner}; exit 1;; esac'
    monkeypatch.setattr(toolchain, "BUILD_LIMITS", replace(toolchain.BUILD_LIMITS, max_cpp_seconds=2.0))
    with pytest.raises(BuildError, match="took over"):
        toolchain.build_texts([ANSWER, ANSWER], (), store, Options(compiler=fake_compiler(tmp_path, program)))
    started = log.read_text().split()
    assert started, "a shell starts in two seconds"
    end = (
        time.monotonic() + 20
    )  # what is killed ends when the system comes to it; by itself it would take a minute
    while any(map(_runs, started)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(_runs, started))


def _runs(pid: str) -> bool:
    """Whether a process runs still; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_compiler_that_writes_nothing(store: ContentStore, tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, "echo version")
    with pytest.raises(BuildError):
        toolchain.build_texts([ANSWER], (), store, Options(compiler=compiler))


def test_compiler_that_dies(store: ContentStore, tmp_path: Path) -> None:
    program = 'case "$1" in --version) echo dying;; *) kill -11 $$;; esac'
    with pytest.raises(BuildError, match="exit status"):
        toolchain.build_texts([ANSWER], (), store, Options(compiler=fake_compiler(tmp_path, program)))


def test_compiler_that_is_interrupted(store: ContentStore, tmp_path: Path) -> None:
    program = 'case "$1" in --version) echo stopped;; *) kill -2 $$;; esac'
    with pytest.raises(BuildError, match="was interrupted") as caught:
        toolchain.build_texts([ANSWER], (), store, Options(compiler=fake_compiler(tmp_path, program)))
    assert not isinstance(caught.value, KernelRefused), "no kernel is to blame"


def test_first_errors() -> None:
    text = "In file included from a\nx.cpp:3: error: bad\n  note: here\nx.cpp:4: error: worse\n\nerror: c\nerror: d\n"
    assert toolchain.first_errors(text) == "x.cpp:3: error: bad; x.cpp:4: error: worse; error: c"
    assert toolchain.first_errors("only talk\n") == "only talk"
    assert toolchain.first_errors("") == ""


def test_one_build_for_many(store: ContentStore, tmp_path: Path) -> None:
    """Threads that want the same unit at once: the compiler runs once."""
    real = toolchain.find_compiler(Options())
    assert real is not None and real.family in ("gcc", "clang")
    log = tmp_path / "log"
    program = (
        f'case "$1" in --version) echo counted;; *) echo run >> {log}; exec {real.command[0]} "$@";; esac'
    )
    options = Options(compiler=fake_compiler(tmp_path, program))
    paths: list[Path] = []

    def build() -> None:
        paths.append(toolchain.build_texts([ANSWER], (), ContentStore(store.root), options))

    threads = [threading.Thread(target=build) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(paths) == 6 and len(set(paths)) == 1
    assert log.read_text().split() == ["run"]


def test_two_processes_at_once(tmp_path: Path) -> None:
    text = script(
        "from pathlib import Path\n"
        "from tilewright.options import Options\nfrom tilewright.runtime.cpu import toolchain\n"
        "from tilewright.runtime.store.cache import ContentStore\n"
        f"p = toolchain.build_texts([{ANSWER!r}], (), ContentStore(Path({str(tmp_path / 'kernels')!r})), Options())\n"
        "print(toolchain.load(p).answer())"
    )
    runs = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) for _ in range(3)]
    assert [run.communicate(timeout=60)[0].strip() for run in runs] == [b"42"] * 3


def test_full_disk_for_building(store: ContentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(toolchain.tempfile, "TemporaryDirectory", full)
    with pytest.raises(BuildError, match="no space"):
        toolchain.build_texts([ANSWER], (), store, Options())


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_read_only_cache(tmp_path: Path) -> None:
    """A cache folder that is a file: the unit is built and used all the same."""
    (tmp_path / "kernels").write_text("")
    with pytest.warns(UserWarning, match="kernel cache"):
        path = toolchain.build_texts([ANSWER], (), ContentStore(tmp_path / "kernels"), Options())
    assert toolchain.load(path).answer() == 42
