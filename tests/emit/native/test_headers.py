"""The headers compile without a warning for every compiler and instruction set that is at hand, and fast."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.emit.native.probe import clang

from tilewright.runtime.cpu.toolchain import COMMON, HEADERS
from tilewright.target import PRESETS

USES = """
#include "kernel.h"
using namespace tw;
#define API extern "C" __attribute__((visibility("default")))
template <class T, int L> static void memory_uses(const T* p, T* q, const i64* at) {
  auto m = first_lanes<L>(5);
  store_masked(q, load_masked<T, L>(p, m), m);
  scatter(q, load<i64, L>(at), m, take<T, L>(p, load<i64, L>(at), m));
  store_part(q, load_part<T, L>(p, at[0]), at[1]);
  store_stream(q, load<T, L>(p));
}
#define USE(T)                                            \\
  API void use_##T(const T* p, T* q, const i64* at) {     \\
    memory_uses<T, 16>(p, q, at), memory_uses<T, 8>(p, q, at), memory_uses<T, 1>(p, q, at); \\
  }
USE(float) USE(double) USE(half) USE(bf16) USE(i8) USE(i16) USE(i32) USE(i64) USE(u8) USE(bool)
API void functions(float* p) {
  auto x = load<float, 16>(p);
  store(p, floor(sqrt(exp(x)) * tanh(log(x))) + round_even(erf(x)) + sin(x) + pow(x, x));
}
"""
CPU_TARGETS = [t for t in PRESETS.values() if t.compiler_flags]
PROGRAMS = {"x86": ("g++", clang()), "aarch64": ("aarch64-linux-gnu-g++",)}


@pytest.mark.parametrize("target", CPU_TARGETS, ids=lambda t: t.name)
def test_compiles_everywhere(target: object, tmp_path: Path) -> None:
    name, flags = target.name, target.compiler_flags  # pyright: ignore[reportAttributeAccessIssue]
    programs = [p for p in PROGRAMS["aarch64" if name == "aarch64" else "x86"] if p and shutil.which(p)]
    if not programs:
        pytest.skip(f"no compiler for {name}")
    (tmp_path / "uses.cpp").write_text(USES)
    wanted = [f for f in (*COMMON, *flags) if f != "-w"] + ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    for program in programs:
        command = [program, *wanted, "-O1", "-I", str(HEADERS), "-c", "uses.cpp", "-o", "uses.o"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=False)
        assert run.returncode == 0, run.stderr.decode()[:2000]


def test_no_other_header_is_needed() -> None:
    own = {h.name for h in HEADERS.glob("*.h")}
    for header in HEADERS.glob("*.h"):
        for line in header.read_text(encoding="utf-8").splitlines():
            if line.startswith("#include"):
                assert line.split('"')[1:2] and line.split('"')[1] in own, f"{header.name}: {line}"


def test_cost_of_the_header(tmp_path: Path) -> None:
    """Printed, not gated: CPU time of an empty unit, with and without the headers."""
    program = next(p for p in ("g++", clang()) if p and shutil.which(p))
    best = {}
    for text in ("", '#include "kernel.h"\n'):
        (tmp_path / "unit.cpp").write_text(text)
        command = [program, *COMMON, "-I", str(HEADERS), "-c", "unit.cpp", "-o", "unit.o"]
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run(command, cwd=tmp_path, timeout=60, check=True)
            times.append(time.perf_counter() - start)
        best[text] = min(times)
    print(f"empty unit {best[''] * 1e3:.0f} ms, with the headers {max(best.values()) * 1e3:.0f} ms")
