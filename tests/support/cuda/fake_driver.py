"""A driver library without a GPU, for tests of launches."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from tilewright.options import Options
from tilewright.runtime.cuda import kernels
from tilewright.runtime.cuda.driver import Device, Driver
from tilewright.runtime.store.cache import ContentStore, default_root

STREAM = 0x5EED
NUMBERS = (
    "log_count", "fail_launch", "fail_load", "fail_graph", "context_depth", "stream_captures", "graphs_alive",
    "nodes_set", "driver_version", "maps_made", "fail_map", "copies_made",
    "tables_written", "fail_early", "fail_copy", "copies_before_failure", "fail_replay", "replays",
)  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fake") / "libfake.so"
    source = Path(__file__).parent / "fake_cuda.cpp"
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", str(source), "-o", str(path)], check=True)
    return path


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    native = ctypes.CDLL(str(library))
    for name in NUMBERS:
        ctypes.c_int.in_dll(native, name).value = 0
    ctypes.c_void_p.in_dll(native, "current_context").value = None
    monkeypatch.setattr(kernels, "current_stream", lambda ordinal: STREAM + ordinal)
    return native


@pytest.fixture
def gpu(fake: ctypes.CDLL, library: Path) -> Device:
    options = Options()
    return Device(Driver(ContentStore(default_root(options)), options, str(library)), 1)
