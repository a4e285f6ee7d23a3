"""What code of our own fetches ahead lies in memory that is there: a processor looks long for a page that is not."""

from __future__ import annotations

import ctypes
from pathlib import Path

from tilewright.options import Options
from tilewright.runtime.cpu import toolchain
from tilewright.runtime.own.native import source
from tilewright.runtime.store.cache import ContentStore, default_root

NOTED = "void note(const void*);\n#define __builtin_prefetch(at, ...) note(at)\n"


def test_nothing_is_fetched_from_where_no_memory_is() -> None:
    options = Options()
    probe = (Path(__file__).parent / "fetch_probe.cpp").read_text(encoding="utf-8")
    flags, store = toolchain.host_target().compiler_flags, ContentStore(default_root(options))
    text = NOTED + source() + "#undef __builtin_prefetch\n" + probe
    fetches = toolchain.load(toolchain.build_texts([text], flags, store, options)).fetches
    fetches.restype, fetches.argtypes = ctypes.c_int64, [ctypes.c_int64]
    assert fetches(0) > 100_000
    assert fetches(1) == 0
